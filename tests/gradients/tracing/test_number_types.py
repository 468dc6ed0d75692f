"""Parameters of every type, and autocast."""

from __future__ import annotations

import pytest
import torch
from compare import check, private
from torch import Tensor, nn
from uses import Uses, loss_of, weigh

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def small_network() -> nn.Sequential:
    """A convolution, a normalisation and a linear layer."""
    return nn.Sequential(
        nn.Conv1d(3, 4, 2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.LayerNorm(5),
        Uses(lambda h, p, q: (h + p) * q, [(5,), (5,)]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_wide_for_parameters_of_every_type(dtype: torch.dtype) -> None:
    model = small_network().to(dtype)
    sums = check(loss_of(model), model, torch.randn(5, 3, 4, dtype=dtype)).weighted_sum(
        dict.fromkeys(private(model), torch.ones(5))
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in sums.values()} == {wide}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_exact_to_its_precision(dtype: torch.dtype) -> None:
    model = small_network().to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(loss_of(model), model, torch.randn(5, 3, 4, dtype=dtype))


def test_autocast_inside_the_loss_is_exact() -> None:
    """The usual place: the library sees neither the context nor its end."""
    model, x = small_network(), torch.randn(5, 3, 4)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        return weigh(y.float())

    check(loss, model, x, tolerance=0.2)


def test_parameters_of_mixed_types_are_exact() -> None:
    """Norms in float32 around layers in bfloat16, as large models are kept."""
    model = nn.Sequential(nn.Linear(4, 6, dtype=torch.bfloat16), nn.LayerNorm(6), nn.Linear(6, 3))

    def loss(x: Tensor) -> Tensor:
        return weigh(model[2](model[1](model[0](x.bfloat16()).float())))

    check(loss, model, torch.randn(5, 4))
