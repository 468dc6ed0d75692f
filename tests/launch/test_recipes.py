"""The recipes: their networks, their plans, and one private step of each."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

import hushgrad as hg
from hushgrad.data import Split, digits
from hushgrad.launch.recipe import Recipe
from hushgrad.run.augmentation import Views
from hushgrad.sampling import Poisson
from hushgrad_recipes import a9a, cifar10, fashion_mnist, mnist
from hushgrad_recipes.classifier import Settings, classifier
from hushgrad_recipes.images import set_upright, standardise
from hushgrad_recipes.networks import cnn5, tanh_cnn
from hushgrad_recipes.views import random_shifts

real = pytest.mark.skipif("HUSHGRAD_DATA" not in os.environ, reason="HUSHGRAD_DATA is not set")

SETTINGS = Settings(clip=hg.automatic(), batch=256, epochs=2, lr=0.1)


def softmax() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("network", "shape", "parameters"),
    [(tanh_cnn, (1, 28, 28), 26_010), (cnn5, (3, 32, 32), 62_006), (a9a.logistic, (123,), 248)],
)
def test_the_networks_have_the_papers_sizes(
    network: Callable[[], nn.Module], shape: tuple[int, ...], parameters: int
) -> None:
    model = network()
    assert size(model) == parameters
    assert model(torch.zeros(3, *shape)).shape == (3, 2 if shape == (123,) else 10)


def stepped(recipe: Recipe, records: int = 300) -> dict[str, torch.Tensor]:
    """How far one private step on the first records moves each parameter."""
    data = tuple(column[:records] for column in recipe.data)
    plan = dataclasses.replace(recipe.plan, records=records, sampling=Poisson(0.5))
    before = {name: p.detach().clone() for name, p in recipe.model.named_parameters()}
    run = hg.train(
        recipe.model,
        recipe.optimizer,
        data,
        plan=plan,
        rng=hg.Rng.fixed(0),
        execution=recipe.execution,
    )
    run.step(recipe.loss, next(iter(run)))
    return {name: p.detach() - before[name] for name, p in recipe.model.named_parameters()}


def reach(recipe: Recipe, records: int = 300) -> float:
    """The most that one step may move: lr times the mean's bound, and the noise with its spread."""
    bound, d = recipe.plan.clip.bound(1), size(recipe.model)
    lr, batch = recipe.optimizer.param_groups[0]["lr"], records / 2
    noise = recipe.plan.noise_multiplier * bound * math.sqrt(d) * lr / batch
    return noise * 1.2 + bound * lr * 1.4


@real
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (mnist.automatic, (60_000, 512, 4688, 3.0, 0.05, "automatic(gamma=0.01, clip_norm=1.0)")),
        (mnist.abadi, (60_000, 512, 4688, 3.0, 0.5, "abadi(clip_norm=0.1)")),
        (
            fashion_mnist.automatic,
            (60_000, 2048, 1172, 3.0, 0.4, "automatic(gamma=0.01, clip_norm=1.0)"),
        ),
        (fashion_mnist.abadi, (60_000, 2048, 1172, 3.0, 4.0, "abadi(clip_norm=0.1)")),
        (cifar10.automatic, (50_000, 2048, 977, 3.0, 0.2, "automatic(gamma=0.01, clip_norm=1.0)")),
        (a9a.automatic, (32_561, 1024, 318, 0.5, 2.0, "automatic(gamma=0.01, clip_norm=1.0)")),
        (a9a.abadi, (32_561, 1024, 318, 0.5, 1.0, "abadi(clip_norm=1.0)")),
    ],
    ids=lambda x: f"{x.__module__}.{x.__name__}" if callable(x) else "",
)
def test_a_recipe_on_its_data(recipe: Callable[[], Recipe], expected: tuple[Any, ...]) -> None:
    """The plan has the stated numbers and spends its ε, and one step moves every parameter."""
    made = recipe()
    records, batch, steps, epsilon, lr, clip = expected
    plan = made.plan
    assert (plan.records, plan.steps, plan.delta) == (records, steps, 1e-5)
    assert plan.sampling == Poisson(batch / records) and repr(plan.clip) == clip
    assert 0.99 * epsilon < plan.epsilon <= epsilon
    assert made.optimizer.param_groups[0]["lr"] == lr
    assert made.optimizer.param_groups[0]["momentum"] == 0.9
    assert any("PLD" in note for note in made.notes)

    assert made.correct is not None and made.test is not None
    assert made.correct(made.test).shape == made.test[1].shape
    moved = stepped(made)
    assert all(float(change.abs().sum()) > 0 for change in moved.values())
    assert sum(float(change.square().sum()) for change in moved.values()) < reach(made) ** 2


@real
def test_a_strong_recipe_falls_and_takes_several_views() -> None:
    made = mnist.strong(batch=2048, epochs=1, views=2)
    assert isinstance(made.loss, Views) and made.loss.count == 2
    assert made.plan.steps == 30 and 2.97 < made.plan.epsilon <= 3
    assert made.schedule is not None
    rates = []
    for _ in range(30):
        rates.append(made.optimizer.param_groups[0]["lr"])
        made.optimizer.step()
        made.schedule.step()
    assert rates[0] == 0.4 and rates[15] == pytest.approx(0.4 * (1 - 15 / 29.3), rel=1e-2)
    assert rates[-1] < 0.01
    moved = stepped(mnist.strong(batch=2048, epochs=1, views=2), records=100)
    assert all(float(change.abs().sum()) > 0 for change in moved.values())


def places(view: torch.Tensor, image: torch.Tensor) -> list[tuple[int, int]]:
    """The shifts of an image by up to two pixels that a view is."""
    padded = nn.functional.pad(image - image.min(), [2] * 4) + image.min()
    size = image.shape[-1]
    cuts = ((a, b, padded[:, a : a + size, b : b + size]) for a in range(5) for b in range(5))
    return [(a, b) for a, b, cut in cuts if torch.allclose(view, cut)]


def test_views_are_shifts_of_each_image_by_itself() -> None:
    images, labels = torch.rand(64, 1, 9, 9), torch.arange(64)
    moved, same = random_shifts(2)((images, labels))
    assert torch.equal(same, labels)
    found = [places(view, image) for view, image in zip(moved, images, strict=True)]
    assert all(len(each) == 1 for each in found)
    assert len({each[0] for each in found}) > 15


def test_half_of_the_views_are_mirror_images() -> None:
    images = torch.rand(64, 1, 9, 9)
    views, _ = random_shifts(2, mirrored=True)((images, torch.zeros(64)))
    pairs = list(zip(views, images, strict=True))
    plain = sum(len(places(view, image)) for view, image in pairs)
    turned = sum(len(places(view, image.flip(-1))) for view, image in pairs)
    assert plain + turned == 64 and 16 < plain < 48


@real
def test_a9a_is_scaled_by_a_public_constant() -> None:
    made = a9a.abadi()
    norms = made.data[0].norm(dim=1)
    assert float(norms.max()) == pytest.approx(1.0) and float(made.data[0].max()) < 0.27
    assert any("÷ √14" in note for note in made.notes)


def test_the_seed_is_that_of_the_first_weights_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = (
        classifier(softmax, digits(), SETTINGS, epsilon=3.0, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert one.model is not same.model
    weights = [made.model.get_parameter("1.weight") for made in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_plan_costs_what_is_asked_for() -> None:
    costs = [classifier(softmax, digits(), SETTINGS, epsilon=e).plan.epsilon for e in (0.5, 1.0)]
    assert 0.49 < costs[0] <= 0.5 and 0.99 < costs[1] <= 1.0


def test_schedule_average_and_loss_are_made_for_the_run() -> None:
    settings = dataclasses.replace(
        SETTINGS,
        schedule=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        average=AveragedModel,
        loss=lambda model: lambda batch: model(batch[0]).sum(1),
    )
    made = classifier(softmax, digits(), settings, epsilon=3.0)
    assert made.schedule is not None and made.schedule.optimizer is made.optimizer
    assert made.average is not None and size(made.average.module) == size(made.model)
    assert made.average.module is not made.model
    assert torch.equal(made.loss(made.test), made.model(made.test[0]).sum(1))


def test_correct_is_one_where_the_largest_score_is_the_label() -> None:
    split = Split(
        name="toy",
        source="",
        train=(torch.eye(3), torch.tensor([0, 1, 2])),
        test=(torch.eye(3), torch.tensor([0, 2, 2])),
        preparation="as it is",
    )
    settings = dataclasses.replace(SETTINGS, batch=1)
    made = classifier(lambda: nn.Linear(3, 3), split, settings, epsilon=3.0)
    with torch.no_grad():
        made.model.get_parameter("weight").copy_(torch.eye(3))
        made.model.get_parameter("bias").zero_()
    assert made.correct is not None
    assert made.correct(made.test).tolist() == [1, 0, 1]


@pytest.mark.parametrize("prepare", [set_upright, standardise])
def test_an_image_is_prepared_by_itself(prepare: Callable[[torch.Tensor], torch.Tensor]) -> None:
    images = torch.rand(9, 1, 28, 28)
    blank = torch.zeros(1, 1, 28, 28)
    alone = torch.cat([prepare(image[None]) for image in images])
    assert torch.allclose(prepare(torch.cat([blank, images]))[1:], alone, atol=1e-6)
    assert prepare(blank).abs().max() == 0


def test_a_slanted_line_is_set_upright_in_the_middle() -> None:
    line = torch.zeros(1, 1, 28, 28)
    for i in range(4, 20):
        line[0, 0, i, 2 + i // 2] = line[0, 0, i, 3 + i // 2] = 1.0
    columns = set_upright(line)[0, 0].sum(0)
    assert columns[11:17].sum() > 0.95 * columns.sum() and line[0, 0].sum(0)[11:17].sum() < 8
