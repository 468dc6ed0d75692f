"""The compiled form: what it computes is what the traced form does, and it is found out if not."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import private
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import hushgrad as hg
from hushgrad.gradients import Gradients, auto, compiled, difference, per_sample, traced
from hushgrad.gradients.factors import slots
from hushgrad.run.step import clipped_sum
from zoo.small import TiedWords, mlp
from zoo.vision import small_cnn

# The package's attribute of that name is the form.
MODULE = importlib.import_module("hushgrad.gradients.forms.compiled")
FORMS = (compiled, *auto)
Loss = Callable[[Tensor], Tensor]
TURNS = torch.arange(64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "cnn with dropout": (small_cnn, lambda: torch.randn(32, 3, 6, 6)),
    "tied": (TiedWords, lambda: torch.randint(11, (32, 4))),
    "normed weight": (
        lambda: nn.Sequential(weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)),
        lambda: torch.randn(32, 5),
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True),
        lambda: torch.randn(32, 5, 8),
    ),
    "mlp": (lambda: mlp(5, 7, 3), lambda: torch.randn(32, 5)),
}


def loss_of(model: nn.Module) -> Loss:
    return lambda x: (model(x) + 1).flatten(1).pow(3).sum(1)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Leave out the C++ compiler, which takes seconds; counts the programs that were recorded."""
    made: list[int] = []

    def as_it_is(recorded: Any, inputs: Any) -> Any:
        made.append(len(inputs))
        return recorded

    monkeypatch.setattr(MODULE, "_machine_code", as_it_is)
    return made


def both(model: nn.Module, batch: Tensor) -> tuple[Gradients, Gradients]:
    """The gradients in both forms, with the same draws."""
    loss, params, found = loss_of(model), private(model), []
    for form in (traced, FORMS):
        per_sample(loss, params, batch, form=form, modules=(model,))  # certifies
        torch.manual_seed(3)
        found.append(per_sample(loss, params, batch, form=form, modules=(model,)))
    return found[0], found[1]


def assert_alike(one: Gradients, other: Gradients, tolerance: float = 1e-5) -> None:
    assert other.form == "compiled"
    torch.testing.assert_close(other.losses, one.losses, rtol=tolerance, atol=tolerance)
    weights = dict.fromkeys(one.squares, torch.rand(one.batch, dtype=torch.float64))
    mine, theirs = other.weighted_sum(weights), one.weighted_sum(weights)
    for name, square in one.squares.items():
        estimate = other.squares[name].estimate
        torch.testing.assert_close(estimate, square.estimate, rtol=tolerance, atol=tolerance)
        assert (other.squares[name].upper >= square.estimate * (1 - 1e-6)).all()
        torch.testing.assert_close(mine[name], theirs[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["cnn with dropout", "tied"])
def test_machine_code_gives_the_norms_and_sums_of_the_traced_form(name: str) -> None:
    build, data = MODELS[name]
    batch = data()
    batch = batch.double() if batch.is_floating_point() else batch
    assert_alike(*both(build().double().train(), batch), 1e-9)


def test_products_by_onednn_are_compiled_too(caplog: pytest.LogCaptureFixture) -> None:
    """Inductor fuses its own with a ReLU and then fails, as the weight is no constant."""
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    with caplog.at_level(logging.WARNING):
        assert_alike(*both(model, torch.randn(32, 128)), 1e-4)
    assert not caplog.messages


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_pass_is_the_traced_one(name: str, replayed: list[int]) -> None:
    build, data = MODELS[name]
    batch = data()
    batch = batch.double() if batch.is_floating_point() else batch
    assert_alike(*both(build().double().train(), batch), 1e-9)
    assert len(replayed) in (1, 2)  # one more where records draw places that take more rows


def test_records_that_are_not_finite_contribute_nothing(replayed: list[int]) -> None:
    model, batch = mlp(5, 7, 3), torch.randn(9, 5)
    batch[4] = torch.nan
    plain, found = both(model, batch)
    assert found.form == "compiled"
    assert all(x[4] == torch.inf for x in found.sq_norms().values())
    weights = torch.ones(9, dtype=torch.float64)
    weights[4] = 0
    sums = found.weighted_sum(dict.fromkeys(private(model), weights))
    for name, total in plain.weighted_sum(dict.fromkeys(private(model), weights)).items():
        torch.testing.assert_close(sums[name], total)


def test_a_lambda_made_anew_compiles_once_and_a_changed_number_is_not_missed(
    replayed: list[int],
) -> None:
    model, batch = mlp(5, 7, 3), torch.randn(8, 5)
    params, execution = private(model), hg.Execution(compile=True)

    def norms(scale: float) -> dict[str, Tensor]:
        torch.manual_seed(0)  # for places that records may draw
        loss = lambda x: scale * model(x).square().sum(1)  # noqa: E731
        return execution.taker(execution.objective(loss, params, (model,)), batch)().sq_norms()

    first = norms(1.0)
    for _ in range(3):
        assert all(torch.equal(x, first[name]) for name, x in norms(1.0).items())
    assert len(replayed) == 1
    for name, x in norms(3.0).items():
        torch.testing.assert_close(x, 9 * first[name], rtol=1e-5, atol=0)
    assert len(replayed) == 2


def test_batches_of_many_sizes_need_few_programs(replayed: list[int]) -> None:
    model = mlp(5, 7, 3)
    loss, params, execution = loss_of(model), private(model), hg.Execution(compile=True)
    for size in (256, 250, 262, 241, 270, 259, 245):
        batch = torch.randn(size, 5)
        found = clipped_sum(loss, params, batch, modules=(model,), execution=execution)
        for name, total in clipped_sum(loss, params, batch, modules=(model,)).sum.items():
            torch.testing.assert_close(found.sum[name], total, rtol=1e-4, atol=1e-5)
    assert len(replayed) <= 3


def test_a_record_keeps_its_bits_beside_other_records(monkeypatch: pytest.MonkeyPatch) -> None:
    # Records draw places modulo the period of the kernels: here their own, whatever the batch.
    arrange = slots.arrange
    monkeypatch.setattr(
        slots,
        "arrange",
        lambda drawn, m, period: arrange(TURNS[: len(drawn)] % period, m, period),
    )
    model, everyone = mlp(5, 7, 3), torch.randn(64, 5)
    loss, params = loss_of(model), private(model)

    def norms(batch: Tensor) -> dict[str, Tensor]:
        gradients = per_sample(loss, params, batch, form=FORMS, modules=(model,))
        assert gradients.form == "compiled"
        return gradients.sq_norms()

    whole = norms(everyone)
    others = torch.where(torch.arange(64)[:, None] % 2 == 0, everyone, 30 * torch.randn(64, 5))
    for batch, places in (
        (everyone[:17], range(17)),
        (everyone.roll(32, 0), [*range(32, 64), *range(32)]),
    ):
        for name, x in norms(batch).items():
            assert torch.equal(x[: len(places)], whole[name][list(places)])
    for name, x in norms(others).items():
        assert torch.equal(x[::2], whole[name][::2])


def fell_back(
    model: nn.Module, loss: Loss, batch: Tensor, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """The lines that were logged, after asserting that the sum is right all the same."""
    params, execution = private(model), hg.Execution(compile=True)
    plain = clipped_sum(loss, params, batch, modules=(model,)).sum
    with caplog.at_level(logging.WARNING, "hushgrad"):
        found = clipped_sum(loss, params, batch, modules=(model,), execution=execution).sum
    for name, total in plain.items():
        torch.testing.assert_close(found[name], total)
    return lines(caplog)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("hush")]


def test_a_break_in_the_graph_falls_back_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(5, 7, 3)

    def loss(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return model(x).square().sum(1)

    (line,) = fell_back(model, loss, torch.randn(8, 5), caplog)
    assert line.startswith("not compiled: torch.compile does not take it in one piece")


def test_buffers_that_move_fall_back_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)).train()
    (line,) = fell_back(model, loss_of(model), torch.randn(8, 5), caplog)
    assert line == "not compiled: it moves buffers of the model"


def test_a_model_that_keeps_tensors_falls_back_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept * 2

    model = Keeps(5, 3)
    (line,) = fell_back(model, loss_of(model), torch.randn(8, 5), caplog)
    assert "keeps tensors of the pass" in line


def test_without_a_compiler_the_operations_are_replayed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*_: Any) -> None:
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", no_compiler)
    model = mlp(5, 7, 3)
    (line,) = fell_back(model, loss_of(model), torch.randn(8, 5), caplog)
    assert line.endswith("no machine code, RuntimeError: no C++ compiler")


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a factor that is off": lambda x: 1.01 * x,
    "records that meet": lambda x: x + 1e-6 * x.flip(0),
    "bits that depend on the place": lambda x: (
        x * (1 + 1e-7 * (torch.arange(len(x)) > 11)).view(-1, *[1] * (x.dim() - 1))
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_program_is_found_out(
    what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(recorded: Any, inputs: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> list[Tensor]:
            losses, *rest = recorded(*inputs)
            batched = [i for i, x in enumerate(rest) if x.dim() == 3]
            rest[batched[0]] = WRONG[what](rest[batched[0]])
            return [losses, *rest]

        return run

    monkeypatch.setattr(MODULE, "_machine_code", broken)
    model = mlp(5, 7, 3)
    (line,) = fell_back(model, loss_of(model), torch.randn(64, 5), caplog)
    assert line.startswith("not compiled:")


def test_a_program_that_goes_wrong_later_gives_way(
    replayed: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = mlp(5, 7, 3), torch.randn(8, 5)
    loss, params, execution = loss_of(model), private(model), hg.Execution(compile=True)
    take = execution.taker(execution.objective(loss, params, (model,)), batch)
    assert take().form == "compiled"
    run = MODULE._Program.run

    def off(self: Any, inputs: Any, current: Any) -> tuple[Tensor, Gradients]:
        losses, gradients = run(self, inputs, current)
        return losses, 1.01 * gradients

    monkeypatch.setattr(MODULE._Program, "run", off)
    with caplog.at_level(logging.WARNING, "hushgrad"):
        forms = [take().form for _ in range(4)]
    assert forms[-1] == "traced"
    (line,) = lines(caplog)
    assert line.startswith("not compiled from here on: of the compiled program the gradient of")


def test_lower_precision_of_products_does_not_reach_the_norms(replayed: list[int]) -> None:
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)), torch.randn(9, 64)
    plain, _ = both(model, batch)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        found = per_sample(loss_of(model), private(model), batch, form=FORMS, modules=(model,))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert found.form == "compiled"
    for name, square in plain.squares.items():
        torch.testing.assert_close(found.squares[name].estimate, square.estimate)


def test_autocast_is_recorded_with_the_pass(replayed: list[int]) -> None:
    model, batch = mlp(5, 7, 3), torch.randn(9, 5)
    with torch.autocast("cpu", torch.bfloat16):
        plain, found = both(model, batch)
    assert_alike(plain, found, 1e-3)
    assert all(x.dtype == torch.float32 for x in found.held() if x.is_floating_point())


def test_differences_of_compiled_gradients_are_those_of_traced_ones(replayed: list[int]) -> None:
    model, batch = TiedWords(), torch.randint(11, (9, 4))
    before = both(model, batch)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    after = both(model, batch)
    kept, own = (difference(new, old) for new, old in zip(after, before, strict=True))
    for name, square in kept.squares.items():
        torch.testing.assert_close(
            own.squares[name].estimate, square.estimate, rtol=1e-4, atol=1e-6
        )


def test_a_run_trains_alike(replayed: list[int]) -> None:
    data = (torch.randn(64, 5), torch.randint(3, (64,)))

    def trained(execution: hg.Execution) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp(5, 7, 3)
        plan = hg.plan(records=64, batch=16, epochs=2, delta=1e-3, noise_multiplier=1.0)
        optimizer, rng = torch.optim.SGD(model.parameters(), lr=0.5), hg.Rng.fixed(1)
        run = hg.train(model, optimizer, data, plan=plan, rng=rng, execution=execution)
        for batch in run:
            run.step(lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), batch)
        return [p.detach() for p in model.parameters()]

    for plain, own in zip(
        trained(hg.Execution()), trained(hg.Execution(compile=True)), strict=True
    ):
        torch.testing.assert_close(own, plain, rtol=1e-3, atol=1e-3)
