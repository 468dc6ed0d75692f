"""Fit diffprivlib's LogisticRegression on arrays in a file; run by an interpreter that has it.

Usage: python benchmarks/glm_peer.py FILE.npz EPSILON SEEDS

diffprivlib 0.6.6 does not import beside the version of scikit-learn that hushgrad is tested with,
so that it is run by an interpreter of its own (`python -m benchmarks.glm --peer-python PATH`).
"""

import json
import sys
import time
import warnings

import numpy as np


def main() -> None:
    """Print accuracies and seconds as JSON, of all fits but the first, which loads code."""
    from diffprivlib.models import LogisticRegression

    warnings.simplefilter("ignore")
    path, epsilon, seeds = sys.argv[1:]
    found, fits = np.load(path), []
    for _ in range(1 + int(seeds)):
        start = time.perf_counter()
        # Rows have norm 1 at most; its intercept is a column of ones on top of that.
        model = LogisticRegression(epsilon=float(epsilon), data_norm=1.0, max_iter=1000)
        model.fit(found["x"], found["y"])
        seconds = time.perf_counter() - start
        fits.append((float(model.score(found["x_test"], found["y_test"])), seconds))
    sys.stdout.write(json.dumps({"fits": fits[1:]}) + "\n")


if __name__ == "__main__":
    main()
