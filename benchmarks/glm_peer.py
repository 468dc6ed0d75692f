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
    """Print accuracies and seconds as JSON."""
    from diffprivlib.models import LogisticRegression

    warnings.simplefilter("ignore")
    found, (path, epsilon, seeds) = np.load(sys.argv[1]), sys.argv[1:]
    del path
    scores, seconds = [], []
    for _ in range(int(seeds)):
        start = time.perf_counter()
        # Rows have norm 1 at most; its intercept is a column of ones on top of that.
        model = LogisticRegression(epsilon=float(epsilon), data_norm=1.0, max_iter=1000)
        model.fit(found["x"], found["y"])
        seconds.append(time.perf_counter() - start)
        scores.append(float(model.score(found["x_test"], found["y_test"])))
    sys.stdout.write(json.dumps({"scores": scores, "seconds": seconds}))


if __name__ == "__main__":
    main()
