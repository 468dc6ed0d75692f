"""A run: its plan, its steps, and what it must remember until the guarantee is written."""
