"""The first steps: one certification for all batches that are likely, and a word of it."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import hushgrad as hg
from hushgrad import gradients
from hushgrad.cli.progress import LOGGER, Relay
from hushgrad.gradients import compiled, taking, traced
from hushgrad.launch.preflight import check
from hushgrad.launch.recipe import Recipe
from hushgrad.run.execution import Execution

N, BATCH = 2000, 40


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The certifications and extensions that are made, by name."""
    made: list[str] = []
    for name in ("certify", "extend"):
        function = getattr(taking, name)

        def noted(*args: Any, name: str = name, function: Any = function) -> Any:
            made.append(name)
            return function(*args)

        monkeypatch.setattr(taking, name, noted)
    return made


def a_run(steps: int = 40, **settings: Any) -> tuple[hg.run.training.Run, Any]:
    model = nn.Linear(3, 2)
    plan = hg.plan(
        records=N, batch=BATCH, epochs=steps * BATCH / N, delta=1e-4, noise_multiplier=1.0
    )
    data = (torch.randn(N, 3), torch.arange(N) % 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = hg.train(model, optimizer, data, plan=plan, rng=hg.Rng.fixed(0), **settings)
    return run, lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none")


def test_poisson_batches_are_certified_once(tested: list[str]) -> None:
    run, loss = a_run()
    sizes = []
    for batch in run:
        sizes.append(len(batch[1]))
        run.step(loss, batch)
    assert max(sizes) > sizes[0] + 8  # some were larger than the first
    assert tested == ["certify"]


def test_micro_batches_are_certified_for_their_own_size(tested: list[str]) -> None:
    run, loss = a_run(5, execution=Execution(micro_batch=8))
    for batch in run:
        run.step(loss, batch)
    assert tested == ["certify"]


@pytest.mark.parametrize(("expected", "most"), [(0, 0), (1, 5), (100, 140), (10_000, 1127)])
def test_the_capacity_is_four_deviations_above(expected: float, most: int) -> None:
    assert Execution().capacity(expected) == most
    assert Execution(micro_batch=3).capacity(expected) == min(most, 3)
    assert Execution().capacity(expected, rows=64) == min(most, 20)


def test_a_batch_beyond_it_is_tested(tested: list[str]) -> None:
    layer = nn.Linear(3, 2)
    params = dict(layer.named_parameters())

    def loss(x: Tensor) -> Tensor:
        return layer(x).square().sum(1)

    for size in (4, 24, 25, 26, 60, 61):
        gradients.per_sample(loss, params, torch.randn(size, 3), capacity=24)
    assert tested == ["certify", "extend", "extend"]


def test_programs_are_made_for_the_sizes_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Stop(Exception):
        pass

    def certify(*args: Any) -> Any:
        asked.append(args[4])
        raise Stop

    monkeypatch.setattr(taking, "certify", certify)
    layer = nn.Linear(3, 2)
    for form in ((compiled, traced), (traced,)):
        with pytest.raises(Stop):
            gradients.per_sample(
                lambda x: layer(x).sum(1),
                dict(layer.named_parameters()),
                torch.randn(4, 3),
                form=form,
                capacity=99,
            )
    assert asked == [0, 99]


def test_a_recipe_is_certified_before_its_run(tested: list[str]) -> None:
    run, loss = a_run(5)
    data = (torch.randn(N, 3), torch.arange(N) % 2)
    check(Recipe(run._model, run._optimizer, data, loss, run.plan))
    for batch in run:
        run.step(loss, batch)
    assert tested == ["certify"]


def test_what_is_logged_tells_no_sizes(caplog: pytest.LogCaptureFixture) -> None:
    run, loss = a_run(5)
    with caplog.at_level(logging.INFO, logger="hushgrad"):
        for batch in run:
            run.step(loss, batch)
    assert caplog.messages == [
        "certifying the model: its gradients are compared with those of single records",
        "certifying the form traced",
        "certified the form traced for 2 parameters",
        *(f"testing the certified model again, at use {use}" for use in (1, 2, 4)),
    ]


def test_the_terminal_shows_progress_and_warnings() -> None:
    shown: list[str] = []
    console = Console(file=io.StringIO(), width=200)
    logger = logging.getLogger(f"{LOGGER}.certify")
    level = logging.getLogger(LOGGER).level
    with Relay(shown.append, console):
        logger.info("certifying the form %s", "traced")
        logger.debug("a detail")
        logger.warning("not dense: [a reason]")
    logger.info("afterwards")
    assert shown == ["certifying the form traced"]
    assert console.file.getvalue() == "not dense: [a reason]\n"
    assert logging.getLogger(LOGGER).level == level
