"""What of a batch is no tensor is refused, unless it was declared the same for every batch."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from compare import agree, expected, private
from torch import Tensor, nn
from transformers import BatchEncoding

import hushgrad as hg
from hushgrad import Refused
from hushgrad.gradients import auto, certificate_for, constant, dense, forget_structure, loop
from hushgrad.gradients import per_sample as gradients_of
from hushgrad.gradients.observed import observe

FORMS = pytest.mark.parametrize("form", [auto, dense, loop], ids=["auto", "dense", "loop"])


def scaled(layer: nn.Module, read: Callable[[Any], tuple[Tensor, Any]]) -> Callable[..., Tensor]:
    """A loss that is divided by what stands beside the tensor."""

    def loss(batch: Any) -> Tensor:
        x, n = read(batch)
        return layer(x).square().sum(1) / float(n)

    return loss


@dataclass(frozen=True)
class Counted:
    """A batch with a number, which a collate function may have computed."""

    x: Tensor
    number: float


@dataclass(frozen=True)
class Measured:
    """A batch with a number that it computes itself, also for probes."""

    x: Tensor
    number: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", len(self.x))


class Unit(enum.Enum):
    """A choice among names."""

    METRE = 1.0


UNDECLARED: dict[str, Callable[[Tensor, int], tuple[Any, str]]] = {
    "int": lambda x, n: ({"x": x, "num_items_in_batch": n}, r"an? int at batch\['num_items_in_b"),
    "float": lambda x, n: ({"x": x, "n": float(n)}, r"a float at batch\['n'\]"),
    "NumPy number": lambda x, n: ({"x": x, "n": np.float32(n)}, r"a float32 at batch\['n'\]"),
    "bool": lambda x, n: ((x, n > 3), r"a bool at batch\[1\]"),
    "string": lambda x, n: ([x, str(n)], r"a str at batch\[1\]"),
    "list of lengths": lambda x, n: ({"x": x, "lengths": [n] * n}, r"int at batch\['lengths'\]\[0"),
    "shape": lambda x, n: ((x, x.shape), r"a int at batch\[1\]\[0\]"),
    "set": lambda x, n: ((x, {n}), r"a set at batch\[1\]"),
    "object": lambda x, n: ((x, object()), r"a object at batch\[1\]"),
    "function": lambda x, n: ((x, lambda: n), r"a function at batch\[1\]"),
    "dataclass": lambda x, n: (Counted(x, n), r"a int at batch\.number"),
    "BatchEncoding": lambda x, n: (BatchEncoding({"x": x, "n": n}), r"a int at batch\['n'\]"),
}


@pytest.mark.parametrize("make", UNDECLARED.values(), ids=UNDECLARED)
def test_a_value_that_is_no_tensor_is_refused(make: Callable[..., tuple[Any, str]]) -> None:
    layer, (batch, message) = nn.Linear(3, 2), make(torch.randn(6, 3), 6)
    loss = scaled(layer, lambda b: (torch.ones(8, 3), 1.0))
    for function in (gradients_of, certificate_for):
        with pytest.raises(Refused, match=message + r".*declare it so: hushgrad\.constant"):
            function(loss, private(layer), batch)
    with pytest.raises(Refused, match=message):
        observe(lambda b: torch.ones(6), batch, test=False)


def test_a_refusal_does_not_tell_the_value() -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(Refused) as caught:
        gradients_of(scaled(layer, lambda b: b), private(layer), (torch.randn(6, 3), 4711))
    assert "4711" not in str(caught.value)


DECLARED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], tuple[Tensor, Any]]]] = {
    "dict": (lambda x: {"x": x, "n": constant(4)}, lambda b: (b["x"], b["n"])),
    "tuple": (lambda x: (x, constant((4.0, "a"))), lambda b: (b[0], b[1][0])),
    "enum": (lambda x: [x, constant(Unit.METRE)], lambda b: (b[0], b[1].value)),
    "bool": (lambda x: [x, constant(True)], lambda b: (b[0], 1 + b[1])),
    "dataclass": (lambda x: Counted(x, constant(4.0)), lambda b: (b.x, b.number)),
    "none": (lambda x: (x, None), lambda b: (b[0], 4.0)),
    "BatchEncoding": (
        lambda x: BatchEncoding({"x": x, "n": constant(4), "more": None}),
        lambda b: (b.x, b["n"]),
    ),
}


@FORMS
@pytest.mark.parametrize(("wrap", "read"), DECLARED.values(), ids=DECLARED)
def test_the_loss_gets_a_declared_value(wrap: Any, read: Any, form: Any) -> None:
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    loss = scaled(layer, read)
    plain = {"bool": 2.0, "enum": 1.0}
    n = next((plain[k] for k in plain if DECLARED[k][0] is wrap), 4.0)
    want = expected(lambda b: layer(b).square().sum(1) / n, private(layer), x)
    for _ in range(2):
        agree(gradients_of(loss, private(layer), wrap(x), form=form), want, private(layer))


CHANGES: dict[str, Callable[[Tensor, int], Any]] = {
    "a declared number": lambda x, n: (x, constant(n)),
    "one of another type": lambda x, n: (x, constant(1 if n == 1 else 1.0)),
    "None or not": lambda x, n: (x, None if n == 1 else x),
    "a key": lambda x, n: {"x": x, f"key {n}": x},
    "the order of keys": lambda x, n: {"x": x, "y": x} if n == 1 else {"y": x, "x": x},
    "the kind of a container": lambda x, n: (x, x) if n == 1 else [x, x],
    "the number of parts": lambda x, n: (x, [x] * n),
}


@pytest.mark.parametrize("make", CHANGES.values(), ids=CHANGES)
def test_what_is_no_tensor_may_not_change(make: Callable[[Tensor, int], Any]) -> None:
    layer = nn.Linear(3, 2)

    def loss(batch: Any) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        return layer(x).square().sum(1)

    gradients_of(loss, private(layer), make(torch.randn(6, 3), 1))
    gradients_of(loss, private(layer), make(torch.randn(7, 3), 1))
    with pytest.raises(Refused, match="expected a batch of the same structure and with the same"):
        gradients_of(loss, private(layer), make(torch.randn(6, 3), 2))
    forget_structure(private(layer))  # another run may have others
    gradients_of(loss, private(layer), make(torch.randn(6, 3), 2))


def test_two_losses_may_have_batches_of_their_own() -> None:
    layer = nn.Linear(3, 2)
    gradients_of(lambda b: layer(b["x"]).sum(1), private(layer), {"x": torch.randn(6, 3)})
    gradients_of(lambda b: layer(b).square().sum(1), private(layer), torch.randn(6, 3))


def test_a_number_that_a_batch_computes_from_its_records_is_probed() -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(Refused, match="depends on other records"):
        gradients_of(
            scaled(layer, lambda b: (b.x, b.number)), private(layer), Measured(torch.randn(6, 3))
        )


@pytest.mark.parametrize("value", [torch.ones(3), [1, 2], {"a": 1}, None, object(), float("nan")])
def test_what_cannot_be_declared(value: Any) -> None:
    with pytest.raises(Refused, match=r"as a constant, got a \w+; let the loss close over"):
        hg.constant(value)


def test_a_constant_survives_pickling_and_equals_its_like() -> None:
    one, other = constant(1), pickle.loads(pickle.dumps(constant(1)))
    assert one == other and hash(one) == hash(other)
    assert one != constant(True) and repr(one) == "constant(1)"


class Tokens(torch.utils.data.Dataset[Any]):
    """Records of their own length, which a collate function pads."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((3,), float(i))


@pytest.mark.parametrize("declared", ["undeclared", "false", "true"])
def test_a_run_takes_declared_constants(declared: str) -> None:
    """`num_items_in_batch`, as a trainer computes it, would move every record's gradient."""
    layer = nn.Linear(3, 2)

    def collate(rows: list[Tensor]) -> dict[str, Any]:
        values = {"undeclared": len(rows), "false": constant(len(rows)), "true": constant(8)}
        return {"x": torch.stack(rows), "num_items_in_batch": values[declared]}

    plan = hg.plan(records=40, batch=8, epochs=2, noise_multiplier=1.0, delta=1e-5)
    run = hg.train(
        layer,
        torch.optim.SGD(layer.parameters(), lr=0.1),
        hg.sampling.Loader(Tokens(), collate=collate),
        plan=plan,
        rng=hg.Rng.fixed(0),
    )

    def go() -> None:
        for batch in run:
            run.step(lambda b: layer(b["x"]).square().sum(1) / b["num_items_in_batch"], batch)

    if declared == "true":
        go()
        assert run.steps_taken == 10
        return
    message = {"undeclared": "int at batch", "false": "expected a batch of the same structure"}
    with pytest.raises(Refused, match=message[declared]):
        go()
