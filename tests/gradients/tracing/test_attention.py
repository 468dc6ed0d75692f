"""Multi-head attention and torch's transformers, unmodified and traced."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Expected, agree, check, expected, private
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from uses import weigh

from hushgrad.gradients import auto, certificate_for, difference, per_sample, traced
from hushgrad.gradients.certification.deterministic import WithoutRandomness
from hushgrad.gradients.factors.choice import cost_of

HEADS, WIDTH = 2, 6
MEETINGS = ("self", "encoder and decoder", "three")
MASKS = ("none", "additive", "boolean", "by record", "causal", "causal hint")


class Attention(nn.Module):
    """One attention, its inputs all with parameters ahead, in any layout and under any mask."""

    def __init__(self, meeting: str, mask: str, padded: str, **options: Any) -> None:
        super().__init__()
        self.need_weights = options.pop("need_weights")
        self.average = options.pop("average")
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.ahead = nn.Parameter(torch.tensor([0.8, 1.2, 0.7]))
        self.meeting, self.mask, self.padded = meeting, mask, padded
        for p in self.inner.parameters():  # its biases start at zero
            nn.init.normal_(p, std=0.5)

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the records x, [batch, 4, width]."""
        query = x[:, :3] * self.ahead[0] if self.meeting != "self" else x * self.ahead[0]
        key = query if self.meeting == "self" else x.flip(1) * self.ahead[1]
        value = x.tanh() * self.ahead[2] if self.meeting == "three" else key
        attention = self.inner
        if not attention._qkv_same_embed_dim:
            key, value = key[..., : attention.kdim], value[..., : attention.vdim]
        if attention.batch_first:
            return query, key, value
        turned = {id(z): z.transpose(0, 1) for z in (query, key, value)}
        return turned[id(query)], turned[id(key)], turned[id(value)]

    def masks(self, x: Tensor) -> dict[str, Any]:
        rows, columns = 4 if self.meeting == "self" else 3, 4
        forbidden = torch.ones(rows, columns).triu(1).bool()
        options: dict[str, Any] = {}
        if self.mask in ("boolean", "causal", "causal hint"):
            options["attn_mask"] = forbidden
        elif self.mask == "additive":
            options["attn_mask"] = torch.arange(rows * columns).view(rows, columns).cos()
        elif self.mask == "by record":
            wide = x.mean((1, 2))[:, None, None, None] * torch.ones(HEADS, rows, columns)
            options["attn_mask"] = wide.detach().cos().flatten(0, 1)
        if self.mask == "causal hint":
            options["is_causal"] = True
        if self.padded != "none":
            absent = x[..., 0] > 0.5
            absent[:, 0] = False
            options["key_padding_mask"] = absent
            if self.padded == "additive":
                options["key_padding_mask"] = torch.where(absent, -3.0, 0.1)
        if {"attn_mask", "key_padding_mask"} <= options.keys():
            for name in ("attn_mask", "key_padding_mask"):  # torch wants both of one type
                if options[name].dtype == torch.bool:
                    options[name] = torch.zeros(()).masked_fill(options[name], -torch.inf)
        return options

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.inner(
            *self.inputs(x),
            need_weights=self.need_weights,
            average_attn_weights=self.average,
            **self.masks(x),
        )
        y = (y if self.inner.batch_first else y.transpose(0, 1)).flatten(1)
        return y if weights is None else torch.cat([y, weights.flatten(1)], 1)


PLAIN: dict[str, Any] = {
    "meeting": "self", "mask": "none", "padded": "none", "need_weights": False, "average": True,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"{meeting}, batch first {first}, weights {needed}": {
        "meeting": meeting, "batch_first": first, "need_weights": needed}
       for meeting, first, needed in itertools.product(MEETINGS, (True, False), (True, False))},
    **{f"{mask} mask, padding {padded}": {"mask": mask, "padded": padded, "need_weights": needed}
       for mask in MASKS
       for padded, needed in (("none", False), ("boolean", True), ("additive", False))},
    "causal hint, weights": {"mask": "causal hint", "need_weights": True},
    "each head's weights": {"need_weights": True, "average": False},
    "no biases": {"bias": False},
    "no biases, encoder and decoder": {"bias": False, "meeting": "encoder and decoder"},
    "other keys": {"kdim": 5, "meeting": "three"},
    "other values": {"vdim": 4, "meeting": "three", "batch_first": True},
    "other keys and values": {"kdim": 5, "vdim": 3, "meeting": "three"},
    "other keys and values, no biases": {"kdim": 5, "vdim": 3, "meeting": "three", "bias": False},
    "bias of keys and values": {"add_bias_kv": True},
    "bias of keys and values, masks": {
        "add_bias_kv": True, "mask": "by record", "padded": "boolean", "need_weights": True},
    "zeros to attend to": {"add_zero_attn": True},
    "everything": {
        "kdim": 5, "vdim": 3, "meeting": "three", "add_bias_kv": True, "add_zero_attn": True,
        "mask": "by record", "padded": "additive", "need_weights": True, "average": False,
        "batch_first": True, "dropout": 0.3},
    "dropout": {"dropout": 0.3},
    "dropout, weights": {"dropout": 0.3, "need_weights": True},
    "eval": {"dropout": 0.3, "batch_first": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIONS)
def test_attention_in_every_setting_is_exact(kind: str) -> None:
    torch.manual_seed(1)
    model = Attention(**{**PLAIN, **OPTIONS[kind]}).train(kind != "eval")
    # Without, the run of one record would drop other numbers.
    with WithoutRandomness() if model.inner.dropout else nullcontext():
        check(lambda x: weigh(model(x)), model, torch.randn(5, 4, WIDTH))


@pytest.mark.parametrize("mode", ["weights", "no weights"])
def test_dropout_that_is_drawn(mode: str) -> None:
    """Certified with the draws replaced; the step itself draws, for each record its own."""
    model = Attention(**{**PLAIN, "dropout": 0.5, "need_weights": mode == "weights"})
    same = torch.randn(1, 4, WIDTH).expand(16, -1, -1)
    distinct = torch.randn(4, 4, WIDTH)
    loss, params = lambda x: weigh(model(x)), private(model)
    per_sample(loss, params, distinct, form=traced, modules=(model,))
    norms = per_sample(loss, params, same, form=traced, modules=(model,)).sq_norms()
    assert len(norms["inner.in_proj_weight"].unique()) > 8


@pytest.mark.parametrize(
    "trained", ["inner.in_proj_weight", "inner.in_proj_bias", "inner.out_proj"]
)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_partly_frozen_attention_is_exact(trained: str, meeting: str) -> None:
    model = Attention(**{**PLAIN, "meeting": meeting})
    for name, p in model.named_parameters():
        p.requires_grad_(name == "ahead" or name.startswith(trained))
    check(lambda x: weigh(model(x)), model, torch.randn(5, 4, WIDTH))


@pytest.mark.parametrize("meeting", MEETINGS)
def test_double_precision_and_autocast_are_exact(meeting: str) -> None:
    model, x = Attention(**{**PLAIN, "meeting": meeting}), torch.randn(5, 4, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(lambda x: weigh(model(x)), model, x)
    check(lambda x: weigh(model(x)), model.double(), x.double())


def memory(x: Tensor) -> Tensor:
    return torch.ones(3, WIDTH).cumsum(0).cos().expand(len(x), -1, -1)


USES: dict[str, Callable[[nn.MultiheadAttention, Tensor], Tensor]] = {
    "twice": lambda m, x: m(m(x, x, x)[0].tanh(), x, x)[0],
    "whole and by rows": lambda m, x: m(x, x, x)[0] * m(x, x.tanh(), x)[0],
    "rows of one size and another": lambda m, x: m(x, x.tanh(), x.cos())[0] + m(x.cos(), x, x)[0],
    "its weight elsewhere": lambda m, x: m(x, x.tanh(), x)[0] + F.linear(x, m.in_proj_weight[3:9]),
    "its weight, transposed": lambda m, x: (
        m(x, x.tanh(), x)[0] + F.linear(x, m.in_proj_weight[2:8].T)
    ),
    "rows of rows": lambda m, x: F.linear(x, m.in_proj_weight[3:12][2:8].float().T) + m(x, x, x)[0],
    "a constant memory": lambda m, x: m(x, memory(x), memory(x))[0],
    "recomputed": lambda m, x: checkpoint(lambda x: m(x, x.tanh(), x)[0], x, use_reentrant=False),
    "one record at a time": lambda m, x: torch.stack([m(z, z, z)[0] for z in x]),
}


@pytest.mark.parametrize("kind", [kind for kind in USES if kind != "one record at a time"])
def test_every_use_of_attention_is_exact(kind: str) -> None:
    torch.manual_seed(1)
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    check(lambda x: weigh(USES[kind](model, x)), model, torch.randn(5, 4, WIDTH))


def test_unbatched_attention_is_exact() -> None:
    """Records taken out one by one have no dimension: no trace, but another form."""
    model = nn.MultiheadAttention(WIDTH, HEADS)
    model_of = USES["one record at a time"]
    check(lambda x: weigh(model_of(model, x)), model, torch.randn(3, 4, WIDTH), form=auto)


def test_a_relative_bias_as_mask() -> None:
    """A float mask may be a parameter itself, the same for all records."""
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    model.bias = nn.Parameter(torch.randn(4, 4))

    def loss(x: Tensor) -> Tensor:
        return weigh(model(x, x, x, attn_mask=model.bias)[0])

    check(loss, model, torch.randn(5, 4, WIDTH), form=auto)


# --- what is held -------------------------------------------------------------------------------


def wide_attention(meeting: str) -> tuple[nn.MultiheadAttention, Callable[[Tensor], Tensor]]:
    model = nn.MultiheadAttention(40, 2, batch_first=True)

    def loss(x: Tensor) -> Tensor:
        key = x if meeting == "self" else x.flip(1).tanh()
        return weigh(model(x, key, x.cos() if meeting == "three" else key, need_weights=False)[0])

    return model, loss


@pytest.mark.parametrize(("meeting", "blocks"), [*zip(MEETINGS, (1, 2, 3), strict=True)])
def test_projections_stay_factored(meeting: str, blocks: int) -> None:
    """Whole or by rows: no gradient of the shape of the packed weight is written out."""
    model, loss = wide_attention(meeting)
    gradients = check(loss, model, torch.randn(5, 2, 40))
    assert gradients.held_gradients["in_proj_weight"].form == "Gram"
    assert gradients.held_gradients["out_proj.weight"].form == "Gram"
    uses = gradients.factors["in_proj_weight"].values()
    assert len(uses) == blocks
    inputs, gradients_of_outputs = zip(*(use.parts for use in uses), strict=True)
    assert all(a.shape[1:] == (2, 40) for a in inputs)
    assert sum(b.shape[-1] for b in gradients_of_outputs) == 3 * 40


def test_rows_cost_no_more_than_the_whole() -> None:
    """Blocks do not meet, so that three of them cost what one of their sum would, or less."""
    costs = {}
    for meeting in MEETINGS:
        model, loss = wide_attention(meeting)
        gradients = per_sample(loss, private(model), torch.randn(5, 2, 40), form=traced)
        uses = tuple(gradients.factors["in_proj_weight"].values())
        costs[meeting] = cost_of(uses, (120, 40))[0]
    assert costs["three"] <= 1.2 * costs["self"]
    assert costs["encoder and decoder"] <= 1.2 * costs["self"]


@pytest.mark.parametrize("meeting", MEETINGS)
def test_differences_at_two_iterates_are_exact(meeting: str) -> None:
    """Between two points a use pairs with itself, rows included, and stays factored."""
    torch.manual_seed(2)
    model, loss = wide_attention(meeting)
    params, x = private(model), torch.randn(5, 2, 40)
    old, before = per_sample(loss, params, x, form=traced), expected(loss, params, x)
    with torch.no_grad():
        for p in params.values():
            p += 0.01 * torch.randn_like(p)
    new, after = per_sample(loss, params, x, form=traced), expected(loss, params, x)
    for combined, sign in ((difference(new, old), -1.0), (new + old, 1.0)):
        joined = {name: g + sign * before.gradients[name] for name, g in after.gradients.items()}
        agree(combined, Expected(after.losses + sign * before.losses, joined), params, 1e-3)
        assert combined.held_gradients["in_proj_weight"].form == "Gram"


# --- torch's transformers -----------------------------------------------------------------------


class Translator(nn.Module):
    """`nn.Transformer` between two projections, with every mask it knows."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, HEADS, 1, 1, 8, **options)
        self.ahead = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        source, target = self.ahead(x), self.ahead(x[:, 1:].cos())
        causal = nn.Transformer.generate_square_subsequent_mask(3)
        absent = torch.where(x[..., 0] > 0.5, -2.0, 0.0)
        if not inner.batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        y = inner(
            source,
            target,
            tgt_mask=causal,
            src_key_padding_mask=absent,
            memory_key_padding_mask=absent,
            tgt_key_padding_mask=absent[:, 1:],
        )
        return y if inner.batch_first else y.transpose(0, 1)


SETTINGS = [*itertools.product((True, False), (True, False))]


def transformer(**options: Any) -> Translator:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True", UserWarning)
        return Translator(**options)


@pytest.mark.parametrize(("batch_first", "norm_first"), SETTINGS)
def test_whole_transformers_are_exact(batch_first: bool, norm_first: bool) -> None:
    torch.manual_seed(3)
    model = transformer(batch_first=batch_first, norm_first=norm_first, dropout=0.0)
    check(lambda x: weigh(model(x)), model, torch.randn(5, 4, 3))


def test_transformers_with_dropout_are_certified() -> None:
    torch.manual_seed(3)
    model = transformer().train()
    x = torch.randn(5, 4, 3)
    certificate = certificate_for(lambda x: weigh(model(x)), private(model), x, modules=(model,))
    assert certificate.form is traced
    with WithoutRandomness():  # else the run of one record would drop other numbers
        check(lambda x: weigh(model(x)), model, x)


@pytest.mark.parametrize(("batch_first", "norm_first"), SETTINGS)
@pytest.mark.parametrize("training", [True, False])
def test_encoders_are_exact(batch_first: bool, norm_first: bool, training: bool) -> None:
    """In eval mode torch has a fast path, and nested tensors: neither may hide a parameter."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 8, dropout=0.0, batch_first=batch_first, norm_first=norm_first
    )
    nested = batch_first and not norm_first
    model = nn.TransformerEncoder(layer, 1, nn.LayerNorm(WIDTH), enable_nested_tensor=nested)
    model.train(training)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = batch
        h = x if batch_first else x.transpose(0, 1)
        y = model(h, src_key_padding_mask=torch.arange(4) >= lengths[:, None])
        return weigh(y if batch_first else y.transpose(0, 1))

    check(loss, model, (torch.randn(5, 4, WIDTH), torch.tensor([4, 2, 3, 4, 1])))


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoders_are_exact(norm_first: bool) -> None:
    torch.manual_seed(3)
    layer = nn.TransformerDecoderLayer(
        WIDTH, HEADS, 8, 0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    model = nn.TransformerDecoder(layer, 2)
    causal = nn.Transformer.generate_square_subsequent_mask(4)

    def loss(x: Tensor) -> Tensor:
        return weigh(model(x, x.cos(), tgt_mask=causal, tgt_is_causal=True))

    check(loss, model, torch.randn(5, 4, WIDTH))
