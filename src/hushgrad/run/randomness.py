"""The random numbers that a user's loss draws from torch: from the run's key, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hushgrad.rng import Rng


@contextmanager
def own_randomness(rng: Rng) -> Iterator[None]:
    """Draw dropout and augmentation from this key, and leave torch's own generator alone.

    How far torch's generator had advanced would reveal the sizes of batches to anyone who sees it.
    """
    with torch.random.fork_rng():
        if torch.accelerator.is_available():  # for the devices: it would take 0.1 ms for nothing
            torch.manual_seed(int(rng.words(1)[0] >> np.uint64(1)))
        # torch's Mersenne Twister on the CPU uses 32 bits of a seed, few enough to try them all.
        # So its whole state is set: 624 words of 32 bits, each in 64, after three of bookkeeping.
        state = torch.get_rng_state()
        drawn = rng.words(624, start=1) >> np.uint64(32)
        state.view(torch.int64)[3:627] = torch.from_numpy(drawn.astype(np.int64))
        torch.set_rng_state(state)
        yield
