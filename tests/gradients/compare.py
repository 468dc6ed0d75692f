"""The contract of per-sample gradients, checked against ordinary autograd one record at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hushgrad.gradients import Form, Gradients, dense, loop, per_sample, traced

# A record is run among copies of itself: kernels add up in another order below a few rows.
COPIES = 8

# In float64 the rules are exact; float32 shows what the model's own sums do where terms cancel.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class Expected:
    """Each record's loss and gradient, in float64 and from a run of its own."""

    losses: Tensor
    gradients: dict[str, Tensor]

    @property
    def norms(self) -> dict[str, Tensor]:
        return {
            name: g.reshape(len(g), -1).square().sum(1).sqrt() for name, g in self.gradients.items()
        }


def private(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def pick(batch: Any, index: list[int]) -> Any:
    """The records at these positions of a batch of tensors, tuples, lists and dictionaries."""
    if isinstance(batch, Tensor):
        return batch[index]
    if isinstance(batch, Mapping):
        return {key: pick(value, index) for key, value in batch.items()}
    return tuple(pick(value, index) for value in batch)


def size_of(batch: Any) -> int:
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def expected(
    loss: Callable[[Any], Tensor],
    params: Mapping[str, Tensor],
    batch: Any,
    modules: Sequence[nn.Module] = (),
) -> Expected:
    """What `torch.autograd.grad` says of each record by itself, with the buffers as they are."""
    losses, gradients = [], []
    for i in range(size_of(batch)):
        with _buffers_kept(modules):
            value = loss(pick(batch, [i] * COPIES))[0]
        found = torch.autograd.grad(value, list(params.values()), allow_unused=True)
        losses.append(value.detach())
        gradients.append(found)
    return Expected(torch.stack(losses).double(), stacked(params, gradients))


@contextmanager
def _buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give buffers their values back, so that no run starts from another's power iteration."""
    before = [(b, b.clone()) for module in modules for b in module.buffers()]
    yield
    for b, value in before:
        b.data = value


def stacked(
    params: Mapping[str, Tensor], gradients: Sequence[Sequence[Tensor | None]]
) -> dict[str, Tensor]:
    """One [batch, *shape] tensor in float64 for each parameter; an unused one gives zeros."""
    return {
        name: torch.stack(
            [torch.zeros_like(p).double() if g[k] is None else g[k].double() for g in gradients]
        )
        for k, (name, p) in enumerate(params.items())
    }


def tolerance_of(params: Mapping[str, Tensor]) -> float:
    """The precision that the parameters' own type, or autocast, leaves."""
    if torch.is_autocast_enabled("cpu"):
        return TOLERANCE[torch.bfloat16]
    return max(TOLERANCE[p.dtype] for p in params.values())


def agree(
    gradients: Gradients,
    want: Expected,
    params: Mapping[str, Tensor],
    tolerance: float | None = None,
) -> None:
    """Assert the contract: right norms, bounds that hold and are tight, right weighted sums."""
    tolerance, batch = tolerance or tolerance_of(params), len(want.losses)
    norms, floor = want.norms, 0.25 if tolerance > 1e-6 else 0.01
    total = torch.stack([*norms.values()]).square().sum(0).sqrt()
    assert gradients.losses.shape == (batch,)
    torch.testing.assert_close(
        gradients.losses.double(), want.losses, rtol=tolerance, atol=tolerance
    )
    upper = gradients.sq_norms()
    assert upper.keys() == gradients.squares.keys() == params.keys()
    for name, (estimate, slack) in gradients.squares.items():
        assert estimate.dtype == slack.dtype == upper[name].dtype == torch.float64
        # A part of the gradient far below the whole is known only as well as the whole allows.
        scale = torch.maximum(norms[name], floor * total).clamp_min(1e-30)
        off = ((estimate.clamp_min(0).sqrt() - norms[name]).abs() / scale).max()
        assert off <= tolerance, f"norm of {name} is off by {off:.2g}"
        assert (upper[name] >= estimate).all(), f"bound of {name} too low"
        assert (upper[name] <= estimate * 1.02 + 1e-30).all(), f"bound of {name} is loose"
    _sums_agree(gradients, want, params, tolerance, floor * total)


def _sums_agree(
    gradients: Gradients,
    want: Expected,
    params: Mapping[str, Tensor],
    tolerance: float,
    floor: Tensor,
) -> None:
    batch, norms, upper = len(want.losses), want.norms, gradients.sq_norms()
    random = torch.randn(batch, len(params), generator=torch.Generator().manual_seed(7)).double()
    random[::3] = 0  # absent records, beside the negative weights
    several = {name: random[:, k] for k, name in enumerate(params)}
    alone = [dict.fromkeys(params, one) for one in torch.eye(batch, dtype=torch.float64)]
    for weights in (several, *alone):
        sums = gradients.weighted_sum(weights)
        assert sums.keys() == params.keys()
        for name, got in sums.items():
            w = weights[name]
            assert got.shape == params[name].shape
            exact = torch.tensordot(w, want.gradients[name], 1)
            size = (w.abs() * torch.maximum(norms[name], floor)).sum().clamp_min(1e-30)
            off = (got.double() - exact).square().sum().sqrt() / size
            assert off <= tolerance, f"weighted sum of {name} is off by {off:.2g}"
            if weights is not several:
                # What privacy rests on: no record adds more than its stated bound.
                added = got.double().square().sum()
                assert added <= (w * upper[name]).sum() * (1 + 1e-6), f"{name} adds too much"


def kinds(gradients: Gradients) -> dict[str, str]:
    """The kinds of factors that each parameter's gradient consists of: `OneHot, Outer`."""
    return {
        name: ", ".join(sorted({type(factor).__name__ for factor in uses.values()}))
        for name, uses in gradients.factors.items()
    }


def check(
    loss: Callable[[Any], Tensor],
    params: Mapping[str, nn.Parameter] | nn.Module,
    batch: Any,
    *,
    form: Form | Sequence[Form] = traced,
    modules: Sequence[nn.Module] = (),
    idle: Collection[str] = (),
    tolerance: float | None = None,
) -> Gradients:
    """Take per-sample gradients and assert the contract; `form=traced` allows no other form."""
    if isinstance(params, nn.Module):
        modules = (params,)
        params = private(params)
    want = expected(loss, params, batch, modules)
    gradients = per_sample(loss, params, batch, form=form, modules=modules, idle=idle)
    agree(gradients, want, params, tolerance)
    return gradients


FORMS = pytest.mark.parametrize("form", [traced, dense, loop], ids=str)


def of_one_pass(loss: Callable[[Any], Tensor], params: Any, batch: Any, seed: int) -> Expected:
    """What autograd says of each record in one pass over the padded batch, drawn from `seed`."""
    size = size_of(batch)
    torch.manual_seed(seed)
    losses = loss(pick(batch, [*range(size), *[0] * (-size % 8)]))[:size]
    gradients = [
        torch.autograd.grad(value, [*params.values()], retain_graph=True, allow_unused=True)
        for value in losses
    ]
    return Expected(losses.detach().double(), stacked(params, gradients))


Forms = dict[str, str]


def assert_held(gradients: Gradients, model: nn.Module, forms: Forms) -> None:
    """Every parameter is held as the table says, and every line of the table is about some."""
    fitted = {name: _pattern(name, forms) for name in private(model)}
    held = {name: gradients.held_gradients[name].form for name in fitted}
    assert held == {name: forms[pattern] for name, pattern in fitted.items()}
    assert set(fitted.values()) == forms.keys()


def _pattern(name: str, forms: Forms) -> str:
    return next(pattern for pattern in forms if fnmatch(name.lower(), pattern))
