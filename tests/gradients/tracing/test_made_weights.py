"""Weights, tokens and states that are made from parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from uses import away_from_zero, run

from hushgrad.gradients import auto

# A weight of [3, 4] for `F.linear`, made from parameters.
WEIGHTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "t": (lambda w: w.t(), [(4, 3)]),
    "torch.t": (lambda w: torch.t(w), [(4, 3)]),
    "T": (lambda w: w.T, [(4, 3)]),
    "mT": (lambda w: w.mT, [(4, 3)]),
    "T.T": (lambda w: w.T.T, [(3, 4)]),
    "transpose": (lambda w: w.transpose(0, 1), [(4, 3)]),
    "swapaxes": (lambda w: torch.swapaxes(w, 0, 1), [(4, 3)]),
    "permute": (lambda w: w.permute(1, 0), [(4, 3)]),
    "T.contiguous": (lambda w: w.T.contiguous(), [(4, 3)]),
    "clone": (lambda w: w.clone(), [(3, 4)]),
    "contiguous": (lambda w: w.contiguous(), [(3, 4)]),
    "to(dtype)": (lambda w: w.to(torch.float32), [(3, 4)]),
    "to(dtype) and back": (lambda w: w.double().float(), [(3, 4)]),
    "type_as": (lambda w: w.type_as(torch.ones(1)), [(3, 4)]),
    "T.float": (lambda w: w.T.float(), [(4, 3)]),
    "flip": (lambda w: w.flip(0), [(3, 4)]),
    "[...]": (lambda w: w[...], [(3, 4)]),
    "[:]": (lambda w: w[:], [(3, 4)]),
    "rows": (lambda w: w[1:4], [(5, 4)]),
    "columns": (lambda w: w[:, ::2], [(3, 8)]),
    "rows by list": (lambda w: w[[0, 2, 2]], [(4, 4)]),
    "rows by tensor": (lambda w: w[torch.tensor([3, 0, 0])], [(4, 4)]),
    "rows by mask": (lambda w: w[torch.tensor([True, False, True, True])], [(4, 4)]),
    "[0]": (lambda w: w[0], [(2, 3, 4)]),
    "[None]": (lambda w: w[None][0], [(3, 4)]),
    "unsqueeze": (lambda w: w.unsqueeze(0).squeeze(0), [(3, 4)]),
    "view": (lambda w: w.view(3, 4), [(12,)]),
    "view of a square": (lambda w: w.view(4, 3).view(3, 4), [(3, 4)]),
    "reshape": (lambda w: w.reshape(3, 4), [(2, 6)]),
    "flatten": (lambda w: w.flatten().unflatten(0, (3, 4)), [(3, 2, 2)]),
    "narrow": (lambda w: w.narrow(0, 1, 3), [(5, 4)]),
    "select": (lambda w: w.select(0, 1), [(2, 3, 4)]),
    "expand": (lambda w: w.expand(3, 4), [(1, 4)]),
    "expand_as": (lambda w: w.expand_as(torch.ones(3, 4)), [(4,)]),
    "repeat": (lambda w: w.repeat(3, 2), [(1, 2)]),
    "broadcast_to": (lambda w: torch.broadcast_to(w, (3, 4)), [(3, 1)]),
    "chunk": (lambda w: w.chunk(2)[1], [(6, 4)]),
    "chunks of one": (lambda w: w.chunk(2)[0] * w.chunk(2)[1], [(6, 4)]),
    "split": (lambda w: torch.split(w, [3, 2])[0], [(5, 4)]),
    "tensor_split": (lambda w: w.tensor_split(2)[1], [(6, 4)]),
    "unbind": (lambda w: w.unbind()[1], [(2, 3, 4)]),
    "unpacking": (lambda w: (lambda a, b: a + b)(*w), [(2, 3, 4)]),
    "iteration": (lambda w: torch.stack([row * k for k, row in enumerate(w, 1)]), [(3, 4)]),
    "cat": (lambda w, v: torch.cat([w, v]), [(1, 4), (2, 4)]),
    "cat with a constant": (lambda w: torch.cat([w, torch.ones(1, 4)]), [(2, 4)]),
    "cat with itself": (lambda w: torch.cat([w, w, w]), [(1, 4)]),
    "stack": (lambda w, v, u: torch.stack([w, v, u]), [(4,), (4,), (4,)]),
    "einsum": (lambda w, v: torch.einsum("i,j->ij", w, v), [(3,), (4,)]),
    "outer": (lambda w, v: torch.outer(w, v), [(3,), (4,)]),
    "softplus": (lambda w: F.softplus(w), [(3, 4)]),
    "exp": (lambda w: w.exp(), [(3, 4)]),
    "exp of the transpose": (lambda w: w.T.exp(), [(4, 3)]),
    "1 + w": (lambda w: 1 + w, [(3, 4)]),
    "over its norm": (lambda w: w / w.norm(), [(3, 4)]),
    "normalize": (lambda w: F.normalize(w, dim=1), [(3, 4)]),
    "weight norm by hand": (lambda v, g: g * v / v.norm(dim=1, keepdim=True), [(3, 4), (3, 1)]),
    "softmax": (lambda w: w.softmax(1), [(3, 4)]),
    "tril": (lambda w: torch.tril(w), [(3, 4)]),
    "mask": (lambda w: w * torch.ones(3, 4).triu(), [(3, 4)]),
    "masked_fill": (lambda w: w.masked_fill(torch.ones(3, 4).triu() > 0, 0.0), [(3, 4)]),
    "centred": (lambda w: w - w.mean(1, keepdim=True), [(3, 4)]),
    "diag": (lambda w: torch.diag(w)[:3], [(4,)]),
    "where": (lambda w, v: torch.where(torch.ones(3, 4).triu() > 0, w, v), [(3, 4), (1,)]),
    "sum of two": (lambda w, v: w + 0.5 * v, [(3, 4), (3, 4)]),
    "with detached part": (lambda w: w * w.detach(), [(3, 4)]),
    "sorted": (lambda w: w.sort(dim=1).values, [(3, 4)]),
    "maximum over a dimension": (lambda w: w.max(dim=0).values, [(2, 3, 4)]),
    "qr": (lambda w: torch.linalg.qr(w.T).Q.T, [(3, 4)]),
    "fake quantisation": (lambda w: w + (w.round() - w).detach(), [(3, 4)]),
    "through data": (lambda w: w + w.data, [(3, 4)]),
    "shape and dtype of its own": (
        lambda w: w.view(w.shape[0], w.size(1)).to(w.dtype).to(w.device), [(3, 4)]
    ),
    "scaled by a fact about it": (lambda w: w / w.numel() ** 0.5 + len(w) - w.dim(), [(3, 4)]),
    "zeros like it": (lambda w: w + torch.zeros_like(w) + w.new_ones(w.shape), [(3, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_made_from_parameters_are_exact(kind: str) -> None:
    make, shapes = WEIGHTS[kind]
    run(lambda h, *ps: F.linear(h, make(*ps)), shapes, away_from_zero(3, 2, 4))


@pytest.mark.parametrize("kind", ["T", "rows", "cat", "softplus", "over its norm", "expand"])
@pytest.mark.parametrize(
    "consume",
    [
        lambda h, w: h @ w.T,
        lambda h, w: h.unsqueeze(2) * w,
        lambda h, w: F.linear(h, w, w.sum(1)),
        lambda h, w: F.linear(h, w) + F.linear(h * h, w),
        lambda h, w: F.layer_norm(h.unsqueeze(2).expand(-1, -1, 3, -1), (3, 4), w),
        lambda h, w: F.conv1d(h.mT, w.unsqueeze(2)),
    ],
)
def test_every_use_of_a_made_weight_is_exact(kind: str, consume: Callable[..., Tensor]) -> None:
    make, shapes = WEIGHTS[kind]
    run(lambda h, *ps: consume(h, make(*ps)), shapes, away_from_zero(3, 2, 4))


# Parameters that join the activation [batch, 3, 4] as more of the same.
TOKENS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "class token by expand": (
        lambda h, p: torch.cat([p.expand(len(h), -1, -1), h], 1), [(1, 1, 4)]
    ),
    "class token by expand_as": (
        lambda h, p: torch.cat([p.expand_as(h[:, :1]), h], dim=1), [(1, 1, 4)]
    ),
    "class token by repeat": (lambda h, p: torch.cat([p.repeat(len(h), 1, 1), h], 1), [(1, 1, 4)]),
    "class token by broadcast_to": (
        lambda h, p: torch.cat([torch.broadcast_to(p, (len(h), 1, 4)), h], 1), [(4,)]
    ),
    "class token plus zeros": (
        lambda h, p: torch.cat([p + torch.zeros(len(h), 1, 1), h], 1), [(1, 1, 4)]
    ),
    "several tokens": (lambda h, p: torch.cat([p.expand(len(h), 2, 4), h], 1), [(2, 4)]),
    "token repeated within a record": (
        lambda h, p: torch.cat([p.repeat(len(h), 3, 1), h], 1), [(2, 4)]
    ),
    "token of a slice": (lambda h, p: torch.cat([p[:1].expand(len(h), 1, 4), h], 1), [(2, 4)]),
    "token after a linear map": (
        lambda h, p, w: F.linear(torch.cat([p.expand(len(h), -1, -1), h], 1), w),
        [(1, 1, 4), (3, 4)],
    ),
    "token, linear map ahead": (
        lambda h, p, w: torch.cat([F.linear(p.expand(len(h), 1, 4), w), h], 1), [(1, 4), (4, 4)]
    ),
    "token by index of zeros": (
        lambda h, p: torch.cat([p[torch.zeros(len(h), dtype=torch.long)][:, None], h], 1), [(2, 4)]
    ),
    "repeat_interleave": (
        lambda h, p: torch.cat([p.repeat_interleave(len(h), 0), h], 1), [(1, 1, 4)]
    ),
    "tile": (lambda h, p: torch.cat([p.tile(len(h), 1, 1), h], 1), [(1, 1, 4)]),
    "stack of copies": (
        lambda h, p: torch.cat([torch.stack([p] * len(h)), h], 1), [(1, 4)]
    ),
    "queries": (
        lambda h, q: F.scaled_dot_product_attention(q.expand(len(h), 2, 4), h, h), [(2, 4)]
    ),
    "queries against keys": (lambda h, q: (q @ h.mT).softmax(-1) @ h, [(2, 4)]),
    "mask token by where": (
        lambda h, p: torch.where(h[..., :1] > 0, h, p), [(4,)]
    ),
    "mask token by product": (
        lambda h, p: h * (h[..., :1] > 0) + p * (h[..., :1] <= 0), [(4,)]
    ),
    "masked_fill by a scalar": (lambda h, p: h.masked_fill(h > 0, p), [()]),
    "padding by a parameter": (
        lambda h, p: torch.stack([p.expand_as(h), h], 1), [(4,)]
    ),
    "initial state of a recurrence": (
        lambda h, s, w: recur(h, s, w), [(4,), (4, 4)]
    ),
}  # fmt: skip


def recur(h: Tensor, state: Tensor, w: Tensor) -> Tensor:
    state = state.expand(len(h), -1)
    for t in range(h.shape[1]):
        state = torch.tanh(h[:, t] + 0.2 * state @ w)
    return state


@pytest.mark.parametrize("kind", TOKENS)
def test_tokens_that_are_parameters_are_exact(kind: str) -> None:
    function, shapes = TOKENS[kind]
    run(function, shapes, away_from_zero(5, 3, 4), form=auto)


@pytest.mark.parametrize("kind", [k for k in TOKENS if "expand" in k or "by repeat" in k])
def test_common_tokens_are_traced(kind: str) -> None:
    function, shapes = TOKENS[kind]
    run(function, shapes, away_from_zero(5, 3, 4))
