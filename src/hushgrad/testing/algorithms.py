"""Does an algorithm keep its promises? All that it knows of the records must come by releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hushgrad.algorithms import Algorithm
from hushgrad.algorithms.algorithm import State
from hushgrad.batches.nested import leaves_of
from hushgrad.noise import Noise
from hushgrad.rng import Rng
from hushgrad.run.execution import Execution
from hushgrad.run.plan import Plan, plan
from hushgrad.run.query import BatchPass
from hushgrad.run.step import StepContext
from hushgrad.types import Bounded, Refused, Released

_RECORDS, _FEATURES = 24, 3
_EXECUTION = Execution()


def check_algorithm(algorithm: Algorithm, *, steps: int = 6, **options: Any) -> None:
    """Check that an algorithm learns of the records by its releases alone, as its plan foresees.

    It is run on two data sets that share no record, while every release is replaced by values that
    do not depend on the sum. Then everything that it returns and remembers must be the same. So a
    gradient that reaches the estimate or the state past the noise is found. It is also run with
    real releases, which must be those that its `stage` or its `limit` states.

    Args:
        algorithm: the value to try.
        steps: how many steps it takes.
        options: for `hushgrad.plan`, where the algorithm needs other conditions: full batches, a
            relation, an accountant. Batches are of 8 of 24 records otherwise.

    Raises:
        AssertionError: where the contract is broken, with what was expected and what came.

    >>> from hushgrad.algorithms import Sgd
    >>> check_algorithm(Sgd())
    """
    usual: dict[str, Any] = {"batch": 8, "delta": 1e-3, "noise_multiplier": 1.0, "epochs": 1}
    try:
        conditions = usual | options | {"records": _RECORDS, "algorithm": algorithm}
        conditions["epochs"] = steps * conditions["batch"] / _RECORDS
        planned = plan(**conditions)
        _require_cost(planned)
        _require_stated_stages(planned)
        for seed in range(2):
            _taken(planned, seed, forced=False)
        one, other = (_taken(planned, seed, forced=True) for seed in range(2))
    except Refused as refusal:
        raise AssertionError(
            f"expected {algorithm!r} to release what its plan foresees, got: {refusal}"
        ) from refusal
    for step, (a, b) in enumerate(zip(one, other, strict=False)):
        for what, x, y in (
            ("estimate", a.estimate, b.estimate),
            ("state", a.state, b.state),
            ("parameters", a.iterate, b.iterate),
        ):
            if not _same(x, y):
                raise AssertionError(
                    f"expected the {what} of step {step} to depend on the records by its releases "
                    "alone, got another on other records although the releases were the same; "
                    "compute it from what context.release returns"
                )


class _Taken(NamedTuple):
    """What one step left."""

    estimate: Mapping[str, Tensor]
    state: State
    iterate: Mapping[str, Tensor]


def _require_cost(planned: Plan) -> None:
    epsilon = planned.epsilon
    if not 0 < epsilon < float("inf"):
        raise AssertionError(
            f"expected a run that costs something finite, got ε = {epsilon}; state the noise of "
            "each release in `stage`, or a `limit`"
        )


def _require_stated_stages(planned: Plan) -> None:
    """A step may release what the run was charged for, and an algorithm must not expect more."""
    for step in range(planned.steps):
        if planned.parts.stage(step, planned.conditions) != planned.stage(step):
            raise AssertionError(
                f"expected stage({step}) to be as `repeats` = {planned.parts.repeats} says, got "
                "another; leave `repeats` out, and each step is asked for"
            )


def _forced(bounded: Bounded, noise: Noise, *, rng: Rng, step: int) -> Released:
    """A release that looks like one and says nothing of the sum."""
    values = {
        name: torch.from_numpy(rng.derive(name).uniforms(x.numel())).reshape(x.shape)
        for name, x in bounded.sum.items()
    }
    return Released(values, noise.event, bounded.l2, rng.tag("forced")[:16])


def _taken(planned: Plan, seed: int, *, forced: bool) -> list[_Taken]:
    """The steps of a run on one of two data sets, by hand."""
    draws = torch.Generator().manual_seed(seed)
    data = torch.randn(_RECORDS, _FEATURES, generator=draws, dtype=torch.float64)
    labels = torch.randint(2, (_RECORDS,), generator=draws)
    network = nn.Linear(_FEATURES, 2, dtype=torch.float64)
    with torch.no_grad():
        network.weight.copy_(torch.arange(6).reshape(2, 3) / 6)
        network.bias.zero_()
    params = dict(network.named_parameters())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    parts, rng, state = planned.parts, Rng.fixed(0), State()
    found, spent = [], 0.0

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(network(batch[0]), batch[1], reduction="none")

    for step in range(planned.steps):
        positions = torch.arange(_RECORDS) if planned.sampling.sees_all else torch.arange(8)
        batch = (data[positions], labels[positions])
        permit = planned.permit(step, batch, spent=spent)
        if forced:
            permit.allowances = tuple(replace(a, add=_forced) for a in permit.allowances)
        work = BatchPass(_EXECUTION.objective(loss, params, (network,)), batch)
        clip = planned.clip.at(planned.clip.clip_norm)
        divisor = planned.divisor_at(step)
        context = StepContext(rng, permit, work, clip, divisor, planned.relation)
        estimate, state = parts.step(context, state)
        if not state.get("over"):
            permit.require_release()
        spent = permit.spent
        for name, p in params.items():
            p.grad = estimate[name].to(p.dtype)
        kept = {name: x.clone() for name, x in estimate.items()}
        parts.update(params, optimizer)
        iterate = {name: p.detach().clone() for name, p in params.items()}
        found.append(_Taken(kept, state, iterate))
        if state.get("over"):
            break
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether two structures have equal leaves."""
    left, right = leaves_of(one), leaves_of(other)
    return len(left) == len(right) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )
