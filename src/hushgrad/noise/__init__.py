"""Adding noise: a bounded sum in, a release out, with the event that made it.

Noise that is drawn and added in float32 gives a known record away in one step: its tail ends at
5.77 standard deviations, and its bits lie on lattices that the sum shifts. So noise is made in
float64 from 52 bits of radius and 54 of angle, added in float64, and the result is rounded to a
public grid, on which every output can come from every sum.

Reference: `docs/noise.md` shows the attacks; Mironov 2012, On Significance of the Least
Significant Bits for Differential Privacy.
"""

from hushgrad.noise.kinds import Noise, gaussian, laplace
from hushgrad.noise.releasing import grid, release
from hushgrad.noise.standard import standard_normal

__all__ = ["Noise", "gaussian", "grid", "laplace", "release", "standard_normal"]
