"""Where the records are: in front, behind, in the middle, or flattened with something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compare import check, private
from torch import Tensor, nn
from uses import weigh

from hushgrad.gradients import auto, certificate_for, traced
from hushgrad.gradients.tracing.layout import Ambiguous, Layout, infer

Apply = Callable[[nn.Module, Tensor], Tensor]


def _batch_first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def _time_first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(0, 1)).transpose(0, 1)


def _flat(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def _flat_time_major(layer: nn.Module, x: Tensor) -> Tensor:
    turned = x.transpose(0, 1)
    return layer(turned.flatten(0, 1)).unflatten(0, turned.shape[:2]).transpose(0, 1)


def _flat_in_the_middle(layer: nn.Module, x: Tensor) -> Tensor:
    """Halves of the sequence, records, halves: no one run of rows belongs to a record."""
    parts = x.unflatten(1, (2, -1)).transpose(0, 1)
    y = layer(parts.flatten(0, 2)).unflatten(0, parts.shape[:3])
    return y.transpose(0, 1).flatten(1, 2)


def _both(layer: nn.Module, x: Tensor) -> Tensor:
    return _flat(layer, x) + _flat_time_major(layer, x).tanh()


TRACED: dict[str, Apply] = {
    "batch first": _batch_first,
    "time first": _time_first,
    "batch and time": _flat,
    "time and batch": _flat_time_major,
}
OTHERS: dict[str, Apply] = {"in the middle": _flat_in_the_middle, "both orders": _both}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "layer norm": lambda: nn.LayerNorm(4),
    "RMS norm": lambda: nn.RMSNorm(4),
}


def loss_through(apply: Apply, layers: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return lambda x: weigh(apply(layers[1], torch.tanh(layers[0](x))))


@pytest.mark.parametrize("length", [2, 8, 16])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", TRACED)
def test_every_layout_is_traced(name: str, layer: str, length: int) -> None:
    """Also where the sequence is as long as the batch, padded or not."""
    model = nn.Sequential(nn.Linear(3, 4), LAYERS[layer]()).double()
    for size in (2, 8, 9):
        batch = torch.randn(size, length, 3, dtype=torch.float64)
        check(loss_through(TRACED[name], model), model, batch, form=traced)


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_are_exact_in_another_form(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)).double()
    batch = torch.randn(8, 6, 3, dtype=torch.float64)
    check(loss_through(OTHERS[name], model), model, batch, form=auto)


def test_the_certificate_names_the_place_of_the_records() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    places = {}
    for name, apply in TRACED.items():
        loss = loss_through(apply, model)
        sites = certificate_for(loss, private(model), torch.randn(8, 6, 3), form=traced).sites
        places[name] = str(sites[1].inputs[0].layout)
    assert places == {
        "batch first": "dim 0",
        "time first": "dim 1",
        "batch and time": "dim 0 as (batch, 6)",
        "time and batch": "dim 0 as (6, batch)",
    }


def test_images_and_frames_in_one_convolution() -> None:
    """The batch is flattened with the frames for one layer and stands alone for the next."""
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Conv2d(3, 2, 2)).double()

    def loss(x: Tensor) -> Tensor:
        frames = model[0](x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return weigh(model[1](frames.mean(1)))

    check(loss, model, torch.randn(5, 3, 1, 5, 5, dtype=torch.float64), form=traced)


def test_two_dimensions_that_follow_the_batch_are_not_guessed() -> None:
    with pytest.raises(Ambiguous, match=r"dimensions \[0, 1\]"):
        infer((11, 22), 11)
    assert infer((11, 6), 11) == Layout(0)
    assert infer((6, 33), 11) == Layout(1, share=3)
    assert infer((6, 5), 11) is None


def test_similarities_between_records_are_refused_or_exact() -> None:
    """A parameter meets a matrix of all pairs: both dimensions follow the batch."""
    scale, layer = nn.Parameter(torch.ones(())), nn.Linear(3, 4)

    def loss(x: Tensor) -> Tensor:
        h = layer(x)
        return (h @ h.T * scale).diagonal()

    params = {"scale": scale, **private(layer)}
    check(loss, params, torch.randn(8, 3), form=auto)
