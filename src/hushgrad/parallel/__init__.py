"""How many processes train together, and who of them does what."""
