"""Side by side with Opacus: the same clipping, the same noise, the same updates, the same ε."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hushgrad as hg
from hushgrad import Rng
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.clipping.groups import Grouping, per_parameter, whole
from hushgrad.clipping.rules import Clip, abadi
from hushgrad.sampling import FullBatch, Sampling
from zoo.small import from_seed

opacus = pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off:UserWarning", "ignore:Full backward hook:UserWarning"
)

RECORDS, BATCH = 64, 16
PAGE = Path(__file__).parents[1] / "docs" / "from-opacus.md"
NORMS = (0.5, 0.1, 0.3, 0.2)  # a clipping norm for each parameter
SEEDS = range(20)


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 6, generator=torch.Generator().manual_seed(5))
    return x, (x[:, 0] > 0).long()


def model() -> nn.Module:
    return from_seed(6, 12, 2)


def gradient(net: nn.Module) -> np.ndarray:
    return torch.cat([p.grad.flatten() for p in net.parameters()]).double().numpy()


def by_opacus(
    *,
    sigma: float,
    norm: float | Sequence[float],
    seed: int = 0,
    batch: int = RECORDS,
    poisson: bool = False,
    records: tuple[Tensor, Tensor] | None = None,
) -> np.ndarray:
    """The gradient that Opacus hands to the optimizer in its first step."""
    net = model()
    flat = isinstance(norm, float)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # its sampling
        private, optimizer, loader = opacus.PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(*(records or data())), batch_size=batch),
            noise_multiplier=sigma,
            max_grad_norm=norm if flat else list(norm),
            poisson_sampling=poisson,
            clipping="flat" if flat else "per_layer",
            noise_generator=torch.Generator().manual_seed(seed),
        )
        x, y = next(iter(loader))
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
    return gradient(net)


OURS = model()  # certified once: no run moves it


def by_hushgrad(
    *,
    sigma: float,
    clip: Clip,
    groups: Grouping = whole,
    seed: int = 0,
    batch: int = RECORDS,
    sampling: Sampling | None = None,
    records: tuple[Tensor, Tensor] | None = None,
) -> np.ndarray:
    """The gradient that hushgrad hands to the optimizer in its first step."""
    plan = hg.plan(
        records=RECORDS,
        batch=batch,
        epochs=batch / RECORDS,
        delta=1e-3,
        noise_multiplier=sigma,
        clip=clip,
        groups=groups,
        sampling=sampling,
    )
    optimizer = torch.optim.SGD(OURS.parameters(), lr=0.0)
    run = hg.train(OURS, optimizer, records or data(), plan=plan, rng=Rng.fixed(seed))
    for drawn in run:
        run.step(lambda b: F.cross_entropy(OURS(b[0]), b[1], reduction="none"), drawn)
    return gradient(OURS)


@pytest.mark.parametrize("norm", [0.2, 1.0, 100.0])
def test_flat_clipping_is_the_same(norm: float) -> None:
    theirs = by_opacus(sigma=0.0, norm=norm)
    ours = by_hushgrad(sigma=0.0, clip=abadi(norm), sampling=FullBatch())
    assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)
    other = by_hushgrad(sigma=0.0, clip=abadi(norm / 200), sampling=FullBatch())
    assert np.linalg.norm(other - theirs) > 0.1 * np.linalg.norm(theirs)


def test_per_layer_clipping_is_ours_by_parameter() -> None:
    """Opacus calls a parameter tensor a layer; `per_layer` takes weight and bias together."""
    theirs = by_opacus(sigma=0.0, norm=NORMS)
    ours = by_hushgrad(sigma=0.0, clip=abadi(NORMS), groups=per_parameter, sampling=FullBatch())
    assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)
    together = by_hushgrad(
        sigma=0.0, clip=abadi((0.6, 0.5)), groups=hg.per_layer, sampling=FullBatch()
    )
    assert np.linalg.norm(together - theirs) > 0.01 * np.linalg.norm(theirs)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_a_noise_multiplier_is_the_same_noise(per_tensor: bool) -> None:
    """Records without a gradient would still have biases, so the noise is what σ = 0 leaves."""
    sigma = 2.0
    norm = NORMS if per_tensor else 0.4
    options = {"clip": abadi(norm), "groups": per_parameter if per_tensor else whole}
    theirs = np.concatenate(
        [by_opacus(sigma=sigma, norm=norm, seed=s) - by_opacus(sigma=0.0, norm=norm) for s in SEEDS]
    )
    still = by_hushgrad(sigma=0.0, **options, sampling=FullBatch())
    ours = np.concatenate(
        [by_hushgrad(sigma=sigma, **options, seed=s, sampling=FullBatch()) - still for s in SEEDS]
    )
    bound = math.hypot(*NORMS) if per_tensor else 0.4
    for noise, slack in ((theirs, 1.0), (ours, 1 + SUM_SLACK)):
        scale = slack * sigma * bound / RECORDS
        assert stats.kstest(noise, stats.norm(scale=scale).cdf).pvalue > 1e-3
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(noise, stats.norm(scale=wrong * scale).cdf).pvalue < 1e-6


def test_updates_have_the_same_distribution() -> None:
    """Each entry's updates over seeds, less what both have without noise."""
    sigma, norm = 1.0, 0.5
    middle = by_opacus(sigma=0.0, norm=norm)
    theirs = np.concatenate([by_opacus(sigma=sigma, norm=norm, seed=s) for s in SEEDS])
    theirs -= np.tile(middle, len(SEEDS))

    def ours(sigma: float) -> np.ndarray:
        runs = [
            by_hushgrad(sigma=sigma, clip=abadi(norm), seed=s, sampling=FullBatch()) - middle
            for s in SEEDS
        ]
        return np.concatenate(runs)

    assert stats.ks_2samp(ours(sigma), theirs).pvalue > 1e-3
    assert stats.ks_2samp(ours(1.5 * sigma), theirs).pvalue < 1e-6
    assert stats.ks_2samp(ours(sigma / 1.5), theirs).pvalue < 1e-6


def test_poisson_batches_move_the_update_alike() -> None:
    """One record 64 times, with little noise: the update tells how many of them were drawn.

    Both divide by the expected size; by the size that was drawn, all updates would be alike.
    """
    sigma, norm, seeds = 0.05, 0.2, range(100)
    same = tuple(x[:1].expand(RECORDS, *x.shape[1:]).contiguous() for x in data())
    along = by_opacus(sigma=0.0, norm=norm, records=same)
    along /= np.linalg.norm(along)
    common = {"sigma": sigma, "batch": BATCH, "records": same}
    theirs = [along @ by_opacus(norm=norm, poisson=True, seed=s, **common) for s in seeds]
    ours = [along @ by_hushgrad(clip=abadi(norm), seed=s, **common) for s in seeds]
    assert stats.ks_2samp(ours, theirs).pvalue > 1e-3
    drawn = zip(theirs, _sizes(seeds), strict=True)
    by_real_size = [x * BATCH / size for x, size in drawn]
    assert np.std(by_real_size) < 0.1 * np.std(theirs)  # those were its sizes indeed
    assert stats.ks_2samp(ours, by_real_size).pvalue < 1e-6


def _sizes(seeds: range) -> list[int]:
    """How many records Opacus draws first with each seed."""
    found = []
    for seed in seeds:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loader = opacus.data_loader.DPDataLoader.from_data_loader(
                DataLoader(TensorDataset(*data()), batch_size=BATCH)
            )
            found.append(len(next(iter(loader))[0]))
    return found


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(1.5, 0.04, 2250), (1.0, 0.01, 1000), (4.0, 0.25, 400)]
)
def test_both_rdp_accountants_agree(sigma: float, rate: float, steps: int) -> None:
    theirs = opacus.accountants.RDPAccountant()
    theirs.history = [(sigma, rate, steps)]
    expected = theirs.get_epsilon(delta=1e-5)

    def ours(sigma: float) -> float:
        plan = hg.Plan(
            records=10_000,
            sampling=hg.sampling.Poisson(rate),
            steps=steps,
            noise_multiplier=sigma,
            delta=1e-5,
            accountant=hg.accounting.RDP,
        )
        return plan.epsilon

    assert ours(sigma) == pytest.approx(expected, rel=0.01)
    assert ours(1.05 * sigma) < 0.97 * expected
    assert ours(sigma / 1.05) > 1.03 * expected


def test_the_page_on_migration_says_what_the_rate_and_divisor_become() -> None:
    """Opacus takes 1/len(loader) and a whole number of records; hushgrad takes batch/records."""
    net = copy.deepcopy(OURS)
    data_loader = DataLoader(TensorDataset(*data()), batch_size=15)
    _, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=data_loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert loader.sample_rate == 1 / len(data_loader) == 1 / 5
    assert optimizer.expected_batch_size == int(RECORDS / 5) == 12
    plan = hg.plan(records=RECORDS, batch=15, epochs=1, delta=1e-3, noise_multiplier=1.0)
    assert (plan.sampling, plan.divisor) == (hg.sampling.Poisson(15 / 64), 15.0)
    same = hg.Plan(RECORDS, hg.sampling.Poisson(1 / 5), 5, 1.0, 1e-3)
    assert same.divisor == pytest.approx(12.8)


def test_the_page_on_migration_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    theirs, ours = {}, {}
    exec(before, theirs)
    told = float(capsys.readouterr().out)
    exec(after, ours)
    plan = ours["plan"]
    assert plan.epsilon == pytest.approx(told, rel=0.02)
    assert replace(plan, accountant=hg.accounting.RDP).epsilon > max(told, plan.epsilon)
    assert capsys.readouterr().out == f"{ours['run'].guarantee}\n"
    assert (plan.steps, plan.sampling.rate) == (40, theirs["loader"].sample_rate)
    prefixed = {f"_module.{name}" for name in ours["model"].state_dict()}
    assert set(theirs["model"].state_dict()) == prefixed
