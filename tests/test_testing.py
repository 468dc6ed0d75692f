"""The contract suites pass what keeps its promises and name what does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad import clipping
from hushgrad.clipping.rules import Clip, custom
from hushgrad.events import Participation
from hushgrad.gradients import Form, Gradients, dense, loop, traced
from hushgrad.launch import demo
from hushgrad.rng import Rng
from hushgrad.sampling import (
    CyclicPoisson,
    FullBatch,
    Poisson,
    Shuffled,
    TruncatedPoisson,
    WithoutReplacement,
)
from hushgrad.sampling.scheme import Scheme
from hushgrad.testing import check_clip_rule, check_per_sample, check_sampler
from hushgrad.types import Relation


@pytest.mark.parametrize("groups", [1, 5, 33])
@pytest.mark.parametrize(
    "clip",
    [
        clipping.abadi(0.3),
        clipping.automatic(0.01),
        clipping.automatic(1e-6, 7.0),
        clipping.normalize(2.0),
        clipping.discard(5.0),
        clipping.reparameterized(0.1),
        custom(lambda norms: -0.5 / (1 + norms) / len(norms), bound=1.0, name="negative"),
    ],
    ids=lambda clip: clip.name,
)
def test_a_good_rule_passes(clip: Clip, groups: int) -> None:
    check_clip_rule(clip, groups)


def test_a_vector_of_clipping_norms_passes() -> None:
    check_clip_rule(clipping.abadi([0.1, 2.0, 30.0]), groups=3)


def _random(norms: Tensor) -> Tensor:
    return torch.rand(len(norms)) / (1 + norms) / len(norms)


BROKEN: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "over its bound": (
        lambda n: 1.5 / (n + 1e-3),
        r"a norm up to 1, got 1\.\d+; shorten.*larger bound",
    ),
    "in one group only": (lambda n: 1 / (n + 1), r"a norm up to 1, got 1\.4"),
    "unclipped": (lambda n: torch.ones_like(n), r"a norm up to 1, got \d"),
    "nan": (lambda n: n / n, r"norms \[0\.0, 0\.0\]: finite weights, got \[nan, nan\].*zero"),
    "inf": (lambda n: 0.5 / n, r"finite weights, got \[inf, inf\]"),
    "one number": (lambda n: 1 / (2 + n.max()), r"shape \(2,\), got \(\).*for each group"),
    "too many": (lambda n: torch.zeros(3), r"shape \(2,\), got \(3,\)"),
    "no tensor": (lambda n: 0.1, r"shape \(2,\), got <class 'float'>"),
    "random": (_random, r"again, got .*no random numbers"),
}


@pytest.mark.parametrize(("weigh", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_named(weigh: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_clip_rule(custom(weigh, bound=1.0, name="mine"), groups=2)


def test_a_rule_that_looks_at_other_records_is_named() -> None:
    class Coupled(Clip):
        def weights(self, norms: Tensor) -> Tensor:
            return norms.double() * 0 + 1 / norms.nan_to_num(1.0, 1.0).sum()

    clip = Coupled("coupled", lambda n, r: r / (n + 1), 1.0)
    with pytest.raises(AssertionError, match="the same weights for a record alone and in a batch"):
        check_clip_rule(clip)


def test_a_rule_that_counts_nan_is_named() -> None:
    class Careless(Clip):
        def weights(self, norms: Tensor) -> Tensor:
            return torch.nan_to_num(1 / (norms.double() + 1), 0.5)

    clip = Careless("careless", lambda n, r: r / (n + 1), 1.0)
    with pytest.raises(AssertionError, match="weight 0 at a norm of nan"):
        check_clip_rule(clip)


@pytest.mark.parametrize("form", [traced, dense, loop], ids=str)
@pytest.mark.parametrize("model", [demo.cnn, demo.transformer])
def test_the_own_forms_pass(form: Form, model: Callable[[], Any]) -> None:
    module, loss, batch = model()
    params = dict(module.named_parameters())
    few = (batch[0][:5], batch[1][:5]) if isinstance(batch, tuple) else batch[:5]
    check_per_sample(loss, params, few, form=form, modules=(module,))


class _Wrong(Gradients):
    """The loop's gradients with one promise broken."""

    def __init__(self, inner: Gradients, flaw: str) -> None:
        super().__init__(inner.factors, inner._params, inner._losses, inner._slots)
        self.flaw = flaw

    def weighted_sum(self, weights: Any, *, within: float = math.inf) -> dict[str, Tensor]:
        if self.flaw == "nan":
            return {
                name: sum(
                    torch.tensordot(weights[name].float(), f.materialised(), 1)
                    for f in uses.values()
                )
                for name, uses in self.factors.items()
            }
        sums = super().weighted_sum(weights, within=within)
        shift = 0.1 if self.flaw == "not linear" and len(self.losses) == 5 else 0.0
        return {name: x + shift * (weights[name] > 1.5).any() for name, x in sums.items()}

    def sq_norms(self) -> dict[str, Tensor]:
        factor = {"low": 0.99, "high": 1.1}.get(self.flaw, 1.0)
        return {name: factor * x for name, x in super().sq_norms().items()}

    def __add__(self, other: Gradients) -> Gradients:
        return self if self.flaw == "add" else _Wrong(super().__add__(other), self.flaw)

    def __rmul__(self, factor: float) -> Gradients:
        return _Wrong(super().__rmul__(factor), self.flaw)


FLAWS = {
    "low": "norms 1 to 1.01",
    "high": "norms 1 to 1.01",
    "nan": "a nan record of weight 0, .*got nan.*mask records",
    "not linear": "the weighted sum of one-record gradients",
    "add": r"0\.5 \* g \+ g, weight: norm estimates",
}


@pytest.mark.parametrize(("flaw", "message"), FLAWS.items(), ids=FLAWS)
def test_a_broken_form_is_named(flaw: str, message: str) -> None:
    layer = nn.Linear(3, 2)
    broken = Form(f"broken {flaw}", lambda *args: _Wrong(loop.run(*args), flaw))

    def loss(batch: Tensor) -> Tensor:
        return F.softplus(layer(batch)).sum(1)

    with pytest.raises(AssertionError, match=message):
        check_per_sample(loss, dict(layer.named_parameters()), torch.randn(5, 3), form=broken)


def test_a_refused_model_is_named() -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(AssertionError, match="to be certified, got: expected one loss for each"):
        check_per_sample(lambda x: layer(x).sum(), dict(layer.named_parameters()), torch.ones(4, 3))


# --- samplers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme",
    [
        Poisson(0.1),
        Poisson(1.0),
        CyclicPoisson(0.1, cycle=4),
        CyclicPoisson(0.2, cycle=5),
        CyclicPoisson(0.02, cycle=45),
        TruncatedPoisson(0.2, max_batch=12),
        WithoutReplacement(7),
        FullBatch(),
        Shuffled(7),
        Shuffled(60),
    ],
    ids=repr,
)
def test_a_good_sampler_passes(scheme: Scheme) -> None:
    check_sampler(scheme, steps=900)


class Changed:
    """A sampler that answers as another does, but for some of its answers."""

    def __init__(self, inner: Scheme, **answers: Any) -> None:
        self.__dict__.update(answers)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _biased(n: int, *, step: int, rng: Rng) -> Any:
    found = Poisson(0.1).draw(n, step=step, rng=rng)
    return found[found > 0]


GOOD, CYCLIC, TURNS = Poisson(0.1), CyclicPoisson(0.1, cycle=4), count()
BAD_SAMPLERS: dict[str, tuple[Scheme, dict[str, Any], str]] = {
    "twice": (GOOD, {"draw": lambda n, **_: np.array([1, 1])}, "each position at most once"),
    "outside": (GOOD, {"draw": lambda n, **_: np.array([n])}, "positions below 60, got"),
    "one batch": (GOOD, {"draw": lambda n, **_: np.arange(6)}, "at other steps and keys"),
    "by count": (
        GOOD,
        {"draw": lambda n, **_: np.array([next(TURNS) % n])},
        "the same batch whenever a step is drawn",
    ),
    "size": (GOOD, {"expected_batch": lambda n: 9.0}, "batches of 9 on average, got 6"),
    "not all": (GOOD, {"sees_all": True}, "every record in each batch"),
    "biased": (GOOD, {"draw": _biased}, "each record as often|on average"),
    "no epoch": (Shuffled(7), {"epoch": lambda n: 5}, "each record once in 5 steps"),
    "amplified twice": (
        GOOD,
        {"run_event": lambda e, **_: Poisson(0.05).run_event(e, num_records=60, num_steps=1)},
        "a record is in a batch with probability 0.1",
    ),
    "other groups at each step": (
        CYCLIC,
        {"draw": lambda n, *, step, rng: CYCLIC.draw(n, step=step, rng=rng.derive(step))},
        "a record at every 4th step only, got 4",
    ),
    "another rate": (
        GOOD,
        {"participation": Participation(1, 0.05)},
        r"each turn at rate 0\.05, got \[0\.1",
    ),
    "fewer turns": (
        CYCLIC,
        {"run_event": lambda e, **_: CYCLIC.run_event(e, num_records=60, num_steps=4)},
        "for two turns, got .*count a turn for each cycle",
    ),
    "no relation": (Shuffled(7), {"relations": frozenset({Relation.ADD_REMOVE})}, "an accountant"),
}


@pytest.mark.parametrize("name", BAD_SAMPLERS)
def test_a_bad_sampler_is_named(name: str) -> None:
    inner, answers, says = BAD_SAMPLERS[name]
    scheme: Any = Changed(inner, **answers)
    with pytest.raises(AssertionError, match=says):
        check_sampler(scheme, steps=900)
