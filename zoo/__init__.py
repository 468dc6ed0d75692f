"""Networks that tests and benchmarks train: each stands here once, in any size."""
