"""The forms of per-sample gradients: ways to compute them behind one interface."""
