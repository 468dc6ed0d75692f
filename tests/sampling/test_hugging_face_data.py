"""Data sets of Hugging Face's library, as it is, in each of its formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hushgrad as hg
from hushgrad import Refused
from hushgrad.sampling import Loader

datasets = pytest.importorskip("datasets")

N = 40
X = torch.arange(4.0 * N).reshape(N, 4) / N
Y = torch.arange(N) % 3


def made(kind: str | None):
    columns = {"x": X.tolist(), "label": Y.tolist()}
    return datasets.Dataset.from_dict(columns).with_format(kind)


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
@pytest.mark.parametrize("workers", [0, 2])
def test_records_come_as_they_are(kind: str | None, workers: int) -> None:
    loader = Loader(made(kind), workers=workers)
    draws = [np.array([3, 5, 11]), np.array([], dtype=np.int64), np.array([39])]
    for positions, batch in zip(draws, loader.load_each(draws), strict=True):
        assert batch["label"].tolist() == Y[positions].tolist()
        torch.testing.assert_close(batch["x"].float(), X[positions])


def test_a_private_run_on_one() -> None:
    net = nn.Linear(4, 3)
    plan = hg.plan(records=N, batch=10, epochs=2, delta=1e-3, noise_multiplier=1.0)
    run = hg.train(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        made("torch"),
        plan=plan,
        rng=hg.Rng.from_os(),
    )
    for batch in run:
        run.step(lambda b: F.cross_entropy(net(b["x"]), b["label"], reduction="none"), batch)
    assert run.steps_taken == 8


def test_a_stream_is_refused_with_the_remedy() -> None:
    with pytest.raises(Refused, match="stream"):
        Loader(made(None).to_iterable_dataset())


def test_text_is_refused_with_the_remedy() -> None:
    with pytest.raises(Refused, match="got str; turn it into tensors"):
        Loader(datasets.Dataset.from_dict({"text": ["a", "b"]}))
