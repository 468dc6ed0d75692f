"""Made-up tables for linear models."""

import numpy as np


def table(n: int = 3000, p: int = 4, classes: int = 2, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, p))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    scores = 6 * x @ rng.standard_normal((p, classes))
    return x, scores.argmax(1)
