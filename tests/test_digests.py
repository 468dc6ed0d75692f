"""Digests of tensors: they see a bit and a place, in any layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hushgrad.bits import digests

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (40, 33), (8, 3, 5, 7), (1200, 3)])
def test_a_digest_sees_a_bit_and_a_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (9 * torch.rand(shape, generator=torch.Generator().manual_seed(1))).to(dtype)

    def digest(x: Tensor) -> int:
        return digests({"x": x})["x"]

    assert digest(x) == digest(x.clone())
    for place in {0, x.numel() // 2, x.numel() - 1}:
        other = x.clone()
        raw = torch.view_as_real(other) if other.is_complex() else other
        raw.view(-1).view(torch.uint8)[place * raw.element_size()] ^= 1
        assert digest(x) != digest(other)
    if x.numel() > 8 and not torch.equal(x.flatten().flip(0), x.flatten()):
        assert digest(x) != digest(x.flatten().flip(0).reshape(shape))


def test_a_digest_takes_any_layout() -> None:
    x = torch.randn(50, 60)
    for view in (x.t(), x[:, ::2], x[1:, 1:], x[:1].expand(50, 60), x.view(2, 25, 60)[1]):
        before = digests({"x": view})
        assert before == digests({"x": view})
        x[0] += 1
        x[40] += 1
        assert before != digests({"x": view})
