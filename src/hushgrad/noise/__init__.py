"""Adding noise: a bounded sum in, a release out, with the event that made it.

Noise that is drawn and added in float32 gives a known record away in one step: its tail ends at
5.77 standard deviations, and its bits lie on lattices that the sum shifts. So noise is made in
float64 from 52 bits of radius and 54 of angle, added in float64, and the result is rounded to a
public grid, on which every output can come from every sum.

A plan holds a kind of noise, `Independent(gaussian)` or `correlated(...)`; `gaussian(0.8)` and
`laplace(0.8)` are the noise of one release. To add a kind, write what `NoiseKind` lists.

Reference: `docs/noise.md` shows the attacks; Mironov 2012, On Significance of the Least
Significant Bits for Differential Privacy.
"""

from hushgrad.noise.correlated import Correlated, correlated
from hushgrad.noise.kinds import Independent, Noise, NoiseKind, gaussian, laplace
from hushgrad.noise.mixing import NoiseBuffer
from hushgrad.noise.optimal import Workload, best_cycle, least_error, momentum, prefix_sums
from hushgrad.noise.releasing import TAG_BYTES, grid, release
from hushgrad.noise.standard import standard_normal
from hushgrad.noise.strategy import Strategy, banded, banded_inverse

__all__ = [
    "TAG_BYTES",
    "Correlated",
    "Independent",
    "Noise",
    "NoiseBuffer",
    "NoiseKind",
    "Strategy",
    "Workload",
    "banded",
    "banded_inverse",
    "best_cycle",
    "correlated",
    "gaussian",
    "grid",
    "laplace",
    "least_error",
    "momentum",
    "prefix_sums",
    "release",
    "standard_normal",
]
