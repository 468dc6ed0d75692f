"""Training by one command: recipes, the loop, and a folder that explains itself."""
