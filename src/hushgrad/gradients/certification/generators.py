"""Python's and NumPy's random generators: chosen for a pass, and put back after it."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from torch import nn

from hushgrad.gradients.objective import Objective, references_of
from hushgrad.types import Refused

_WORDS = 624  # a Mersenne twister's state, in 32-bit words
_FORCED = 64  # so many words are forced: a loop that rejects draws must come to an end


class GlobalGenerators:
    """The two generators that `random.random()` and `np.random.rand()` draw from."""

    def __init__(self) -> None:
        self._saved = random.getstate(), np.random.get_state()

    def start(self, quantile: float | None, seed: int) -> None:
        """Let the next draws be this quantile, or what follows from the seed."""
        python, numpy_ = _states(quantile, seed)
        random.setstate(python)
        np.random.set_state(numpy_)

    def moved(self) -> bool:
        """Was anything drawn since the start? Both then stood at the state's first word."""
        words, numpy_ = random.getstate()[1], np.random.get_state(legacy=False)
        return bool(words[-1] or numpy_["state"]["pos"])

    def restore(self) -> None:
        """Go on as if nothing had been drawn."""
        python, numpy_ = self._saved
        random.setstate(python)
        np.random.set_state(numpy_)


@functools.lru_cache(maxsize=256)
def _states(quantile: float | None, seed: int) -> tuple[Any, Any]:
    """What Python's and NumPy's generators are set to; kept, since to build it takes longer."""
    words = _words(quantile, seed)
    return (3, (*words, 0), None), ("MT19937", np.array(words, np.uint32), 0, 0, 0.0)


def _words(quantile: float | None, seed: int) -> tuple[int, ...]:
    """A state whose first outputs are the quantile, each a 32-bit share of it."""
    generator = random.Random(seed)
    generator.random()  # before the first draw the words are still much alike from seed to seed
    _, state, _ = generator.getstate()
    if quantile is None:
        return tuple(state[:_WORDS])
    forced = _untempered(min(int(quantile * 2**32), 2**32 - 1))
    return (*[forced] * _FORCED, *state[_FORCED:_WORDS])


def _untempered(output: int) -> int:
    """The word of the state that a Mersenne twister puts out as this; its steps, undone."""
    x = output
    x ^= x >> 18
    x ^= (x << 15) & 0xEFC60000
    y = x
    for _ in range(4):  # each round mends seven more bits
        y = x ^ ((y << 7) & 0x9D2C5680)
    x = y & 0xFFFFFFFF
    y = x
    for _ in range(2):  # and here eleven
        y = x ^ (y >> 11)
    return y


# --- generators of one's own --------------------------------------------------------------------

_GLOBAL = (random.random.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]
_OWN = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)


@contextmanager
def refuse_own_generators(objective: Objective) -> Iterator[None]:
    """Refuse a loss that draws from a generator of its own, other than torch's.

    Certification sets torch's draws one by one, at extremes too, but cannot set these.
    """
    before = [(generator, _state_of(generator)) for generator in _own_generators(objective)]
    try:
        yield
    finally:  # also of a refusal it may be the reason
        _refuse_draws(before)


def _refuse_draws(before: list[tuple[Any, str | None]]) -> None:
    for generator, state in before:
        if state is None or _state_of(generator) != state:
            raise Refused(
                f"the loss or the model draws from a {type(generator).__name__} of its own, whose "
                "draws certification cannot choose, and a coupling of records might hide behind a "
                "rare one; draw with torch, from its own generator or a torch.Generator"
            )


def _own_generators(objective: Objective) -> list[Any]:
    children = [m for module in objective.modules for m in module.modules()]
    found = [*references_of(objective.loss)]
    for child in children:
        found += vars(child).values()
        if not type(child).__module__.startswith("torch."):
            found += references_of(type(child).forward)
    inner = [x for held in found for x in _inside(held)]
    own = {id(x): x for x in map(_behind, [*found, *inner]) if isinstance(x, _OWN)}
    return [x for x in own.values() if not any(x is common for common in _GLOBAL)]


def _inside(held: Any) -> Iterable[Any]:
    """What a container, or an object of a plain class, holds."""
    if isinstance(held, dict):
        return held.values()
    if isinstance(held, list | tuple):
        return held
    return (
        ()
        if isinstance(held, type | nn.Module | ModuleType)
        else getattr(held, "__dict__", {}).values()
    )


def _behind(x: Any) -> Any:
    """The generator that a method such as `generator.random` belongs to."""
    return getattr(x, "__self__", x) if callable(x) else x


def _state_of(generator: Any) -> str | None:
    """None of one without a state, which asks the operating system."""
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    if isinstance(generator, np.random.BitGenerator):
        return repr(generator.state)
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False))
    try:
        return repr(generator.getstate())
    except NotImplementedError:
        return None
