"""Recurrent layers and cells on the fast path, each against one-record runs of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import agree, check, expected, private
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from uses import Uses, loss_of, weigh

from hushgrad.gradients import auto, per_sample, traced
from hushgrad.gradients.factors import gram
from hushgrad.numerics import inner_products
from hushgrad.types import Refused

BATCH, TIME, INPUTS, HIDDEN = 5, 6, 4, 3

Make = Callable[..., nn.Module]
KINDS: dict[str, Make] = {
    "LSTM": lambda **options: nn.LSTM(INPUTS, HIDDEN, **options),
    "projected LSTM": lambda **options: nn.LSTM(INPUTS, HIDDEN, proj_size=2, **options),
    "GRU": lambda **options: nn.GRU(INPUTS, HIDDEN, **options),
    "RNN": lambda **options: nn.RNN(INPUTS, HIDDEN, **options),
    "relu RNN": lambda **options: nn.RNN(INPUTS, HIDDEN, nonlinearity="relu", **options),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "batch first": {"batch_first": True},
    "sequence first": {},
    "no biases": {"bias": False, "batch_first": True},
    "both directions": {"bidirectional": True},
    "two layers": {"num_layers": 2},
    "two layers, both directions, no biases": {
        "num_layers": 2, "bidirectional": True, "bias": False, "batch_first": True,
    },
}  # fmt: skip


def records(dtype: torch.dtype = torch.float64, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, TIME, INPUTS, dtype=dtype)


def parts(layer: Any, x: Tensor, hx: Any = None) -> Tensor:
    """All that a layer returns for [batch, time, inputs], one row for each record."""
    y, last = layer(x if layer.batch_first else x.transpose(0, 1), hx)
    states = last if isinstance(last, tuple) else (last,)
    rows = [y if layer.batch_first else y.transpose(0, 1), *(s.transpose(0, 1) for s in states)]
    return torch.cat([row.flatten(1) for row in rows], 1)


class Around(nn.Module):
    """A layer behind a private scale, whose gradient is wrong if the layer passes back a wrong one.

    All outputs and last states count.
    """

    def __init__(self, layer: nn.Module, call: Callable[..., Tensor] = parts) -> None:
        super().__init__()
        self.ahead, self.layer, self.call = Uses(lambda h: h, []), layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, self.ahead(x))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_exact(kind: str, options: str) -> None:
    model = Around(KINDS[kind](**OPTIONS[options])).double()
    check(loss_of(model), model, records())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "relu RNN"])
def test_layers_are_exact_in_float32(kind: str) -> None:
    """Here torch has kernels of another kind than in float64."""
    model = Around(KINDS[kind](batch_first=True, bidirectional=True))
    check(loss_of(model), model, records(torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_steps_as_records_are_told_apart(kind: str) -> None:
    model = Around(KINDS[kind]()).double()
    check(loss_of(model), model, records(batch=TIME))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_the_last_output_alone_is_exact(kind: str) -> None:
    model = Around(KINDS[kind](batch_first=True), lambda layer, x: layer(x)[0][:, -1]).double()
    check(loss_of(model), model, records())


def test_the_last_cell_alone_is_exact() -> None:
    model = Around(KINDS["LSTM"](), lambda layer, x: layer(x.transpose(0, 1))[1][1][0]).double()
    check(loss_of(model), model, records())


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_is_drawn(kind: str) -> None:
    """Certification compares it with random draws replaced; in eval mode it does nothing."""
    model = Around(KINDS[kind](num_layers=2, dropout=0.4)).double()
    x = records()
    first, again = (
        per_sample(loss_of(model), private(model), x, form=traced, modules=(model,))
        for _ in range(2)
    )
    assert not torch.equal(first.losses, again.losses)
    check(loss_of(model.eval()), model, x)


@pytest.mark.parametrize("kind", KINDS)
def test_states_from_the_records_are_exact(kind: str) -> None:
    def call(layer: Any, x: Tensor) -> Tensor:
        size = layer.proj_size or HIDDEN
        h = x[:, :2, :size].transpose(0, 1).contiguous()
        c = x[:, 2:4, :HIDDEN].transpose(0, 1).contiguous()
        return parts(layer, x[:, 4:], (h, c) if isinstance(layer, nn.LSTM) else h)

    model = Around(KINDS[kind](bidirectional=True), call).double()
    check(loss_of(model), model, records())


class Started(nn.Module):
    """A layer whose first state is learnt, and the same for all records."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.h = nn.Parameter(torch.randn(2, 1, layer.proj_size or HIDDEN))
        self.c = nn.Parameter(torch.randn(2, 1, HIDDEN)) if isinstance(layer, nn.LSTM) else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.h.expand(-1, len(x), -1)
        return parts(self.layer, x, h if self.c is None else (h, self.c.expand(-1, len(x), -1)))


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_are_parameters_are_exact(kind: str) -> None:
    model = Started(KINDS[kind](num_layers=2)).double()
    check(loss_of(model), model, records())


# What is frozen has nothing to do with an RNN's activation.
FROZEN_KINDS = [pytest.param(k, marks=pytest.mark.slow) if k == "relu RNN" else k for k in KINDS]
FROZEN = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


@pytest.mark.parametrize("others", [False, True], ids=["it", "all others"])
@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("kind", FROZEN_KINDS)
def test_partly_frozen_layers_are_exact(kind: str, name: str, others: bool) -> None:
    if name == "weight_hr" and kind != "projected LSTM":
        pytest.skip("has no projection")
    model = Around(KINDS[kind](num_layers=2, batch_first=True)).double()
    for full, p in model.layer.named_parameters():
        p.requires_grad_((name in full) is others)
    check(loss_of(model), model, records())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_used_twice_is_exact(kind: str) -> None:
    def call(layer: Any, x: Tensor) -> Tensor:
        return torch.cat([parts(layer, x), parts(layer, x[:, 2:].flip(1))], 1)

    model = Around(KINDS[kind](batch_first=True), call).double()
    check(loss_of(model), model, records())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_are_exact(kind: str, reentrant: bool) -> None:
    def again(layer: Any, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: parts(layer, x), x, use_reentrant=reentrant)
        return y

    model, x = Around(KINDS[kind](num_layers=2, bidirectional=True)).double(), records()
    params = private(model)
    want = expected(loss_of(model), params, x)
    model.call = again
    agree(per_sample(loss_of(model), params, x, form=traced), want, params)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "relu RNN"])
def test_autocast_is_exact_to_its_precision(kind: str) -> None:
    """Outputs and states have the types that torch gives them."""
    seen = []

    def call(layer: Any, x: Tensor) -> Tensor:
        y, last = layer(x)
        states = last if isinstance(last, tuple) else (last,)
        seen.append((y.dtype, *(s.dtype for s in states)))
        return torch.cat([y.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)

    model = Around(KINDS[kind](batch_first=True, num_layers=2), call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(loss_of(model), model, records(torch.float32))
    assert len(set(seen)) == 1


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_bfloat16_is_exact_to_its_precision(kind: str) -> None:
    model = Around(KINDS[kind](batch_first=True)).bfloat16()
    check(loss_of(model), model, records(torch.bfloat16))


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0"])
def test_a_weight_that_is_parametrised(name: str) -> None:
    layer = weight_norm(KINDS["LSTM"](batch_first=True), name)
    model = Around(layer).double()
    check(loss_of(model), model, records())


class Prompted(nn.Module):
    """A layer that runs over a table of parameters, without any record."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.table = layer, nn.Parameter(torch.randn(1, TIME, INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        prompt, _ = self.layer(self.table)
        return x[..., :HIDDEN] * prompt.expand(len(x), -1, -1)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_layer_over_parameters_alone(kind: str) -> None:
    model = Prompted(KINDS[kind](batch_first=True)).double()
    check(loss_of(model), model, records())


def test_norms_without_writing_gradients_out() -> None:
    model = Around(nn.LSTM(32, 32, batch_first=True)).double()
    x = torch.randn(BATCH, TIME, 32, dtype=torch.float64)
    gradients = check(loss_of(model), model, x)
    for name in ("layer.weight_ih_l0", "layer.weight_hh_l0"):
        assert gradients.held_gradients[name].form == "Gram"


def test_the_gates_of_both_weights_are_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.LSTM(32, 32, batch_first=True, bias=False), torch.randn(BATCH, TIME, 32)
    gradients = per_sample(lambda x: weigh(model(x)[0]), private(model), x, form=traced)
    widths = []

    def seen(x: Tensor, y: Tensor, chunk: int) -> Tensor:
        widths.append(x.shape[-1])
        return inner_products(x, y, chunk)

    monkeypatch.setattr(gram, "inner_products", seen)
    assert gradients.squares.keys() == {"weight_ih_l0", "weight_hh_l0"}
    assert sorted(widths) == [32, 32, 4 * 32]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "relu RNN"])
def test_a_record_keeps_its_bits_beside_other_records(kind: str) -> None:
    model = Around(KINDS[kind](batch_first=True, bidirectional=True))
    x, params = records(torch.float32, batch=9), private(model)
    whole = per_sample(loss_of(model), params, x, form=traced).sq_norms()
    for others in (1 + torch.randn(8, TIME, INPUTS), 30 * x[1:], x[1:3]):
        beside = torch.cat([x[:1], others])
        other = per_sample(loss_of(model), params, beside, form=traced).sq_norms()
        assert all(torch.equal(whole[name][0], other[name][0]) for name in params)


# --- cells --------------------------------------------------------------------------------------

CELLS: dict[str, Make] = {
    "LSTM": lambda **options: nn.LSTMCell(INPUTS, HIDDEN, **options),
    "GRU": lambda **options: nn.GRUCell(INPUTS, HIDDEN, **options),
    "RNN": lambda **options: nn.RNNCell(INPUTS, HIDDEN, **options),
    "relu RNN": lambda **options: nn.RNNCell(INPUTS, HIDDEN, nonlinearity="relu", **options),
}


def steps(cell: Any, x: Tensor) -> Tensor:
    """Every state that a cell goes through."""
    state, seen = None, []
    for t in range(x.shape[1]):
        state = cell(x[:, t], state)
        seen += state if isinstance(state, tuple) else (state,)
    return torch.cat(seen, 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_are_exact(kind: str, bias: bool) -> None:
    model = Around(CELLS[kind](bias=bias), steps).double()
    check(loss_of(model), model, records())


@pytest.mark.parametrize("name", FROZEN[:4])
@pytest.mark.parametrize("kind", CELLS)
def test_partly_frozen_cells_are_exact(kind: str, name: str) -> None:
    model = Around(CELLS[kind](), steps).double()
    getattr(model.layer, name).requires_grad_(False)
    check(loss_of(model), model, records())


@pytest.mark.parametrize("kind", CELLS)
def test_cells_are_exact_under_autocast(kind: str) -> None:
    model = Around(CELLS[kind](), steps)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(loss_of(model), model, records(torch.float32))


# --- what the fast path leaves to others ---------------------------------------------------------


def packed(layer: nn.Module, x: Tensor, lengths: Tensor, *, sort: bool) -> Tensor:
    """The padded outputs of a layer on packed sequences, sorted by the caller if `sort`."""
    order = lengths.argsort(descending=True) if sort else torch.arange(len(lengths))
    rows = pack_padded_sequence(x[order], lengths[order], batch_first=True, enforce_sorted=sort)
    y, _ = pad_packed_sequence(layer(rows)[0], batch_first=True, total_length=TIME)
    return y[order.argsort()]


@pytest.mark.parametrize("sort", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_taken_one_record_at_a_time(kind: str, sort: bool) -> None:
    layer = KINDS[kind](batch_first=True).double()
    batch = records(), torch.tensor([3, 6, 1, 4, 2])

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return weigh(packed(layer, *batch, sort=sort))

    assert check(loss, layer, batch, form=auto).form == "loop"
    with pytest.raises(Refused, match="packed sequence"):
        per_sample(loss, private(layer), batch, form=traced)


def test_padded_sequences_in_place_of_packed_ones() -> None:
    """What the refusal of packed sequences advises has the same outputs, on the fast path."""
    layer = KINDS["LSTM"](batch_first=True).double()
    x, lengths = records(), torch.tensor([3, 6, 1, 4, 2])

    def outputs(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = batch
        own = torch.arange(TIME) < lengths.unsqueeze(1)
        return torch.where(own.unsqueeze(2), layer(x)[0], 0)

    torch.testing.assert_close(outputs((x, lengths)), packed(layer, x, lengths, sort=False))
    check(loss_of(outputs), layer, (x, lengths))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_sequence_without_a_batch(kind: str) -> None:
    """One call for each record has no records in it: other forms take it, and are right."""
    layer = KINDS[kind]().double()

    def loss(x: Tensor) -> Tensor:
        return weigh(torch.stack([layer(record)[0] for record in x.unbind()]))

    assert check(loss, layer, records(), form=auto).form != "traced"


@pytest.mark.parametrize("kind", KINDS)
def test_records_taken_for_steps_are_refused(kind: str) -> None:
    layer = KINDS[kind]().double()
    with pytest.raises(Refused, match="depends on other records"):
        per_sample(lambda x: weigh(layer(x)[0]), private(layer), records())
