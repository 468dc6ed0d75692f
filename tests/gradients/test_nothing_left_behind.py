"""Per-sample gradients leave a model, its gradients and the interpreter as they were."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import FORMS, check, expected, private
from torch import Tensor, nn
from uses import loss_of, weigh

from hushgrad import Refused
from hushgrad.gradients import Form, certificate_for, per_sample, traced
from hushgrad.gradients.tracing.tape import Tape
from zoo.small import perceptron


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
    if certified:
        for _ in range(3):
            per_sample(loss, params, batch, form=form, modules=(model,))
    rng = torch.get_rng_state()  # a step may draw places of its own
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


def devices() -> Iterator[str]:
    yield "cpu"
    if torch.cuda.is_available():
        yield "cuda"


@FORMS
@pytest.mark.parametrize("device", [*devices()])
def test_sums_stay_on_the_models_device(device: str, form: Form) -> None:
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
