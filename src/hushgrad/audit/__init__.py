"""Empirical attacks: measurements of what an adversary learns."""
