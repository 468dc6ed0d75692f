"""The noise of a release that is mixed from draws of several steps, made again from their tags.

A draw is a function of (key, step, tag), so no draw is kept: the tags are, in the ledger, and
without the key they tell nothing. Where C⁻¹ is banded, a step's noise is a weighted sum of the last
b draws. Where C is banded it is a recurrence over the noise of the last b − 1 steps, which a
`NoiseBuffer` keeps in memory; without it, all steps are made again from the first on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from hushgrad.noise.compiled import compiled_add_normals, is_loaded
from hushgrad.noise.standard import AddWeighted, add_weighted_pairs, normal_pair
from hushgrad.noise.strategy import Strategy
from hushgrad.noise.threads import CHUNK, PIECE, each, even
from hushgrad.rng import Rng

Vectors = list[Float64[ndarray, "_"]]
"""The entries of a whole sum, as vectors that follow each other."""
