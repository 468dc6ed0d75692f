"""Several views of a record count as one record."""

from __future__ import annotations

from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hushgrad as hg
from hushgrad.gradients import loop, traced
from hushgrad.run.augmentation import Views, rows_per_record
from hushgrad.run.step import clipped_sum


def turned(batch):
    """Turn each image over with probability ½."""
    x, y = batch
    over = torch.rand(len(x), device=x.device) < 0.5
    return torch.where(over[:, None, None, None], x.flip(-1), x), y


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 1, 8, 8), torch.randint(3, (size,))


def loss_of(net: nn.Module):
    return lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none")


def both_ways(batch):
    """Not random: the views of a record are itself and its mirror image, in turn."""
    x, y = batch
    over = torch.arange(len(x)) % 2 == 1
    return torch.where(over[:, None, None, None], x.flip(-1), x), y


@pytest.mark.parametrize("form", [traced, loop])
@pytest.mark.parametrize("micro_batch", [None, 6])
def test_a_records_gradient_is_the_mean_of_its_views(form, micro_batch: int | None) -> None:
    net, batch = model(), batch_of(20)
    params = dict(net.named_parameters())
    execution = hg.Execution(form=form, micro_batch=micro_batch)
    found = clipped_sum(
        Views(loss_of(net), both_ways, 2), params, batch, modules=(net,), execution=execution
    )
    mean: dict[str, Tensor] = {name: torch.zeros(p.shape) for name, p in params.items()}
    for i in range(20):
        x, y = batch[0][i : i + 1], batch[1][i : i + 1]
        loss = sum(loss_of(net)(view).sum() for view in ((x, y), (x.flip(-1), y))) / 2
        gradients = torch.autograd.grad(loss, list(params.values()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for name, gradient in zip(params, gradients, strict=True):
            mean[name] += gradient / (norm + 0.01)
    for name in params:
        torch.testing.assert_close(found.sum[name].float(), mean[name], rtol=2e-3, atol=1e-4)


def test_a_record_is_clipped_once_for_all_its_views() -> None:
    net, batch = model(), batch_of(16)
    params = dict(net.named_parameters())
    loss = Views(loss_of(net), turned, 8)
    whole = clipped_sum(loss, params, batch, modules=(net,))
    assert whole.l2 == clipped_sum(loss_of(net), params, batch, modules=(net,)).l2
    torch.manual_seed(1)
    gradients = hg.per_sample(loss, params, batch, modules=(net,))
    sizes = torch.stack(list(gradients.sq_norms().values())).sum(0).sqrt()
    assert sizes.shape == (16,)


def test_views_need_no_more_memory_than_one() -> None:
    """A batch is cut into pieces of a Kth: as many rows at once as before."""
    rows: deque[int] = deque()  # a list would be part of what the loss is known by

    def counted(batch):
        rows.append(len(batch[0]))
        return batch

    net, batch = model(), batch_of(64)
    loss = Views(loss_of(net), counted, 4)
    params = dict(net.named_parameters())
    execution = hg.Execution(micro_batch=32)
    for _ in range(4):  # parts 1, 2, 4, 8 and 16 are tests as well
        rows.clear()
        clipped_sum(loss, params, batch, modules=(net,), execution=execution)
    assert list(rows) == [32] * 8
    assert rows_per_record(loss) == 4
    assert rows_per_record(loss_of(net)) == 1


def test_a_loss_made_anew_at_each_step_is_certified_once(caplog) -> None:
    net, batch = model(), batch_of(16)
    params = dict(net.named_parameters())
    with caplog.at_level("INFO", logger="hushgrad"):
        for _ in range(3):
            clipped_sum(Views(loss_of(net), turned, 2), params, batch, modules=(net,))
        assert sum("certified the form" in line for line in caplog.messages) == 1
        clipped_sum(Views(loss_of(net), turned, 3), params, batch, modules=(net,))
        assert sum("certified the form" in line for line in caplog.messages) == 2


def test_a_count_below_one_is_named() -> None:
    with pytest.raises(ValueError, match="count >= 1, got 0"):
        Views(lambda b: b, lambda b: b, 0)


def test_views_that_mix_records_are_refused() -> None:
    net, batch = model(), batch_of(16)

    def mixed(batch):
        x, y = batch
        return x - x.mean(0), y

    with pytest.raises(hg.Refused, match="depends on other records"):
        clipped_sum(
            Views(loss_of(net), mixed, 2), dict(net.named_parameters()), batch, modules=(net,)
        )
