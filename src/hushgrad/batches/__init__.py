"""Batches: nested structures of tensors whose first dimension is the records."""
