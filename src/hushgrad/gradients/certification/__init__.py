"""Tests that a model's per-sample gradients are right, before anything is released."""
