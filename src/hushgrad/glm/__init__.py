"""Generalised linear models: closed-form per-sample norms, and what clipping does to them."""
