"""Ways in which an earlier version broke its bound, or looked away: each stays closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import check, private
from torch import Tensor, nn

from hushgrad import Refused, clipped_sum
from hushgrad.clipping.rules import automatic, normalize
from hushgrad.gradients import certificate_for, loop, per_sample, traced
from hushgrad.gradients.certification.deterministic import WithoutRandomness
from hushgrad.gradients.factors.choice import costs
from hushgrad.gradients.factors.kinds import OneHot, Outer

MEETING = "depends on other records"


def moved(
    loss: Callable[[Any], Tensor], model: nn.Module, one: Any, other: Any, **options: Any
) -> float:
    """How far apart the clipped sums of two batches are, in multiples of the bound."""
    sums = [
        clipped_sum(loss, private(model), batch, modules=(model,), **options)
        for batch in (one, other)
    ]
    squares = [
        (sums[0].sum[n].double() - sums[1].sum[n].double()).square().sum() for n in sums[0].sum
    ]
    return float(torch.stack(squares).sum().sqrt()) / sums[0].l2


# --- randomness that hides a coupling ---


class Sometimes(nn.Module):
    """Centres the batch in some of its passes."""

    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 1), draw

    def forward(self, x: Tensor) -> Tensor:
        if self.draw():
            x = x - x.mean(0)
        return self.layer(x)[:, 0]


DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand, low": lambda: torch.rand(()) < 0.3,
    "rand, high": lambda: torch.rand(()) > 0.7,
    "randn": lambda: torch.randn(()) > 1.0,
    "bernoulli": lambda: torch.bernoulli(torch.tensor(0.2)) == 1,
    "randint": lambda: torch.randint(0, 10, ()) == 9,
    "uniform_": lambda: torch.empty(()).uniform_(-1, 1) < -0.5,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_mixing_in_some_random_draws_only(draw: Callable[[], Tensor]) -> None:
    model = Sometimes(draw)
    with pytest.raises(Refused, match=MEETING):
        per_sample(lambda x: (model(x) - 1).square(), private(model), torch.randn(16, 4))


def test_noise_scaled_by_the_batch() -> None:
    layer = nn.Linear(4, 1)

    def loss(x: Tensor) -> Tensor:
        return layer(x + torch.randn_like(x) * x.abs().amax(0))[:, 0].square()

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), torch.randn(16, 4))


@pytest.mark.parametrize("quantile", [0.01, 0.5, 0.99])
def test_draws_are_the_quantile_asked_for(quantile: float) -> None:
    with WithoutRandomness(quantile) as neutral:
        assert not neutral.drew
        assert torch.rand(3).tolist() == pytest.approx([quantile] * 3)
        assert torch.randint(5, 105, (2,)).tolist() == [int(5 + 100 * quantile)] * 2
        assert neutral.drew


# --- certificates that outlive what they speak of ---


def _scaled(layer: nn.Module, beta: float) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        y = layer(x)[:, 0]
        return (y - beta * y.mean().detach() if beta else y).square()

    return loss


def _default(layer: nn.Module, inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor, inner: Callable[[Tensor], Tensor] = inner) -> Tensor:
        return inner(layer(x)).square().sum(1)

    return loss


class Scored:
    """A loss that is an object."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.dim = layer, 1

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x).softmax(self.dim).square().sum(1)


def warmed(loss: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    """Six steps: the next test is at the eighth."""
    for _ in range(6):
        per_sample(loss, private(model), torch.randn(16, 4), modules=(model,))


def test_a_number_that_was_zero() -> None:
    layer = nn.Linear(4, 1)
    warmed(_scaled(layer, 0.0), layer)
    with pytest.raises(Refused, match=MEETING):
        per_sample(_scaled(layer, 1.0), private(layer), torch.randn(16, 4), modules=(layer,))


def test_another_function_as_a_default() -> None:
    layer = nn.Linear(4, 3)
    warmed(_default(layer, lambda h: h - h.mean(1, True)), layer)
    mixing = _default(layer, lambda h: h - h.mean(0, True))
    with pytest.raises(Refused, match=MEETING):
        per_sample(mixing, private(layer), torch.randn(16, 4), modules=(layer,))


def test_an_attribute_of_an_object() -> None:
    layer = nn.Linear(4, 3)
    loss = Scored(layer)
    warmed(loss, layer)
    loss.dim = 0
    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), torch.randn(16, 4), modules=(layer,))


def test_an_entry_of_a_dictionary() -> None:
    layer, options = nn.Linear(4, 3), {"dim": 1}

    def loss(x: Tensor) -> Tensor:
        return layer(x).softmax(options["dim"]).square().sum(1)

    warmed(loss, layer)
    options["dim"] = 0
    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), torch.randn(16, 4), modules=(layer,))


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def _exchanged(model: nn.Sequential) -> None:
    model[1] = Centre()


def _hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda m, x, y: y - y.mean(0))


def _hooked_before(model: nn.Sequential) -> None:
    model[0].register_forward_pre_hook(lambda m, x: (x[0] - x[0].mean(0),))


@pytest.mark.parametrize("change", [_exchanged, _hooked, _hooked_before])
def test_a_part_of_the_model(change: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Identity())

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    warmed(loss, model)
    change(model)
    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(model), torch.randn(16, 4), modules=(model,))


# --- records that are all alike ---

ALIKE = {
    "one of yes and no": torch.tensor([[True, False, True, True]]),
    "one of zeros": torch.zeros(1, 4, dtype=torch.long),
    "many of one": torch.full((8, 4), 3),
}


@pytest.mark.parametrize("batch", ALIKE.values(), ids=ALIKE)
def test_records_that_are_alike_are_varied(batch: Tensor) -> None:
    layer = nn.Linear(4, 1)

    def loss(x: Tensor) -> Tensor:
        h = layer(x.float())[:, 0]
        return (h - 0.9 * h.mean().detach()).square()

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), batch)


def test_where_they_cannot_be_varied_the_next_batch_is_tested() -> None:
    """A loss that takes no other record than the first."""
    layer = nn.Linear(4, 1)
    taken = [torch.ones(4)]

    def loss(x: Tensor) -> Tensor:
        for row in x:
            if not any(torch.equal(row, known) for known in taken):
                raise IndexError("no such record")
        h = layer(x)[:, 0]
        return (h - 0.9 * h.mean().detach()).square()

    per_sample(loss, private(layer), torch.ones(8, 4))
    taken.append(torch.zeros(4))
    batch = torch.ones(8, 4)
    batch[::2] = 0
    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), batch)


def test_a_batch_of_nothing_but_nan_after_certification() -> None:
    layer = nn.Linear(4, 1)
    batch = torch.randn(16, 4)

    def loss(x: Tensor) -> Tensor:
        return layer(x)[:, 0].square()

    per_sample(loss, private(layer), batch)
    found = per_sample(loss, private(layer), batch * torch.nan)
    assert not found.sq_norms()["weight"].isfinite().any()


# --- a coupling too weak for a tolerance ---

WEAK: dict[str, Callable[[Tensor], Tensor]] = {
    "a hundred thousandth of the largest": lambda h: h + 1e-5 * h.amax(0).detach(),
    "a hundred millionth of the mean": lambda h: h + 1e-8 * h.mean(0),
    "two hundredths in bfloat16": lambda h: (h.bfloat16() + 0.02 * h.bfloat16().amax(0)).float(),
}


@pytest.mark.parametrize("couple", WEAK.values(), ids=WEAK)
def test_a_weak_coupling_is_seen_beside_loud_records(couple: Callable[[Tensor], Tensor]) -> None:
    layer = nn.Linear(4, 3)
    batch = (torch.randn(64, 4), torch.randint(3, (64,)))

    def loss(b: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(couple(layer(b[0])), b[1], reduction="none")

    with pytest.raises(Refused, match=MEETING):
        per_sample(loss, private(layer), batch)


# --- arithmetic ---


@pytest.mark.parametrize(("t", "d"), [(384, 768), (40, 600), (5, 2000), (900, 30)])
def test_the_form_of_a_gradient_does_not_depend_on_the_batch(t: int, d: int) -> None:
    """Else all norms move by their slack when one record comes."""
    forms = set()
    for batch in (1, 8, 100, 448, 449, 5000):
        a = torch.empty(1, 1, 1).expand(batch, t, d)
        cost = costs((Outer(a, a),), (d, d))
        forms.add(min(cost, key=lambda form: cost[form][0]))
    assert len(forms) == 1


def test_padding_is_wide_enough_for_the_kernels_of_the_model() -> None:
    """The end of a tensor is computed by other code: 8 records of 3 features are nothing else."""
    weight, batch = nn.Parameter(torch.ones(3)), torch.randn(9, 3)
    values = torch.randn(4096, 3)
    by_eights = torch.cat([F.softplus(part) for part in values.split(8)])
    certificate = certificate_for(
        lambda x: (F.softplus(x) * weight).sum(1), {"weight": weight}, batch
    )
    if torch.equal(by_eights, F.softplus(values)):
        pytest.skip("on this processor the kernel ends as it begins")
    assert certificate.multiple > 8
    plain = certificate_for(lambda x: (x * weight).sum(1), {"weight": weight}, batch)
    assert plain.multiple == 8


def test_a_factor_that_its_weight_would_overflow() -> None:
    layer = nn.Linear(2, 8, bias=False)
    x, scale = torch.randn(8, 2), torch.ones(8, 1)
    x[0], scale[0] = torch.tensor([2e38, 0.0]), 1e-40

    def loss(b: Sequence[Tensor]) -> Tensor:
        return (layer(b[0]) * b[1]).sum(1)

    for clip in (automatic(), normalize()):
        assert moved(loss, layer, (x, scale), (x[1:], scale[1:]), clip=clip) <= 1


def test_a_bound_so_large_that_a_weight_would_overflow() -> None:
    layer = nn.Linear(2, 1, bias=False)
    x = torch.randn(8, 2)
    x[0] *= 1e-30
    assert moved(lambda b: layer(b)[:, 0], layer, x, x[1:], clip=normalize(1e10)) <= 1


def test_padding_that_drew_infinity_is_masked() -> None:
    layer = nn.Linear(4, 1, bias=False)
    for seed in range(20):
        torch.manual_seed(seed)
        bounded = clipped_sum(
            lambda x: layer(x)[:, 0] / (torch.rand(len(x)) > 0.3).float(),
            private(layer),
            torch.randn(3, 4),
            modules=(layer,),
        )
        assert bounded.sum["weight"].isfinite().all(), seed


class Gated(nn.Module):
    """Two gates at zero hide a layer that flattens with time in front."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.hidden = nn.Linear(6, 3), nn.Linear(6, 6)
        self.gates = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        turned = x.transpose(0, 1)
        z = self.hidden(turned.reshape(-1, 6)).reshape(turned.shape).transpose(0, 1)
        return self.head(x + self.gates[0] * self.gates[1] * z).mean(1)


def test_a_layer_behind_closed_gates_is_tested_all_the_same() -> None:
    model = Gated()
    batch = torch.randn(16, 5, 6)

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), torch.ones(len(x), dtype=torch.long), reduction="none")

    warmed_batches = [torch.randn(16, 5, 6) for _ in range(6)]
    for one in warmed_batches:
        per_sample(loss, private(model), one, modules=(model,), form=traced)
    with torch.no_grad():
        for gate in model.gates:
            gate.fill_(3.0)
    check(loss, model, batch, form=traced)


def test_a_frequent_word_is_added_up_without_loss() -> None:
    index, b = torch.zeros(1024, 50, dtype=torch.long), torch.rand(1024, 50, 3)
    table = OneHot(index, b, rows=7).weighted_sum(torch.ones(1024, dtype=torch.float64), rows=1)
    exact = b.double().sum((0, 1))
    torch.testing.assert_close(table[0].double(), exact, rtol=1e-7, atol=0)
    assert not table[1:].any()


def test_one_table_in_two_types() -> None:
    table = nn.Embedding(6, 4)

    def loss(index: Tensor) -> Tensor:
        h = F.embedding(index, table.weight) @ table.weight.T
        return h.square().sum((1, 2)) + F.embedding(index, table.weight.double()).pow(3).sum((1, 2))

    check(loss, table, torch.randint(6, (5, 3)), form=traced)


# --- what leaves beside the sum ---


class Observing(nn.Module):
    """Buffers that ordinary records leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("outliers", torch.zeros(()))
        self.register_buffer("largest", torch.tensor(100.0))

    def forward(self, x: Tensor) -> Tensor:
        self.outliers.add_((x.abs() > 50).sum())
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return self.layer(x)


@pytest.mark.parametrize("form", [traced, loop], ids=str)
def test_a_buffer_that_only_rare_records_write(form: Any) -> None:
    model = Observing()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    for _ in range(4):
        per_sample(loss, private(model), torch.randn(16, 4), modules=(model,), form=form)
    batch = torch.randn(16, 4)
    batch[-1] = 1234.0
    per_sample(loss, private(model), batch, modules=(model,), form=form)
    assert (model.outliers.item(), model.largest.item()) == (0.0, 100.0)


def test_a_complex_parameter_is_refused() -> None:
    weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    with pytest.raises(Refused, match=r"complex64, and only real .* torch\.complex"):
        per_sample(lambda x: (x * weight.abs()).sum(1), {"weight": weight}, torch.randn(8, 3))


def test_an_array_in_the_batch_is_refused() -> None:
    layer = nn.Linear(3, 1)
    batch = {"x": torch.randn(8, 3), "y": np.zeros(8)}
    with pytest.raises(Refused, match=r"NumPy array in the batch.*torch\.from_numpy"):
        per_sample(lambda b: layer(b["x"])[:, 0], private(layer), batch)


@pytest.mark.parametrize("use", ["norms", "sums", "scaled", "added"])
def test_a_batch_that_is_written_before_its_gradients_are_used(use: str) -> None:
    """A loader may reuse its buffer: norms of one batch would clip another."""
    layer, batch = nn.Linear(16, 16), torch.randn(8, 16)  # eight rows as they are, not copied
    found = per_sample(lambda x: layer(x).square().sum(1), private(layer), batch)
    if use != "norms":
        found.sq_norms()
    batch.mul_(1000)
    ones = dict.fromkeys(private(layer), torch.ones(8, dtype=torch.float64))
    uses = {
        "norms": found.sq_norms,
        "sums": lambda: found.weighted_sum(ones),
        "scaled": lambda: 2.0 * found,
        "added": lambda: found + found,
    }
    with pytest.raises(Refused, match="was written after its gradients were taken"):
        uses[use]()


# --- what should work ---


def test_time_steps_drawn_for_each_record() -> None:
    """As diffusion models draw them."""
    layer = nn.Linear(4, 4)

    def loss(x: Tensor) -> Tensor:
        t = torch.randint(0, 100, (len(x),))
        return (layer(x) * (t[:, None] / 100)).square().sum(1)

    assert per_sample(loss, private(layer), torch.randn(16, 4), modules=(layer,)).form == "traced"


def test_a_loss_that_differentiates() -> None:
    """An adversarial step inside the loss."""
    layer = nn.Linear(4, 1)

    def loss(x: Tensor) -> Tensor:
        near = x.detach().requires_grad_()
        (step,) = torch.autograd.grad(layer(near).square().sum(), near)
        return layer(x + 0.1 * step.sign())[:, 0].square()

    check(loss, layer, torch.randn(9, 4), form=[traced, loop])


def test_a_scripted_module() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.Tanh()))
    found = per_sample(
        lambda x: model(x).square().sum(1), private(model), torch.randn(9, 4), modules=(model,)
    )
    assert found.form in ("traced", "dense", "loop")
