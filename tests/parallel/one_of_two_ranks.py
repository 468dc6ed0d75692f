"""One of two gloo processes: asks each entry that certifies or releases, and prints the answers.

Run as `python one_of_two_ranks.py STORE RANK`, twice, with one file as the store.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hushgrad as hg
from hushgrad.glm import PrivateLogisticRegression
from hushgrad.gradients import certificate_for, loop, per_sample
from hushgrad.run.evaluation import evaluate

X, Y = torch.randn(40, 3), torch.arange(40) % 2


def entries(net: nn.Module, callee: nn.Module) -> dict[str, Callable[[], Any]]:
    """Everything that certifies or releases, on `net`, called by the loss as `callee`."""

    def loss(batch: Any) -> torch.Tensor:
        return F.cross_entropy(callee(batch[0]), batch[1], reduction="none")

    def train() -> Any:
        plan = hg.plan(records=40, batch=8, epochs=1, delta=1e-3, noise_multiplier=1.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return hg.train(net, optimizer, (X, Y), plan=plan, rng=hg.Rng.from_os())

    def average() -> Any:
        return evaluate(
            {"right": lambda b: callee(b[0]).argmax(1) == b[1]},
            (X, Y),
            records=40,
            delta=1e-3,
            epsilon=1.0,
            rng=hg.Rng.from_os(),
            modules=(callee,),
        )

    params, batch = dict(net.named_parameters()), (X[:8], Y[:8])
    return {
        "train": train,
        "per_sample": lambda: per_sample(loss, params, batch),
        "per_sample in a loop": lambda: per_sample(loss, params, batch, form=loop),
        "certificate_for": lambda: certificate_for(loss, params, batch),
        "evaluate": average,
    }


def fits() -> dict[str, Callable[[], Any]]:
    """A fit of a linear model by each algorithm."""

    def fit(algorithm: str) -> Any:
        settings: dict[str, Any] = {"algorithm": algorithm, "classes": [0, 1], "feature_norm": 1.0}
        model = PrivateLogisticRegression(epsilon=1.0, delta=1e-3, **settings)
        return model.fit(X.numpy(), Y.numpy())

    return {name: (lambda name=name: fit(name)) for name in ("sgd", "gd", "objective", "output")}


def answer(question: Callable[[], Any]) -> str:
    """The refusal, or "" where there was none."""
    try:
        question()
    except hg.Refused as refusal:
        return str(refusal)
    return ""


def main(store: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # 127.0.0.1
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    meeting, patience = dist.FileStore(store, 2), timedelta(seconds=60)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=2, timeout=patience)
    wrapped = nn.parallel.DistributedDataParallel(net)
    questions = {f"fit by {name}": question for name, question in fits().items()}
    for kind, callee in (("plain", net), ("wrapped", wrapped)):
        questions |= {f"{name}, {kind}": entry for name, entry in entries(net, callee).items()}
    answers = {name: answer(question) for name, question in questions.items()}
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
