"""Empirical attacks: what an adversary learns, measured and not argued."""
