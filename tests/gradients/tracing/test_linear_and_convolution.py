"""Linear layers and convolutions, in every spelling, against ordinary autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import check
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from uses import Uses, away_from_zero, loss_of, train_only

from hushgrad.gradients.factors import patches as convolution

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SIZES = st.integers(1, 5)
BATCHES = st.sampled_from([1, 2, 3, 8, 9])
SEEDS = st.integers(0, 1000)


@given(
    middle=st.lists(SIZES, max_size=2),
    d=SIZES,
    p=SIZES,
    trained=st.sampled_from(["both", "weight", "bias"]),
    bias=st.booleans(),
    batch=BATCHES,
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
)
def test_linear_layers_are_exact(
    middle: list[int],
    d: int,
    p: int,
    trained: str,
    bias: bool,
    batch: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    assume(bias or trained != "bias")
    torch.manual_seed(seed)
    layer = train_only(nn.Linear(d, p, bias=bias, dtype=dtype), trained)
    model = nn.Sequential(Uses(lambda h: h, [], dtype), layer)
    check(loss_of(model), model, away_from_zero(batch, *middle, d, dtype=dtype))


@pytest.mark.parametrize(("t", "width", "form"), [(2, 40, "Gram"), (40, 2, "materialised")])
def test_linear_is_held_in_the_cheaper_form(t: int, width: int, form: str) -> None:
    """Few positions of a wide layer stay factored; many of a narrow one are written out."""
    model = nn.Linear(width, width)
    gradients = check(loss_of(model), model, torch.randn(5, t, width))
    assert gradients.held_gradients["weight"].form == form


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@settings(max_examples=40)
@given(
    spatial=st.sampled_from([1, 2, 3]),
    channels=st.sampled_from([(1, 1, 1), (2, 3, 1), (4, 2, 2), (3, 3, 3), (2, 4, 2)]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.sampled_from([0, 1, 2, "same", "valid", "uneven"]),
    mode=st.sampled_from(["zeros", "reflect", "circular", "replicate"]),
    trained=st.sampled_from(["both", "weight", "bias"]),
    batch=BATCHES,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=SEEDS,
)
def test_convolutions_are_exact(
    spatial: int,
    channels: tuple[int, int, int],
    kernel: int,
    stride: int,
    dilation: int,
    padding: Any,
    mode: str,
    trained: str,
    batch: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    assume(padding != "same" or stride == 1)
    torch.manual_seed(seed)
    ins, outs, groups = channels
    pads = (2, 0, 1)[:spatial] if padding == "uneven" else padding
    layer = CONVOLUTIONS[spatial](
        ins, outs, kernel, stride, pads, dilation, groups, padding_mode=mode, dtype=dtype
    )
    model = nn.Sequential(Uses(lambda h: h, [], dtype), train_only(layer, trained))
    check(loss_of(model), model, torch.randn(batch, ins, *(5, 6, 5)[:spatial], dtype=dtype))


@pytest.mark.parametrize(
    ("ins", "outs", "size", "form"), [(1, 4, 12, "materialised"), (24, 48, 3, "Gram")]
)
@pytest.mark.parametrize("spatial", [1, 2])
@pytest.mark.parametrize("padding", [0, "same"])
def test_convolution_in_both_forms(
    ins: int, outs: int, size: int, form: str, spatial: int, padding: Any
) -> None:
    """Patches where few positions meet many channels, a grouped convolution elsewhere."""
    layer = CONVOLUTIONS[spatial](ins, outs, 2, padding=padding)
    model = nn.Sequential(Uses(lambda h: h, []), layer)
    gradients = check(loss_of(model), model, torch.randn(3, ins, *[size] * spatial))
    assert gradients.held_gradients["1.weight"].form == form


@pytest.mark.parametrize(
    ("ins", "kernel", "stride", "padding", "size"),
    [
        (1, 8, 2, 2, (28, 28)),
        (1, 8, 2, 0, (27, 25)),
        (3, 5, 1, "same", (9, 7)),
        (6, 5, 1, (1, 3), (8, 6)),
        (2, (4, 4), (2, 3), 1, (10, 12)),
        (1, (7, 8), (2, 1), (0, 2), (12, 9)),
    ],
)
def test_convolution_whose_rows_are_folded_into_channels(
    ins: int, kernel: Any, stride: Any, padding: Any, size: tuple[int, int], monkeypatch
) -> None:
    folded, calls = convolution._folded, []
    monkeypatch.setattr(convolution, "_folded", lambda *a: calls.append(a) or folded(*a))
    layer = nn.Conv2d(ins, 16, kernel, stride, padding)
    check(loss_of(layer), layer, torch.randn(5, ins, *size))
    assert calls


def test_convolution_of_flattened_frames() -> None:
    """A video's frames are records of a convolution that all belong to one sample."""
    layer = nn.Conv2d(2, 3, 3)

    def model(x: Tensor) -> Tensor:
        return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    check(loss_of(model), layer, torch.randn(5, 4, 2, 6, 6))


def test_convolution_gradients_that_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More records than one call takes, and a record has the bits of any other cut."""
    settings = convolution.Geometry((8, 8, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, g = torch.randn(40, 1, 8, 6, 6), torch.randn(40, 1, 8, 6, 6)
    whole = convolution._materialise(x, g, settings)
    monkeypatch.setattr(convolution, "_PIECE", 16 * whole[0].nbytes)
    assert torch.equal(convolution._materialise(x, g, settings), whole)
    layer = nn.Conv2d(8, 8, 3, padding=1)
    check(loss_of(layer), layer, torch.randn(40, 8, 6, 6))


def test_group_norm_of_flattened_frames() -> None:
    layer = nn.GroupNorm(2, 4)

    def model(x: Tensor) -> Tensor:
        return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    check(loss_of(model), layer, torch.randn(5, 3, 4, 2, 3))


TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@settings(max_examples=40)
@given(
    spatial=st.sampled_from([1, 2, 3]),
    channels=st.sampled_from([(1, 1, 1), (2, 3, 1), (4, 2, 2), (3, 3, 3), (2, 4, 2)]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    padding=st.integers(0, 2),
    output_padding=st.integers(0, 2),
    trained=st.sampled_from(["both", "weight", "bias"]),
    batch=BATCHES,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=SEEDS,
)
def test_transposed_convolutions_are_exact(
    spatial: int,
    channels: tuple[int, int, int],
    kernel: int,
    stride: int,
    dilation: int,
    padding: int,
    output_padding: int,
    trained: str,
    batch: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """The output may be padded up to the stride or the dilation, whichever is larger."""
    assume(output_padding < max(stride, dilation))
    torch.manual_seed(seed)
    ins, outs, groups = channels
    layer = TRANSPOSED[spatial](
        ins, outs, kernel, stride, padding, output_padding, groups, dilation=dilation, dtype=dtype
    )
    model = nn.Sequential(Uses(lambda h: h, [], dtype), train_only(layer, trained))
    check(loss_of(model), model, torch.randn(batch, ins, *(5, 6, 5)[:spatial], dtype=dtype))


@pytest.mark.parametrize(
    ("ins", "outs", "size", "form"), [(4, 1, 12, "materialised"), (48, 24, 2, "Gram")]
)
@pytest.mark.parametrize("spatial", [1, 2])
def test_transposed_convolution_in_both_forms(
    ins: int, outs: int, size: int, form: str, spatial: int
) -> None:
    layer = TRANSPOSED[spatial](ins, outs, 2)
    model = nn.Sequential(Uses(lambda h: h, []), layer)
    gradients = check(loss_of(model), model, torch.randn(3, ins, *[size] * spatial))
    assert gradients.held_gradients["1.weight"].form == form


@pytest.mark.parametrize("sizes", [(1, 1), ((2, 1), (1, 0))])
def test_transposed_convolution_of_flattened_frames(sizes: Any) -> None:
    stride, output_padding = sizes
    layer = nn.ConvTranspose2d(2, 3, 3, stride, 1, output_padding, dilation=2)

    def model(x: Tensor) -> Tensor:
        return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    check(loss_of(model), layer, torch.randn(5, 4, 2, 6, 6))
