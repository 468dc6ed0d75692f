"""Until there is a parallel mode: nothing that several processes work on is certified or released.

Most tests make a process group of one rank, in which wrappers work and must be refused by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hushgrad as hg
from hushgrad import Refused
from hushgrad.gradients import auto, certificate_for, loop, per_sample
from hushgrad.run.evaluation import evaluate
from hushgrad.types import Loss
from zoo.small import mlp

RANKS = Path(__file__).with_name("one_of_two_ranks.py")
X, Y = torch.randn(24, 3), torch.arange(24) % 2
BATCH = (X[:8], Y[:8])
PLAN = hg.plan(records=24, batch=8, epochs=1, delta=1e-3, noise_multiplier=1.0)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss_of(model: Callable[[Tensor], Tensor]) -> Loss:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def net() -> nn.Sequential:
    return mlp(3, 4, 2)


def trained(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hg.train(model, optimizer, (X, Y), plan=PLAN, rng=hg.Rng.from_os())


def test_two_ranks_are_refused_at_every_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(RANKS), str(tmp_path / "store")]
    source = str(Path(hg.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, rank], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in "01"
    ]
    for rank in ranks:
        printed, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0
        answers = json.loads(printed)
        assert len(answers) == 14
        for entry, answer in answers.items():
            assert answer.startswith("expected one process, got 2 that work together"), entry


@pytest.mark.usefixtures("group")
def test_a_group_of_one_rank_is_allowed() -> None:
    model = net()
    run = trained(model)
    for batch in run:
        run.step(loss_of(model), batch)
    assert run.steps_taken == 3


@pytest.mark.usefixtures("group")
def test_a_group_that_grows_while_a_run_goes_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    run = trained(model)
    batches = iter(run)
    run.step(loss_of(model), next(batches))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    batch = next(batches)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(Refused, match="expected one process, got 2"):
        run.step(loss_of(model), batch)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_processes_that_torchrun_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    trained(net())
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(Refused, match=r"got 4 that work together .*torchrun"):
        trained(net())


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu"), sync_module_states=False
    )


def fsdp1_flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    return fully_shard(model, mesh=mesh)


def replicated(model: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


WRAPPERS = {
    "DistributedDataParallel": ddp,
    "DataParallel": nn.DataParallel,
    "FullyShardedDataParallel": fsdp1,
    "Fully": fsdp1_flat,
    "fully_shard": fsdp2,
    "replicate": replicated,
}


class Holder(nn.Module):
    """A model with a part inside; the part may be wrapped."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(2, 2), part

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("deep", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.filterwarnings("ignore")
def test_a_wrapped_model_is_refused_by_name(name: str, deep: bool) -> None:
    wrapped = WRAPPERS[name](net())
    model = Holder(wrapped) if deep else wrapped
    where = "layer 'body'" if deep else "the model"
    with pytest.raises(Refused, match=f"{where} is a .*{name}"):
        trained(model)
    with pytest.raises(Refused, match=name):
        evaluate(
            {"right": lambda b: model(b[0]).argmax(1) == b[1]},
            (X, Y),
            records=24,
            delta=1e-3,
            epsilon=1.0,
            rng=hg.Rng.from_os(),
            modules=(model,),
        )


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["DistributedDataParallel", "DataParallel"])
@pytest.mark.parametrize("form", [auto, loop], ids=["auto", "loop"])
def test_a_wrapper_that_only_the_loss_knows_is_refused(name: str, form: Any) -> None:
    """The module tree that `train` sees is plain; the wrapper hides in an object of the loss."""
    model = net()
    hidden = {"model": [WRAPPERS[name](model)]}
    params = dict(model.named_parameters())

    def loss(batch: Any) -> Tensor:
        return loss_of(hidden["model"][0])(batch)

    with pytest.raises(Refused, match=name):
        per_sample(loss, params, BATCH, form=form, modules=(model,))
    with pytest.raises(Refused, match=name):
        certificate_for(loss, params, BATCH, form=form, modules=(model,))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("form", [auto, loop], ids=["auto", "loop"])
def test_the_inside_of_a_ddp_model_is_refused(form: Any) -> None:
    """Its hooks sit on the parameters, and no module shows them."""
    model = net()
    wrapped = ddp(model)
    params = dict(model.named_parameters())
    with pytest.raises(
        Refused, match=r"parameter '0\.weight' belongs to a DistributedDataParallel"
    ):
        per_sample(loss_of(model), params, BATCH, form=form, modules=(model,))
    assert wrapped.module is model  # alive until here
    del wrapped
    per_sample(loss_of(model), params, BATCH, form=form, modules=(model,))


@pytest.mark.usefixtures("group")
def test_a_model_that_was_wrapped_during_the_run_is_refused() -> None:
    model = net()
    run = trained(model)
    batches = iter(run)
    run.step(loss_of(model), next(batches))
    wrapped = ddp(model)
    with pytest.raises(Refused, match="DistributedDataParallel"):
        run.step(loss_of(wrapped.module), next(batches))


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
def test_parameters_spread_over_processes_are_refused_by_name() -> None:
    model = fsdp2(net())
    params = dict(model.named_parameters())
    with pytest.raises(Refused, match=r"0\.weight is a DTensor, whose values lie in several"):
        per_sample(loss_of(model), params, BATCH)


def _hook(p: nn.Parameter) -> list[Any]:
    (accumulator, _) = p.expand_as(p).grad_fn.next_functions[0]
    return [accumulator, accumulator.register_hook(lambda *_: None)]


def _prehook(p: nn.Parameter) -> list[Any]:
    (accumulator, _) = p.expand_as(p).grad_fn.next_functions[0]
    return [accumulator, accumulator.register_prehook(lambda *_: None)]


@pytest.mark.parametrize("hook", [_hook, _prehook])
@pytest.mark.parametrize("form", [auto, loop], ids=["auto", "loop"])
def test_a_hook_on_a_gradient_accumulator_is_refused(hook: Any, form: Any) -> None:
    model = net()
    params = dict(model.named_parameters())
    kept = hook(model[2].bias)
    with pytest.raises(Refused, match=r"on the gradient accumulator of the parameter '2\.bias'"):
        per_sample(loss_of(model), params, BATCH, form=form)
    kept.pop().remove()
    per_sample(loss_of(model), params, BATCH, form=form)


def test_a_graph_that_is_kept_is_no_reason_to_refuse() -> None:
    model = net()
    kept = model(X).sum()  # holds the accumulators, as a DDP model does
    per_sample(loss_of(model), dict(model.named_parameters()), BATCH, modules=(model,))
    assert kept.requires_grad
