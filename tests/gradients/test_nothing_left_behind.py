"""What people do to models in practice keeps working, and leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import io
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compare import Expected, agree, check, expected, pick, private, size_of, stacked
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from uses import loss_of, weigh

from hushgrad import Refused, gradients
from hushgrad.gradients import Form, certificate_for, constant, dense, loop, per_sample, traced
from hushgrad.gradients.constants import unwrap_constants
from hushgrad.gradients.tracing.tape import Tape

CERTIFY = importlib.import_module("hushgrad.gradients.certification.certify")
FORMS = pytest.mark.parametrize("form", [traced, dense, loop], ids=str)
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


@pytest.fixture
def certifications(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every certification."""
    seen: list[Any] = []
    plain = gradients.certify

    def counted(*args: Any) -> Any:
        seen.append(args)
        return plain(*args)

    monkeypatch.setattr(gradients, "certify", counted)
    return seen


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))


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


# --- frozen parts -------------------------------------------------------------------------------


def test_a_frozen_layer_below_costs_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4))
    model[:2].requires_grad_(False)
    needed = []
    model[2].register_forward_hook(lambda m, args, y: needed.append(y.requires_grad))
    batch, params = torch.randn(5, 3), private(model)
    sites = certificate_for(loss_of(model), params, batch, form=traced, modules=(model,)).sites
    assert [(s.operation, s.parameters) for s in sites] == [("linear", ("3.bias", "3.weight"))]
    gradients = check(loss_of(model), model, batch)
    assert not any(needed)
    assert sum(x.numel() for x in gradients.held()) == 8 * (6 + 4 + 4)


def test_a_frozen_layer_in_between_passes_gradients_only() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4))
    model[1:3].requires_grad_(False)
    batch = torch.randn(5, 3)
    sites = certificate_for(loss_of(model), private(model), batch, form=traced).sites
    assert [s.parameters for s in sites] == [("0.bias", "0.weight"), ("3.bias", "3.weight")]
    check(loss_of(model), model, batch)


@pytest.mark.parametrize(
    ("layer", "shape", "kept"),
    [
        (nn.Linear(3, 4), (7, 3), 4),
        (nn.Conv1d(3, 4, 2), (3, 7), 4),
        (nn.LayerNorm(3), (7, 3), 3),
    ],
    ids=["linear", "convolution", "layer norm"],
)
def test_a_bias_alone_keeps_no_activations(
    layer: nn.Module, shape: tuple[int, ...], kept: int
) -> None:
    layer.weight.requires_grad_(False)
    gradients = check(loss_of(layer), layer, torch.randn(8, *shape))
    assert sum(x.numel() for x in gradients.held()) == 8 * kept


def test_nothing_of_a_frozen_layer_is_kept_for_the_backward_pass() -> None:
    """Ordinary autograd does not keep it, and neither may a pass that is watched."""
    # Of these widths, no rows are added to eight records.
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    model[0].requires_grad_(False)
    batch, params = torch.randn(8, 16), private(model)

    def kept(run: Callable[[], Any]) -> int:
        sizes = []
        own = {p.data_ptr() for p in model.parameters()}

        def note(x: Tensor) -> Tensor:
            sizes.append(0 if x.data_ptr() in own else x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            run()
        return sum(sizes)

    def step() -> None:
        per_sample(loss_of(model), params, batch, form=traced)

    for _ in range(3):
        step()
    assert 0 < kept(step) <= kept(lambda: loss_of(model)(batch).sum().backward())


# --- in place -----------------------------------------------------------------------------------


def add_to_itself(h: Tensor, layer: nn.Linear) -> Tensor:
    h = h.clone()
    h += layer(h.tanh())
    return h


def write_to_a_part(h: Tensor, layer: nn.Linear) -> Tensor:
    y = layer(h)
    y[:, :2].relu_()
    return y


def twice_in_place(h: Tensor, layer: nn.Linear) -> Tensor:
    return layer(layer(h).mul_(0.5).relu_()).add_(h).sigmoid_()


IN_PLACE: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "relu_": lambda h, layer: layer(h).relu_(),
    "F.relu, inplace": lambda h, layer: F.relu(layer(h), inplace=True),
    "F.leaky_relu_": lambda h, layer: F.leaky_relu_(layer(h), 0.3),
    "F.elu, inplace": lambda h, layer: F.elu(layer(h), inplace=True),
    "sigmoid_": lambda h, layer: layer(h).sigmoid_(),
    "dropout, inplace": lambda h, layer: F.dropout(layer(h), 0.0, inplace=True),
    "residual": lambda h, layer: layer(h).add_(h),
    "residual, written to": add_to_itself,
    "on a part": write_to_a_part,
    "on a view": lambda h, layer: layer(h).view(-1, 2, 2).relu_().flatten(1),
    "masked_fill_": lambda h, layer: layer(h).masked_fill_(h > 0.5, 0.0),
    "twice": twice_in_place,
}


@pytest.mark.parametrize("function", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place(function: Callable[[Tensor, nn.Linear], Tensor]) -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 4)
    model = nn.ModuleList([first, second])
    check(loss_of(lambda x: function(first(x), second)), model, torch.randn(5, 3))


def test_in_place_modules_after_every_kind_of_layer() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.GroupNorm(2, 4),
        nn.ELU(inplace=True),
        nn.Conv2d(4, 2, 3),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(8, 6),
        nn.Hardswish(inplace=True),
        nn.LayerNorm(6),
        nn.SiLU(inplace=True),
    )
    check(loss_of(model), model, torch.randn(5, 1, 4, 4))


def test_in_place_where_only_a_bias_is_trained() -> None:
    """The frozen weight keeps nothing of its input, so the input may be written over."""
    first, second = nn.Linear(3, 4), nn.Linear(4, 4)
    second.weight.requires_grad_(False)

    def model(x: Tensor) -> Tensor:
        h = first(x)
        h += second(h)
        return h

    check(loss_of(model), nn.ModuleList([first, second]), torch.randn(5, 3))


def test_the_batch_stays_as_it_was() -> None:
    """`x.to(weight)` returns the batch itself, and no tap may be put on that."""
    layer = nn.Linear(3, 4)

    def loss(x: Tensor) -> Tensor:
        return weigh(layer(x.to(layer.weight)))

    batch = torch.randn(8, 3)
    before = batch.clone()
    check(loss, layer, batch)
    assert torch.equal(batch, before)
    assert batch.is_leaf
    assert not batch.requires_grad
    assert batch.grad is None


# --- dropout ------------------------------------------------------------------------------------


class Masks(nn.Module):
    """A mask drawn by hand, beside attention that drops some of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = h * (torch.rand_like(h) > 0.3) * torch.empty_like(h).bernoulli_(0.7)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.2)


DROPOUTS: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.4),
    "Dropout, inplace": lambda: nn.Dropout(0.4, inplace=True),
    "Dropout1d": lambda: nn.Dropout1d(0.4),
    "AlphaDropout": lambda: nn.AlphaDropout(0.4),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.4),
    "by hand": Masks,
    "RReLU": lambda: nn.RReLU(),
}


def noisy(kind: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), DROPOUTS[kind](), nn.Linear(4, 4))


@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_is_exact_for_the_masks_drawn(kind: str) -> None:
    model, batch = noisy(kind), torch.randn(5, 6, 3)
    params = private(model)
    for seed in range(4):
        want = of_one_pass(loss_of(model), params, batch, seed)
        torch.manual_seed(seed)
        agree(per_sample(loss_of(model), params, batch, form=traced), want, params)


@FORMS
def test_each_record_draws_its_own_mask(form: Form) -> None:
    model = noisy("Dropout")
    batch = torch.randn(1, 6, 3).expand(8, 6, 3)
    for _ in range(3):
        losses = per_sample(loss_of(model), private(model), batch, form=form).losses
        assert len(losses.unique()) == 8
    model.eval()
    assert len(per_sample(loss_of(model), private(model), batch, form=form).losses.unique()) == 1


@pytest.mark.parametrize("kind", DROPOUTS)
def test_a_step_draws_what_an_ordinary_pass_draws(kind: str) -> None:
    """Of the padded batch; at steps that certify, that test again and that do neither."""
    model, batch = noisy(kind), torch.randn(5, 6, 3)
    for step in range(5):
        torch.manual_seed(step)
        per_sample(loss_of(model), private(model), batch, form=traced, modules=(model,))
        after = torch.get_rng_state()
        torch.manual_seed(step)
        model(pick(batch, [0, 1, 2, 3, 4, 0, 0, 0]))
        assert torch.equal(after, torch.get_rng_state()), step


@FORMS
def test_certification_draws_nothing(form: Form) -> None:
    model, batch = noisy("Dropout"), torch.randn(5, 6, 3)
    before = torch.get_rng_state()
    certificate_for(loss_of(model), private(model), batch, form=form, modules=(model,))
    assert torch.equal(before, torch.get_rng_state())


# --- activation checkpointing -------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Blocks that are run again, around a parameter that is used inside them and outside."""

    def __init__(self, reentrant: bool, *, on: bool = True, nested: bool = False) -> None:
        super().__init__()
        self.reentrant, self.on, self.nested = reentrant, on, nested
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.shared = nn.Parameter(torch.randn(4, 4))
        self.first, self.dropout = nn.Linear(3, 4), nn.Dropout(0.0)

    def run(self, function: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        return checkpoint(function, h, use_reentrant=self.reentrant) if self.on else function(h)

    def block(self, h: Tensor) -> Tensor:
        h = self.norm(F.linear(self.inner(h).relu_(), self.shared))
        return self.dropout(h) * (1 + self.shared[0])

    def outer(self, h: Tensor) -> Tensor:
        return self.run(self.block, self.inner(h).tanh()) @ self.shared.T

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.run(self.outer if self.nested else self.block, h) @ self.shared
        return self.run(self.block, h) + h


# Of its older kind, checkpointing inside checkpointing warns without us too.
warns = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


@pytest.mark.parametrize(
    ("reentrant", "nested"),
    [(True, False), (False, False), pytest.param(True, True, marks=warns), (False, True)],
)
def test_checkpointing_changes_nothing(reentrant: bool, nested: bool) -> None:
    model = Checkpointed(reentrant, on=False, nested=nested)
    batch, params = torch.randn(5, 3), private(model)
    want = expected(loss_of(model), params, batch)
    model.on = True
    for _ in range(4):
        agree(per_sample(loss_of(model), params, batch, form=traced), want, params)


@REENTRANT
def test_checkpointed_dropout_draws_its_mask_again(reentrant: bool) -> None:
    model = Checkpointed(reentrant, on=False)
    model.dropout.p = 0.4
    batch, params = torch.randn(5, 3), private(model)
    for seed in range(3):
        model.on = False
        want = of_one_pass(loss_of(model), params, batch, seed)
        model.on = True
        torch.manual_seed(seed)
        agree(per_sample(loss_of(model), params, batch, form=traced), want, params)


@REENTRANT
def test_a_checkpointed_block_that_is_frozen(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    for p in (*model.inner.parameters(), *model.norm.parameters(), model.shared):
        p.requires_grad_(False)
    batch, params = torch.randn(5, 3), private(model)
    model.on = False
    want = expected(loss_of(model), params, batch)
    model.on = True
    agree(per_sample(loss_of(model), params, batch, form=traced), want, params)
    sites = certificate_for(loss_of(model), params, batch, form=traced).sites
    assert [site.parameters for site in sites] == [("first.bias", "first.weight")]


# --- sizes and layouts of batches ---------------------------------------------------------------


@FORMS
def test_an_empty_batch_does_not_call_the_loss(form: Form) -> None:
    model = perceptron()

    def loss(x: Tensor) -> Tensor:
        raise AssertionError("called")

    params, batch = private(model), {"x": torch.randn(0, 3), "y": (torch.zeros(0).long(),)}
    gradients = per_sample(loss, params, batch, form=form, modules=(model,))
    assert gradients.batch == 0
    assert gradients.losses.shape == (0,)
    norms = gradients.sq_norms()
    assert {name: tuple(x.shape) for name, x in norms.items()} == dict.fromkeys(params, (0,))
    sums = gradients.weighted_sum(norms)
    assert sums.keys() == params.keys()
    for name, p in params.items():
        assert torch.equal(sums[name], torch.zeros_like(p))
    both = 0.5 * (gradients + gradients)
    assert both.sq_norms().keys() == params.keys()


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_empty_batch_has_sums_in_a_wide_type(form: Form, dtype: torch.dtype) -> None:
    model = perceptron().to(dtype)
    gradients = per_sample(
        loss_of(model), private(model), torch.zeros(0, 3, dtype=dtype), form=form
    )
    sums = gradients.weighted_sum(gradients.sq_norms())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in sums.values()} == {wide}


@FORMS
def test_an_empty_batch_between_others(form: Form) -> None:
    model = perceptron()
    for size in (5, 0, 3, 0):
        batch = torch.randn(size, 3)
        gradients = per_sample(loss_of(model), private(model), batch, form=form)
        if size:
            agree(gradients, expected(loss_of(model), private(model), batch), private(model))
        assert gradients.batch == size


@FORMS
def test_a_batch_of_one(form: Form) -> None:
    model = perceptron()
    for _ in range(4):
        check(loss_of(model), model, torch.randn(1, 3), form=form)


STRIDED: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(5, 3, 6).mT,
    "records last in memory": lambda: torch.randn(6, 3, 5).permute(2, 0, 1),
    "every other record": lambda: torch.randn(10, 6, 3)[::2],
    "every other entry": lambda: torch.randn(5, 12, 6)[:, ::2, ::2],
    "one record expanded": lambda: torch.randn(1, 6, 3).expand(5, -1, -1),
    "one position expanded": lambda: torch.randn(5, 1, 3).expand(-1, 6, -1),
    "one number expanded": lambda: torch.tensor(0.7).expand(5, 6, 3),
    "with an offset": lambda: torch.randn(5 * 18 + 1)[1:].view(5, 6, 3),
    "overlapping windows": lambda: torch.randn(5, 8).unfold(1, 3, 1),
}


@FORMS
@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_inputs_that_are_not_contiguous(make: Callable[[], Tensor], form: Form) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    check(loss_of(model), model, make(), form=form)


def test_pictures_with_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2))
    model.to(memory_format=torch.channels_last)
    batch = torch.randn(5, 3, 5, 5).to(memory_format=torch.channels_last)
    check(loss_of(model), model, batch)


# --- structures ---------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A batch with names."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    """A batch with fields, one of which is no tensor, and declared constant."""

    x: Tensor
    y: Tensor
    unit: str = constant("m")


class Bag(dict[str, Tensor]):
    """A dictionary of a library's own, read by attribute."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


STRUCTURES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda x, y: (x, y), lambda b: b),
    "list": (lambda x, y: [x, y], lambda b: b),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "nested": (
        lambda x, y: {"in": [x, {"more": (x, None)}], "out": (y, constant("name"))},
        lambda b: (b["in"][1]["more"][0], b["out"][0]),
    ),
    "namedtuple": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (Sample, lambda b: (b.x, b.y) if b.unit == "m" else None),
    "own dictionary": (lambda x, y: Bag(x=x, y=y), lambda b: (b.x, b.y)),
}


@FORMS
@pytest.mark.parametrize(("wrap", "read"), STRUCTURES.values(), ids=STRUCTURES)
def test_structures(wrap: Callable[..., Any], read: Callable[[Any], Any], form: Form) -> None:
    model = perceptron()

    def loss(batch: Any) -> Tensor:
        x, y = read(batch)
        return F.cross_entropy(model(x), y, reduction="none")

    x, y = torch.randn(5, 3), torch.randint(4, (5,))
    want = expected(lambda b: loss(unwrap_constants(wrap(*b))[0]), private(model), (x, y))
    for _ in range(2):
        gradients = per_sample(loss, private(model), wrap(x, y), form=form, modules=(model,))
        agree(gradients, want, private(model))


class Several(nn.Module):
    """Two inputs, and outputs of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, *, z: Tensor) -> dict[str, Any]:
        h = self.left(x).tanh() + self.right(z).mean(1)
        return {"mean": self.head(h), "states": (h, [h.exp()]), "count": len(h)}


@FORMS
def test_several_inputs_and_outputs(form: Form) -> None:
    model = Several()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0], z=batch[1])
        return weigh(out["mean"]) + weigh(out["states"][0]) * weigh(out["states"][1][0])

    check(loss, model, (torch.randn(5, 3), torch.randn(5, 7, 2)), form=form)


# --- losses -------------------------------------------------------------------------------------


class Objective(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return weigh(self.model(x)) * self.scale

    def again(self, x: Tensor) -> Tensor:
        return self(x)


class Callables:
    """An object that can be called, and nothing more."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return weigh(self.model(x))


def scaled_loss(model: nn.Module, x: Tensor, *, scale: float) -> Tensor:
    return scale * weigh(model(x))


def lambda_of(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: weigh(model(x))


def nested_lambda_of(model: Any) -> Callable[[Tensor], Tensor]:
    inner = lambda_of(model)
    return lambda x: 2 * inner(x)


LOSSES: dict[str, Callable[[Any], Callable[[], Callable[[Tensor], Tensor]]]] = {
    "a lambda made anew": lambda m: lambda: lambda_of(m),
    "a lambda in a lambda": lambda m: lambda: nested_lambda_of(m),
    "a bound method": lambda m: lambda: m.again,
    "a partial": lambda m: lambda: functools.partial(scaled_loss, m, scale=2.0),
    "a partial of a method": lambda m: lambda: functools.partial(m.again),
    "a module": lambda m: lambda: m,
    "an object": lambda m: functools.partial(lambda one: one, Callables(m.model)),
}


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_a_loss_is_certified_once(make: Any, certifications: list[Any]) -> None:
    model = Objective(perceptron())
    fresh, batch = make(model), torch.randn(5, 3)
    want = expected(fresh(), private(model), batch)
    for _ in range(5):
        gradients = per_sample(fresh(), private(model), batch, form=traced, idle=("scale",))
        agree(gradients, want, private(model))
    assert len(certifications) == 1


def test_a_step_between_tests_calls_the_loss_once() -> None:
    model, calls = perceptron(), []

    def step() -> int:
        calls.clear()
        per_sample(
            lambda x: (calls.append(len(x)), weigh(model(x)))[1],
            private(model),
            torch.randn(5, 3),
            form=traced,
        )
        return len(calls)

    counts = [step() for _ in range(9)]
    assert [i for i, count in enumerate(counts) if count == 1] == [3, 5, 6, 7]
    assert calls != []
    assert counts[0] > counts[1] > 1


@pytest.mark.parametrize("change", ["model", "number", "code", "default", "partial"])
def test_another_loss_of_the_same_parameters_is_certified_anew(
    change: str, certifications: list[Any]
) -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    other = nn.Sequential(model, nn.Tanh())

    def by_number(scale: int) -> Callable[[Tensor], Tensor]:
        return lambda x: weigh(model(x)) * scale

    def by_default(scale: int) -> Callable[[Tensor], Tensor]:
        return lambda x, scale=scale: weigh(model(x)) * scale

    pairs: dict[str, tuple[Any, Any]] = {
        "model": (lambda_of(model), lambda_of(other)),
        "number": (by_number(1), by_number(2)),
        "code": (lambda x: weigh(model(x)), lambda x: -weigh(model(x))),
        "default": (by_default(1), by_default(2)),
        "partial": tuple(functools.partial(scaled_loss, model, scale=s) for s in (1, 2)),
    }
    for loss in pairs[change]:
        check(loss, private(model), batch)
    assert len(certifications) == 2


def test_a_weight_in_the_loss_that_varies_is_exact() -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    for step in range(6):
        weight = 1 / (1 + step)
        check(lambda x, w=weight: w * weigh(model(x)), model, batch)


def test_a_loss_that_calls_itself() -> None:
    model = perceptron()

    def loss(batch: Any) -> Tensor:
        return loss(batch["x"]) if isinstance(batch, dict) else weigh(model(batch))

    check(loss, model, {"x": torch.randn(5, 3)})


def test_a_loss_that_closes_over_a_name_without_a_value() -> None:
    model = perceptron()

    def make() -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            return weigh(model(x)) if len(x) else never

        if model is None:
            never = torch.zeros(0)
        return loss

    check(make(), model, torch.randn(5, 3))


# --- nothing is left behind ---------------------------------------------------------------------


class Broken(Exception):
    """Raised by a loss."""


@FORMS
@pytest.mark.parametrize("certified", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("place", ["loss", "backward"])
def test_an_exception_gives_everything_back(form: Form, certified: bool, place: str) -> None:
    model, switch = perceptron(), {"on": False}

    class Raises(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            raise Broken

    def loss(x: Tensor) -> Tensor:
        y = weigh(model(x))
        if switch["on"] and place == "loss":
            raise Broken
        return Raises.apply(y) if switch["on"] else y

    params, batch = private(model), torch.randn(5, 3)
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in params.items()}
    rng = torch.get_rng_state()
    if certified:
        for _ in range(3):
            per_sample(loss, params, batch, form=form, modules=(model,))
    switch["on"] = True
    with pytest.raises((Broken, Refused)):
        per_sample(loss, params, batch, form=form, modules=(model,))
    for name, p in model.named_parameters():
        own, pointer, value = before[name]
        assert p is own
        assert (type(p), p.grad, p.data_ptr()) == (nn.Parameter, None, pointer)
        assert torch.equal(p, value)
    assert torch.equal(rng, torch.get_rng_state())
    switch["on"] = False
    check(loss, model, batch, form=form)


def footprint(model: nn.Module) -> Any:
    """All that can be seen of a model from outside."""
    modules = {
        name: sorted(f"{key}: {type(value).__name__}" for key, value in vars(m).items())
        for name, m in model.named_modules()
    }
    hooks = {name: (m._forward_hooks, m._backward_hooks) for name, m in model.named_modules()}
    tensors = {
        name: (id(p), type(p), p.data_ptr(), p._version, p.requires_grad, dict(vars(p)))
        for name, p in (*model.named_parameters(), *model.named_buffers())
    }
    grads = {
        name: (p.grad is None, p._backward_hooks, p.is_leaf) for name, p in model.named_parameters()
    }
    return modules, {n: tuple(map(dict, h)) for n, h in hooks.items()}, tensors, grads


class Everyday(nn.Module):
    """Layers of several kinds, a bare parameter, a buffer and something frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.shift, self.head = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, index: Tensor) -> Tensor:
        h = self.norm(self.table(index).mean(1)) + self.shift
        return self.head(self.frozen(h)) * self.mask + F.linear(h, self.head.weight.T)


@FORMS
def test_a_model_is_left_as_it_was(form: Form) -> None:
    model, batch = Everyday(), torch.randint(7, (5, 3))
    keys, values = [*model.state_dict()], copy.deepcopy(model.state_dict())
    before = footprint(model)
    for _ in range(4):
        gradients = per_sample(loss_of(model), private(model), batch, form=form, modules=(model,))
        gradients.weighted_sum(gradients.sq_norms())
        assert footprint(model) == before
    after = model.state_dict()
    assert [*after] == keys
    assert all(torch.equal(after[key], values[key]) for key in keys)


@FORMS
def test_a_gradient_that_was_there_stays(form: Form) -> None:
    model, batch = Everyday(), torch.randint(7, (5, 3))
    kept = {}
    for k, (name, p) in enumerate(model.named_parameters()):
        if k % 2 == 0:
            p.grad = torch.full_like(p, k + 1.0)
            kept[name] = p.grad
    for _ in range(3):
        check(loss_of(model), model, batch, form=form)
        for k, (name, p) in enumerate(model.named_parameters()):
            assert p.grad is kept.get(name)
            assert p.grad is None or bool((p.grad == k + 1).all())


@FORMS
def test_a_model_can_be_used_as_before(form: Form) -> None:
    model, batch = perceptron(), torch.randn(5, 3)

    def plain() -> list[Tensor]:
        loss = loss_of(model)(batch).sum()
        return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

    before, pending = plain(), loss_of(model)(batch).sum()
    per_sample(loss_of(model), private(model), batch, form=form, modules=(model,))
    torch.testing.assert_close(plain(), before, rtol=0, atol=0)
    pending.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], before[1:], rtol=0, atol=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    check(loss_of(model), model, batch, form=form)


@FORMS
def test_a_model_can_be_copied_pickled_and_saved(form: Form) -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    per_sample(loss_of(model), private(model), batch, form=form, modules=(model,))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        assert torch.equal(twin(batch), model(batch))
        check(loss_of(twin), twin, batch, form=form)


@FORMS
def test_nothing_keeps_a_model_or_its_batch_alive(form: Form) -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    gradients = per_sample(loss_of(model), private(model), batch, form=form, modules=(model,))
    watched = [weakref.ref(x) for x in (model, model[0].weight, batch, gradients)]
    del model, batch, gradients
    gc.collect()
    assert [reference() for reference in watched] == [None] * 4


@FORMS
def test_autocast_keeps_no_weights_that_certification_moved(form: Form) -> None:
    """Autocast remembers weights that it cast, until its outermost block ends."""
    model, batch = perceptron(), torch.randn(5, 3)

    def loss(x: Tensor) -> Tensor:
        return weigh(model(x)).float()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = expected(loss, private(model), batch)
        plain = loss(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradients = per_sample(loss, private(model), batch, form=form)
        again = loss(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss(batch)
        certificate = certificate_for(loss, private(model), batch, form=form)
    assert torch.equal(again, plain)
    torch.testing.assert_close(gradients.losses.double(), want.losses, rtol=2e-3, atol=2e-3)
    assert certificate.evidence.gradient < 1e-2


# --- what changes between steps -----------------------------------------------------------------


@FORMS
def test_freezing_a_layer_certifies_anew(form: Form, certifications: list[Any]) -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    for trained, count in ((True, 1), (False, 2), (True, 2), (False, 2)):
        model[0].requires_grad_(trained)
        gradients = check(loss_of(model), model, batch, form=form)
        assert gradients.sq_norms().keys() == private(model).keys()
        assert len(certifications) == count


@FORMS
def test_a_parameter_that_is_frozen_later_but_still_named(form: Form) -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    params = private(model)
    for _ in range(3):
        per_sample(loss_of(model), params, batch, form=form)
    model[0].bias.requires_grad_(False)
    with pytest.raises(Refused, match=r"0\.bias is frozen; leave it out"):
        per_sample(loss_of(model), params, batch, form=form)


@FORMS
def test_another_mode_certifies_anew(form: Form, certifications: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[1].running_mean.normal_()
    batch = torch.randn(5, 3)
    model.eval()
    check(loss_of(model), model, batch, form=form)
    model[2].train()
    per_sample(loss_of(model), private(model), batch, form=form, modules=(model,))
    assert len(certifications) == 2
    model.train()
    with pytest.raises(Refused, match="BatchNorm1d in training mode"):
        per_sample(loss_of(model), private(model), batch, form=form, modules=(model,))
    model.eval()
    check(loss_of(model), model, batch, form=form)
    assert len(certifications) == 3


@FORMS
def test_another_length_is_exact(form: Form) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    for size, length in ((5, 6), (5, 8), (8, 8), (3, 1), (5, 6), (9, 16), (16, 16), (11, 11)):
        check(loss_of(model), model, torch.randn(size, length, 3), form=form)


class Skips(nn.Module):
    """Runs its middle layer or not, as a public switch says."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.middle(h).tanh() if self.on else h)


@pytest.mark.parametrize(
    ("pattern", "form"),
    [("10101010", traced), ("11101110", traced), ("01110", traced), ("101", dense), ("101", loop)],
)
def test_a_layer_that_is_skipped_at_some_steps(pattern: str, form: Form) -> None:
    model = Skips()
    idle = ("middle.weight", "middle.bias")
    for on in pattern:
        model.on = on == "1"
        gradients = check(loss_of(model), model, torch.randn(5, 3), form=form, idle=idle)
        assert bool(gradients.sq_norms()["middle.weight"].any()) == model.on


@pytest.mark.parametrize("pattern", ["1100", "1110", "0001"])
def test_a_flag_that_comes_with_the_batch(pattern: str) -> None:
    """Every record carries it, and the model reads the first record's."""
    model = Skips()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        model.on = bool(batch[1][0])
        return weigh(model(batch[0]))

    idle = ("middle.weight", "middle.bias")
    for on in pattern:
        flag = torch.full((5,), on == "1")
        check(loss, model, (torch.randn(5, 3), flag), idle=idle)


@FORMS
def test_a_branch_that_the_records_choose_together_is_refused(form: Form) -> None:
    """Four records, all of which are drawn for the test: half of them alone go the other way."""
    model = Skips()

    def loss(x: Tensor) -> Tensor:
        model.on = bool(x.sum() > 0)
        return weigh(model(x))

    batch = torch.randn(4, 3).abs() * torch.tensor([[2.0], [-1.0], [2.0], [-1.0]])
    idle = ("middle.weight", "middle.bias")
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(loss, private(model), batch, form=form, idle=idle)


class Ticks(Skips):
    """Counts its passes, and drops some activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(F.dropout(x, 0.2))


@pytest.mark.parametrize("pattern", ["1110101010", "0111011"])
def test_a_pass_that_was_given_up_leaves_no_trace(pattern: str) -> None:
    """Another sequence of operations is tried first; the step still draws and counts once."""
    model, batch = Ticks(), torch.randn(8, 3)
    idle = ("middle.weight", "middle.bias")
    for step, on in enumerate(pattern):
        model.on = on == "1"
        after = []
        for again in range(2):  # the second time, the right sequence is tried first
            torch.manual_seed(step)
            per_sample(
                loss_of(model), private(model), batch, form=traced, modules=(model,), idle=idle
            )
            assert int(model.passes) == 2 * step + again + 1
            after.append(torch.get_rng_state())
        assert torch.equal(*after), step


class Turns(nn.Module):
    """Works time first or records first, as a public switch says; both are the same function."""

    def __init__(self) -> None:
        super().__init__()
        self.time_first = False
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.time_first:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.layer(x)


@pytest.mark.parametrize("length", [5, 8, 16])
@pytest.mark.parametrize("size", [8, 16])
def test_records_that_move_to_another_dimension_are_never_taken_for_others(
    length: int, size: int
) -> None:
    """Step 3 is not tested again, and where length and batch agree no shape tells."""
    model, batch = Turns(), torch.randn(size, length, 3)
    for _ in range(3):
        check(loss_of(model), model, batch)
    model.time_first = True
    want = expected(loss_of(model), private(model), batch)
    try:
        gradients = per_sample(loss_of(model), private(model), batch, form=traced, modules=(model,))
    except Refused:
        return
    agree(gradients, want, private(model))


# --- parts without gradients --------------------------------------------------------------------


def teacher(model: nn.Sequential, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x + 0.1).softmax(1)
    return (model(x).softmax(1) - target).square().sum(1)


def lower_part(model: nn.Sequential, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = model[:2](x)
    return weigh(model[2](h)) * model[0](x).sum(1)


def by_hand(model: nn.Sequential, x: Tensor) -> Tensor:
    y = model(x)
    with torch.no_grad():
        scale = 1 / y.norm(dim=1, keepdim=True)
        with torch.enable_grad():
            z = model(x.flip(1))
    return weigh(y * scale + z)


def stopped(model: nn.Sequential, x: Tensor) -> Tensor:
    h = model[:2](x)
    return weigh(model[2](h.detach()) + h.sum(1, keepdim=True))


def straight_through(model: nn.Sequential, x: Tensor) -> Tensor:
    h = model[:2](x)
    return weigh(model[2](h + (h.sign() - h).detach()))


def detached_weight(model: nn.Sequential, x: Tensor) -> Tensor:
    h = model[:2](x)
    return weigh(F.linear(h, model[2].weight.detach()) + model[2](h.square()))


def decorated(model: nn.Sequential, x: Tensor) -> Tensor:
    statistics = torch.no_grad()(lambda: model[0].weight.norm() + model[2](model[:2](x)).amax(1))
    return weigh(model(x)) / statistics()


STOPPED: dict[str, Callable[[nn.Sequential, Tensor], Tensor]] = {
    "a target without gradient": teacher,
    "a lower part without gradient": lower_part,
    "gradients on again": by_hand,
    "detached activations": stopped,
    "straight through": straight_through,
    "a detached weight": detached_weight,
    "a decorator": decorated,
}


@FORMS
@pytest.mark.parametrize("function", STOPPED.values(), ids=STOPPED)
def test_parts_without_gradients(function: Callable[..., Tensor], form: Form) -> None:
    model = perceptron()
    check(functools.partial(function, model), model, torch.randn(5, 3), form=form)


@FORMS
def test_gradients_may_be_off_outside(form: Form) -> None:
    model, batch = perceptron(), torch.randn(5, 3)
    want = expected(loss_of(model), private(model), batch)
    with torch.no_grad():
        for _ in range(4):
            gradients = per_sample(loss_of(model), private(model), batch, form=form)
            agree(gradients, want, private(model))
            assert not torch.is_grad_enabled()


# --- devices ------------------------------------------------------------------------------------


def devices() -> Iterator[str]:
    yield "cpu"
    if torch.cuda.is_available():
        yield "cuda"


@FORMS
@pytest.mark.parametrize("device", [*devices()])
def test_devices(device: str, form: Form) -> None:
    model, batch = Everyday().to(device), torch.randint(7, (5, 3), device=device)
    want = expected(loss_of(lambda i: model(i).cpu()), private(model), batch)
    gradients = per_sample(
        loss_of(lambda i: model(i).cpu()), private(model), batch, form=form, modules=(model,)
    )
    sums = gradients.weighted_sum(gradients.sq_norms())
    assert {x.device.type for x in sums.values()} == {device}
    for name, norms in want.norms.items():
        found = gradients.sq_norms()[name].cpu().sqrt()
        torch.testing.assert_close(found, norms.cpu(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kept_first", [True, False])
def test_a_weight_kept_from_an_earlier_pass_hides_no_parameter(kept_first: bool) -> None:
    w = nn.Parameter(torch.randn(4))
    kept: list[Tensor] = []

    def keeping(x: Tensor) -> Tensor:
        made = 2 * w
        kept[:] = [made]
        return (x * made).sum(1)

    def mixing(x: Tensor) -> Tensor:
        return (x * (kept[0] + w if kept_first else w + kept[0])).sum(1)

    x = torch.randn(8, 4)
    per_sample(keeping, {"w": w}, x, form=traced)
    try:
        squares = per_sample(mixing, {"w": w}, x, form=traced).sq_norms()["w"]
    except Refused:
        return
    assert torch.allclose(squares, x.double().square().sum(1), rtol=0.02)


def test_a_pass_leaves_nothing_for_the_collector() -> None:
    model = nn.Linear(4, 1)
    x = torch.randn(8, 4)

    def take() -> None:
        params = dict(model.named_parameters())
        per_sample(lambda x: model(x).squeeze(1), params, x, modules=(model,)).sq_norms()

    def tapes() -> int:
        return sum(type(x) is Tape for x in gc.get_objects())

    for _ in range(3):  # the first certifies, two more test again
        take()
    gc.collect()
    before = tapes()
    gc.disable()
    try:
        take()
        assert tapes() == before
    finally:
        gc.enable()


# --- ReLUs that rounding flips ------------------------------------------------------------------


class Flips:
    """Makes `compare` find gradients off by so much at these of its points, as a flip would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: nn.Linear) -> None:
        self.points: list[float] = []  # each is known by a weight
        self.at: frozenset[int] = frozenset()
        self.by = 0.0
        plain = CERTIFY.compare

        def compare(gradients: Any, oracle: Any, evidence: Any) -> dict[str, float]:
            here = model.weight[0, 0].item()
            if here not in self.points:
                self.points.append(here)
            if self.points.index(here) in self.at:
                return {"bias": 3e-4, "weight": self.by}
            return plain(gradients, oracle, evidence)

        monkeypatch.setattr(CERTIFY, "compare", compare)

    def begin(self, at: set[int], by: float) -> None:
        """Count points from here on."""
        self.points, self.at, self.by = [], frozenset(at), by


@pytest.mark.parametrize(
    ("missed", "by", "points"), [(2, 4e-4, 3), (3, 4e-4, 3), (1, 0.5, 1), (1, math.nan, 1)]
)
def test_a_near_miss_is_looked_at_from_other_points(
    missed: int, by: float, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong by much, or at every point, is refused."""
    model = nn.Linear(4, 3)
    flips = Flips(monkeypatch, model)
    flips.begin(at=set(range(missed)), by=by)
    if missed < points:
        certificate_for(loss_of(model), private(model), torch.randn(8, 4), form=traced)
    else:
        with pytest.raises(Refused, match=f"of weight differs .* by {by:.2g} of its norm"):
            certificate_for(loss_of(model), private(model), torch.randn(8, 4), form=traced)
    assert len(flips.points) == points


@pytest.mark.parametrize(
    ("missed", "by", "points"), [(2, 4e-4, 3), (3, 4e-4, 3), (1, 0.5, 1), (1, math.nan, 1)]
)
def test_a_later_test_begins_at_the_parameters_as_they_are(
    missed: int, by: float, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = nn.Linear(4, 3), torch.randn(8, 4)
    loss, flips = loss_of(model), Flips(monkeypatch, model)
    per_sample(loss, private(model), batch, form=traced)
    flips.begin(at=set(range(missed)), by=by)
    if missed < points:
        per_sample(loss, private(model), batch, form=traced)
    else:
        with pytest.raises(Refused, match=f"of weight differs .* by {by:.2g} of its norm"):
            per_sample(loss, private(model), batch, form=traced)
    assert len(flips.points) == points and flips.points[0] == model.weight[0, 0].item()


def test_records_that_meet_on_the_way_back_are_no_near_miss() -> None:
    """Though it be by little, and at no other point: their bits tell."""
    model, switch = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), SimpleNamespace(on=False)
    place = model[0].weight.data_ptr()

    def loss(x: Tensor) -> Tensor:
        h = model[0](x).tanh()
        if switch.on and model[0].weight.data_ptr() == place:
            h.register_hook(lambda gradient: gradient + 0.02 * gradient.flip(0))
        return model[1](h).square().sum(1)

    batch = torch.randn(8, 4)
    per_sample(loss, private(model), batch, form=traced)
    switch.on = True
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(loss, private(model), batch, form=traced)
