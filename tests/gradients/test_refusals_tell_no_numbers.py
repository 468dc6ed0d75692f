"""What a refusal says: neither how many records a batch has, nor anything else of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hushgrad
from hushgrad import Metrics, Refused, Rng, plan, train

SOURCE = Path(hushgrad.__file__).parent

# Modules whose refusals come up where there is a batch; and what would tell its size.
IN_A_STEP = (
    "gradients",
    *(
        f"run/{name}.py"
        for name in ("training", "drawn", "penalties", "step", "query", "permit", "metrics")
    ),
)
TELLS = re.compile(
    r"\bsize\b|\bsizes\b|padded|\.shape\b|largest|len\(|count\(|\bbatch\b|\.batch\b|records\)|"
    r"tolist|item\("
)
ALLOWED = {
    "tuple(p.shape)",  # a parameter's, or that of the optimizer's tensor
    "type(batch).__name__",
    "_described(batch, sizes)",
    "_description_of(losses, batch)",
    "len(missed) - 3",  # of parameters
    "'s' * (losses.dim() != 1)",
    "'as' if len(losses) == batch else 'not as'",  # yes or no
}


def told(path: Path) -> list[str]:
    """What the refusals of a module put into their text, as far as it looks private."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Return) and refuses(node)):
            found += [ast.unparse(x.value) for x in ast.walk(node) if isinstance(x, SHOWN)]
    return [shown for shown in found if TELLS.search(shown) and shown not in ALLOWED]


SHOWN = ast.FormattedValue


def refuses(node: ast.Return) -> bool:
    names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    return not names.isdisjoint({"Refused", "NotCovered"})


@pytest.mark.parametrize("place", IN_A_STEP)
def test_no_refusal_in_a_step_puts_a_size_or_a_value_into_its_text(place: str) -> None:
    paths = [*(SOURCE / place).rglob("*.py")] if (SOURCE / place).is_dir() else [SOURCE / place]
    assert paths
    assert {str(path): told(path) for path in paths if told(path)} == {}


def test_the_search_finds_what_it_is_for(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text('def f(x):\n    raise Refused(f"got {len(x)} and {x.shape}")\n')
    assert told(planted) == ["len(x)", "x.shape"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def entropy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y, reduction="none")


def kernel(x: Tensor, w: Tensor) -> Tensor:
    """Where the product is made of numbers that no graph has seen."""
    return torch.from_numpy(x.detach().numpy() @ w.detach().numpy().T).requires_grad_()


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+", re.sub(r"float32|argmax\(1\)|\b\d dimension", "", text))


BAD: dict[str, Callable[[nn.Module], Callable[[Any], Any]]] = {
    "mean": lambda net: lambda b: entropy(net, *b).mean(),
    "two dimensions": lambda net: lambda b: net(b[0]),
    "rows and columns": lambda net: lambda b: net(b[0]).flatten(),
    "selected": lambda net: lambda b: entropy(net, *b)[b[1] > 0],
    "centred": lambda net: lambda b: entropy(net, b[0] - b[0].mean(0), b[1]),
    "a fixed size": lambda net: lambda b: entropy(net, b[0].reshape(16, -1), b[1]),
    "labels of another batch": lambda net: lambda b: entropy(net, b[0], torch.zeros(9).long()),
    "transposed": lambda net: lambda b: net(b[0]).t() @ torch.ones(7),
    "not intercepted": lambda net: lambda b: kernel(b[0], net.first.weight).sum(1),
    "mixed by a product": lambda net: lambda b: (b[0] @ b[0].t() @ net(b[0])).sum(1),
}


def refusal(loss: Callable[[Any], Any], batch: Any = None, **options: Any) -> tuple[str, int]:
    """What a step says, or what torch says in the user's own code, and the size of the batch."""
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(5))
    net = options.pop("net")
    planned = plan(
        records=400, batch=40, epochs=1, delta=1e-4, noise_multiplier=1.0, **options.pop("plan", {})
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = train(net, optimizer, (x, (x[:, 0] > 0).long()), plan=planned, rng=Rng.fixed(2))
    drawn = next(iter(run))
    with pytest.raises(Exception) as raised:  # noqa: PT011
        run.step(loss, drawn if batch is None else batch(*drawn), **options)
    return (str(raised.value) if raised.errisinstance(Refused) else ""), len(drawn[0])


@pytest.mark.parametrize("kind", BAD)
def test_a_refused_loss_tells_no_number(kind: str) -> None:
    torch.manual_seed(1)
    net = Net()
    text, size = refusal(BAD[kind](net), net=net)
    assert size > 20
    assert numbers(text) == [], text


@pytest.mark.parametrize(
    "batch",
    [
        lambda x, y: (x[1:], y),
        lambda x, y: (x[1:], y[1:]),
        lambda x, y: (x, y.sum()),
        lambda x, y: (x, y + 1),
    ],
)
def test_a_refused_batch_tells_no_number(batch: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    net = Net()
    text, _ = refusal(lambda b: entropy(net, *b), batch, net=net)
    assert text and numbers(text) == [], text


@pytest.mark.parametrize(
    "watched", [lambda b: b[0], lambda b: b[1][1:], lambda b: (b[0] - b[0].mean(0)).sum(1)]
)
def test_a_refused_metric_tells_no_number(watched: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    net = Net()
    text, _ = refusal(
        lambda b: entropy(net, *b),
        net=net,
        plan={"metrics": Metrics(watched=("seen",))},
        watch={"seen": watched},
    )
    assert text and numbers(text) == [], text
