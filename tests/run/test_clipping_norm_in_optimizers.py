"""What automatic clipping promises of every optimizer: R is a part of the rate, or drops out.

Reference: Bu et al., Automatic Clipping, Theorems 1 and 2, section 4 and Fact B.1. A clipping norm
that is a power of two scales sums, noise and its grid without rounding, so there two trajectories
agree to the last bit; at any other R they agree up to rounding and the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_optimizer import LARS, Lamb
from scipy import stats
from torch import Tensor, nn
from torch.optim import Optimizer

import hushgrad as hg
from hushgrad.clipping.aggregate import SUM_SLACK
from hushgrad.clipping.groups import Grouping, per_layer, whole
from hushgrad.clipping.rules import Clip, abadi, automatic, discard, normalize, reparameterized
from hushgrad.rng import Label, Rng
from hushgrad.types import Refused

RECORDS, BATCH, STEPS = 64, 16, 8
AUTO = {"AUTO-V": normalize, "AUTO-S": lambda clip_norm: automatic(clip_norm=clip_norm)}
POWERS = (2.0**-4, 32.0)
OTHERS = (0.1, 3.0)
slow = pytest.mark.slow
CASES = [
    ("AUTO-S", 2.0**-4),
    ("AUTO-V", 32.0),
    pytest.param("AUTO-S", 4.0, marks=slow),
    pytest.param("AUTO-V", 0.5, marks=slow),
]
Make = Callable[[nn.Module], Optimizer]


class SharedDraws(Rng):
    """Draws that depend neither on the sums nor on the plan, so that two runs can share them.

    The library draws other batches for every other plan and fresh noise for every other sum, as it
    must. The theorems are about the same batches, and one noise that is scaled.
    """

    def derive(self, *labels: Label) -> Rng:
        purpose, *rest = labels
        kept = [] if purpose == "sampling" else [x for x in rest if isinstance(x, int)]
        return SharedDraws(super().derive(purpose, *kept)._key, reproducible=True)


def shared(seed: int = 0) -> Rng:
    return SharedDraws(bytes([seed]) * 32, reproducible=True)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(RECORDS, 6, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def model(*, bias: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first, second = nn.Linear(6, 8, bias=bias), nn.Linear(8, 3, bias=bias)
        return nn.Sequential(first, nn.Tanh(), second).double()


# Each is certified once: a run starts by putting the first values back.
NETS = {bias: model(bias=bias) for bias in (True, False)}


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def trained(
    make: Make,
    clip: Clip,
    *,
    sigma: float = 1.0,
    groups: Grouping = whole,
    bias: bool = True,
    steps: int = STEPS,
    rates: Callable[[int], float] | None = None,
) -> Tensor:
    """The parameters after each step, less where they started."""
    net = NETS[bias].requires_grad_(True)
    net.load_state_dict(model(bias=bias).state_dict())
    plan = hg.plan(
        records=RECORDS,
        batch=BATCH,
        epochs=steps * BATCH / RECORDS,
        delta=1e-3,
        noise_multiplier=sigma,
        clip=clip,
        groups=groups,
    )
    optimizer = make(net)
    run = hg.train(net, optimizer, data(), plan=plan, rng=shared())
    start, passed = flat(net), []
    for step, batch in enumerate(run):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates(step)
        run.step(lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none"), batch)
        passed.append(flat(net) - start)
    return torch.stack(passed)


def by(kind: type[Optimizer], **options: Any) -> Make:
    return lambda net: kind(net.parameters(), **options)


def gap(one: Tensor, other: Tensor) -> float:
    """How far apart two trajectories are, as a part of how far they went."""
    return float((one - other).norm() / other.norm())


# --- Theorem 1: without adaptivity, R is a factor of the learning rate ---

MOMENTA: dict[str, dict[str, Any]] = {
    "SGD": {},
    "heavy ball": {"momentum": 0.9},
    "dampened": {"momentum": 0.9, "dampening": 0.5},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
}
LR, DECAY = 0.1, 0.05


@pytest.mark.parametrize("groups", [whole, per_layer], ids=lambda g: g.__name__)
@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize(("rule", "R"), CASES)
def test_the_clipping_norm_is_a_factor_of_the_learning_rate(
    rule: str, R: float, momentum: str, groups: Grouping
) -> None:
    options = MOMENTA[momentum]
    with_r = by(torch.optim.SGD, lr=LR, weight_decay=DECAY, **options)
    without = by(torch.optim.SGD, lr=LR * R, weight_decay=DECAY / R, **options)
    assert torch.equal(
        trained(with_r, AUTO[rule](R), groups=groups),
        trained(without, AUTO[rule](1.0), groups=groups),
    )


@slow
@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("rule", AUTO)
@pytest.mark.parametrize(("sigma", "close"), [(0.0, 1e-12), (1.0, 1e-3)])
def test_at_any_clipping_norm_up_to_rounding_and_the_grid(
    rule: str, momentum: str, sigma: float, close: float
) -> None:
    options = MOMENTA[momentum]
    for R in OTHERS:
        moved = trained(
            by(torch.optim.SGD, lr=LR, weight_decay=DECAY, **options), AUTO[rule](R), sigma=sigma
        )
        as_one = by(torch.optim.SGD, lr=LR * R, weight_decay=DECAY / R, **options)
        assert gap(moved, trained(as_one, AUTO[rule](1.0), sigma=sigma)) < close
        forgot_rate = by(torch.optim.SGD, lr=LR, weight_decay=DECAY / R, **options)
        assert gap(moved, trained(forgot_rate, AUTO[rule](1.0), sigma=sigma)) > 10 * close
        forgot_decay = by(torch.optim.SGD, lr=LR * R, weight_decay=DECAY, **options)
        assert gap(moved, trained(forgot_decay, AUTO[rule](1.0), sigma=sigma)) > close


def test_it_is_automatic_clipping_that_has_this_property() -> None:
    """Abadi's threshold is no factor of anything, once it lies among the gradients' norms."""
    moved = trained(by(torch.optim.SGD, lr=LR), abadi(2.0))
    as_one = trained(by(torch.optim.SGD, lr=LR * 2), abadi(1.0))
    assert gap(moved, as_one) > 0.01
    assert torch.equal(moved, trained(by(torch.optim.SGD, lr=LR * 2), reparameterized(2.0)))


# --- Theorem 2: an adaptive optimizer does not see R at all ---

EPS = 0.01  # of the size of a gradient, so that it matters

COUPLED: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "Adam, largest square": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.05}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.02}),
    "RMSprop, centred": (torch.optim.RMSprop, {"lr": 0.02, "centered": True, "momentum": 0.9}),
}
DECOUPLED: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "NAdam, decoupled": (torch.optim.NAdam, {"lr": 0.05, "decoupled_weight_decay": True}),
}
OTHER_NAMES = [name for name in (*COUPLED, *DECOUPLED) if name != "Adam"]


def adaptive(name: str, *, decay: float, eps: float) -> Make:
    kind, options = (COUPLED | DECOUPLED)[name]
    return by(kind, **options, weight_decay=decay, eps=eps)


@pytest.mark.parametrize(("rule", "R"), CASES)
@pytest.mark.parametrize("name", [*COUPLED, *DECOUPLED])
def test_an_adaptive_optimizer_takes_the_same_way_at_every_clipping_norm(
    name: str, rule: str, R: float
) -> None:
    decay, wrong = (DECAY / R, DECAY) if name in COUPLED else (DECAY, DECAY / R)
    moved = trained(adaptive(name, decay=DECAY, eps=EPS), AUTO[rule](R))
    as_one = adaptive(name, decay=decay, eps=EPS / R)
    assert torch.equal(moved, trained(as_one, AUTO[rule](1.0)))
    forgot = adaptive(name, decay=wrong, eps=EPS / R)
    assert gap(moved, trained(forgot, AUTO[rule](1.0))) > 1e-3


@slow
@pytest.mark.parametrize("name", [*COUPLED, *DECOUPLED])
def test_at_any_clipping_norm_an_adaptive_optimizer_agrees_up_to_rounding(name: str) -> None:
    for R in OTHERS:
        for sigma, close in ((0.0, 1e-9), (1.0, 0.02)):
            decay = DECAY / R if name in COUPLED else DECAY
            moved = trained(
                adaptive(name, decay=DECAY, eps=EPS), automatic(clip_norm=R), sigma=sigma
            )
            as_one = adaptive(name, decay=decay, eps=EPS / R)
            assert gap(moved, trained(as_one, automatic(), sigma=sigma)) < close


@pytest.mark.parametrize("name", ["Adam", *(pytest.param(n, marks=slow) for n in OTHER_NAMES)])
def test_a_forgotten_epsilon_shows_where_it_matters_and_only_there(name: str) -> None:
    """The usual 1e-8 hides that the theorem asks for eps/R; at a tenth of a gradient it shows."""
    R = 2.0**-4
    for eps, visible in ((EPS, True), (1e-12, False)):
        moved = trained(adaptive(name, decay=0.0, eps=eps), automatic(clip_norm=R))
        forgot = trained(adaptive(name, decay=0.0, eps=eps), automatic())
        assert (gap(moved, forgot) > 0.05) == visible
        assert (gap(moved, forgot) < 1e-6) != visible


def test_a_start_of_adagrads_squares_scales_with_the_squares() -> None:
    R = 4.0
    options = {"lr": 0.1, "eps": 0.0}
    moved = trained(
        by(torch.optim.Adagrad, **options, initial_accumulator_value=0.01), automatic(clip_norm=R)
    )
    as_one = by(torch.optim.Adagrad, **options, initial_accumulator_value=0.01 / R**2)
    assert torch.equal(moved, trained(as_one, automatic()))


# --- the layerwise ones: LARS scales matrices only, LAMB's eps stands in two places ---


def lars(*, decay: float, vectors: float = 0.05) -> Make:
    def make(net: nn.Module) -> Optimizer:
        matrices = [p for p in net.parameters() if p.ndim > 1]
        rest = [p for p in net.parameters() if p.ndim == 1]
        groups = [{"params": matrices}, *([{"params": rest, "lr": vectors}] if rest else [])]
        return LARS(groups, lr=0.05, weight_decay=decay, trust_coefficient=1.0)

    return make


@pytest.mark.parametrize("R", POWERS)
def test_lars_does_not_see_the_clipping_norm_in_matrices(R: float) -> None:
    moved = trained(lars(decay=DECAY), automatic(clip_norm=R), bias=False)
    assert torch.equal(moved, trained(lars(decay=DECAY / R), automatic(), bias=False))
    assert gap(moved, trained(lars(decay=DECAY), automatic(), bias=False)) > 1e-3


def test_lars_sees_it_in_vectors_which_it_does_not_scale() -> None:
    """Biases take ordinary steps, so theirs is Theorem 1: the learning rate goes to lr·R."""
    R = 4.0
    moved = trained(lars(decay=DECAY), automatic(clip_norm=R))
    assert gap(moved, trained(lars(decay=DECAY / R), automatic())) > 0.1
    assert torch.equal(moved, trained(lars(decay=DECAY / R, vectors=0.05 * R), automatic()))


@pytest.mark.parametrize("R", POWERS)
def test_lamb_does_not_see_the_clipping_norm(R: float) -> None:
    """Its decay is decoupled and stays. The eps of its trust ratio does not scale, so it is 0."""
    options = {"lr": 0.02, "eps": 0.0}
    moved = trained(by(Lamb, **options, weight_decay=DECAY), automatic(clip_norm=R))
    assert torch.equal(moved, trained(by(Lamb, **options, weight_decay=DECAY), automatic()))
    forgot = trained(by(Lamb, **options, weight_decay=DECAY / R), automatic())
    assert gap(moved, forgot) > 1e-3


def test_lambs_epsilon_is_off_by_the_trust_ratios_part_of_it() -> None:
    """`|w|/(|u| + eps)`: the update u has no scale of R, so eps/R there is another step."""
    R, eps = 2.0**-4, 0.05
    moves, norms = [], []
    for clip, own in ((automatic(clip_norm=R), eps), (automatic(), eps / R)):
        kept: list[Optimizer] = []

        def make(net: nn.Module, own: float = own, kept: list[Optimizer] = kept) -> Optimizer:
            for p in net.parameters():
                p.requires_grad_(p is net[0].weight)
            kept.append(Lamb([net[0].weight], lr=0.02, eps=own))
            return kept[0]

        moves.append(trained(make, clip, steps=1)[0])
        (state,) = kept[0].state.values()
        norms.append(state["adam_norm"])
    assert torch.equal(norms[0], norms[1])
    assert gap(moves[0], moves[1]) > 0.05
    expected = moves[1] * (norms[0] + eps / R) / (norms[0] + eps)
    torch.testing.assert_close(moves[0], expected, rtol=1e-12, atol=0)


# --- the exceptions, and by how much ---


@pytest.mark.parametrize("R", [2.0**-4, 8.0])
def test_radam_sees_the_clipping_norm_in_its_first_five_steps(R: float) -> None:
    """While ρ_t ≤ 5 it takes lr·m undivided: those steps are R times as long, and no others."""
    lr, steps = 0.02, 12
    moved = trained(
        by(torch.optim.RAdam, lr=lr, eps=EPS, weight_decay=DECAY),
        automatic(clip_norm=R),
        steps=steps,
    )
    as_one = by(torch.optim.RAdam, lr=lr, eps=EPS / R, weight_decay=DECAY / R)
    plain = trained(as_one, automatic(), steps=steps)
    torch.testing.assert_close(moved[0], R * plain[0], rtol=1e-9, atol=0)
    assert gap(moved, plain) > 0.01
    mended = trained(
        as_one, automatic(), steps=steps, rates=lambda step: lr * R if step < 5 else lr
    )
    assert torch.equal(moved, mended)
    for last in (4, 6):
        other = trained(
            as_one,
            automatic(),
            steps=steps,
            rates=lambda step, last=last: lr * R if step < last else lr,
        )
        assert gap(moved, other) > 1e-3


@pytest.mark.parametrize("R", [2.0**-4, 8.0])
def test_adadelta_sees_the_clipping_norm_by_its_two_epsilons(R: float) -> None:
    """`g·√(d + eps)/√(v + eps)`: v scales by R², d does not, and there is one eps for both."""
    eps = 1e-4
    moved = trained(by(torch.optim.Adadelta, eps=eps), automatic(clip_norm=R))
    for power in (0, 1, 2):
        as_one = trained(by(torch.optim.Adadelta, eps=eps / R**power), automatic())
        assert gap(moved, as_one) > 0.01
    # With eps/R² the root below is right, and the one above is short by R at the first step.
    torch.testing.assert_close(moved[0], R * as_one[0], rtol=1e-9, atol=0)


def test_adadelta_does_not_see_it_once_both_epsilons_are_there() -> None:
    """The same optimizer with an eps of its own under each root takes the same way at every R."""

    class TwoEpsilons(Optimizer):
        def __init__(self, params: Any, *, above: float, below: float) -> None:
            super().__init__(params, {"above": above, "below": below})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    v, d = state.get("v", torch.zeros_like(p)), state.get("d", torch.zeros_like(p))
                    state["v"] = v = 0.9 * v + 0.1 * p.grad.square()
                    update = p.grad * (d + group["above"]).sqrt() / (v + group["below"]).sqrt()
                    state["d"] = 0.9 * d + 0.1 * update.square()
                    p -= update

    eps, R = 1e-4, 8.0
    plain = trained(by(torch.optim.Adadelta, eps=eps), automatic(clip_norm=R))
    ours = trained(by(TwoEpsilons, above=eps, below=eps), automatic(clip_norm=R))
    assert gap(ours, plain) < 1e-9
    assert torch.equal(ours, trained(by(TwoEpsilons, above=eps, below=eps / R**2), automatic()))


# --- privacy: that of Abadi's clipping at the same σ, q and T ---

RULES = [
    (abadi(0.25), 0.25),
    (automatic(clip_norm=0.25), 0.25),
    (automatic(clip_norm=4.0), 4.0),
    (normalize(0.25), 0.25),
    (normalize(4.0), 4.0),
    (discard(4.0), 4.0),
    (reparameterized(0.25), 1.0),
    (reparameterized(4.0), 1.0),
]


@pytest.mark.parametrize(("clip", "bound"), RULES, ids=str)
def test_every_rule_costs_what_abadis_costs(clip: Clip, bound: float) -> None:
    options = {"records": 1000, "batch": 50, "epochs": 3, "delta": 1e-5, "noise_multiplier": 0.8}
    options["accountant"] = hg.accounting.RDP
    own, abadis = hg.plan(**options, clip=clip), hg.plan(**options, clip=abadi(1.0))
    assert own.event(own.steps) == abadis.event(abadis.steps)
    assert own.epsilon == abadis.epsilon < math.inf


@pytest.mark.parametrize("groups", [whole, per_layer], ids=lambda g: g.__name__)
@pytest.mark.parametrize(("clip", "bound"), RULES, ids=str)
def test_the_noise_is_sigma_times_the_rules_own_bound(
    clip: Clip, bound: float, groups: Grouping
) -> None:
    """Records without a gradient: what is released is the noise, in every group of parameters."""
    sigma = 1.5
    net = nn.Sequential(nn.Linear(4, 500, bias=False), nn.Linear(500, 6, bias=False)).double()
    plan = hg.plan(
        records=RECORDS,
        batch=BATCH,
        epochs=0.25,
        delta=1e-3,
        noise_multiplier=sigma,
        clip=clip,
        groups=groups,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    nothing = (torch.zeros(RECORDS, 4, dtype=torch.float64),)
    run = hg.train(net, optimizer, nothing, plan=plan, rng=Rng.fixed(2))
    for batch in run:
        run.step(lambda b: net(b[0]).square().sum(1), batch)
    scale = sigma * bound * (1 + SUM_SLACK) / BATCH
    for p in net.parameters():
        drawn = p.grad.flatten().numpy()
        assert stats.kstest(drawn, stats.norm(scale=scale).cdf).pvalue > 1e-3
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(drawn, stats.norm(scale=wrong * scale).cdf).pvalue < 1e-6


@pytest.mark.parametrize(("clip", "bound"), RULES, ids=str)
def test_no_record_exceeds_the_bound_that_the_noise_is_scaled_by(clip: Clip, bound: float) -> None:
    """And the bound is reached: noise that is scaled by it is not larger than it must be."""
    net = nn.Linear(6, 1, bias=False).double()
    params = dict(net.named_parameters())
    sizes = []
    for length in (1e-3, 0.1, 0.2499, 0.5, 2.0, 3.999, 30.0, 1e6):
        record = torch.full((1, 6), length / math.sqrt(6), dtype=torch.float64)
        total = hg.clipped_sum(lambda b: net(b[0])[:, 0], params, (record,), clip=clip)
        assert total.l2 == pytest.approx(bound * (1 + SUM_SLACK), rel=1e-12)
        sizes.append(float(total.sum["weight"].norm()))
    assert 0.999 * bound < max(sizes) <= bound * (1 + 1e-9)


# --- Fact B.1: clipping norms of their own for each layer do not couple ---


def split(moved: Tensor) -> tuple[Tensor, Tensor]:
    """A trajectory's entries in the first and in the second layer, without biases."""
    return moved[:, :48], moved[:, 48:]


def test_clipping_norms_that_are_not_in_proportion_break_the_coupling() -> None:
    """(9, 12) → (16, 12): signal by 16/9 and 1, noise by 4/3 in both; no rate makes up for that."""
    before, after = normalize((9.0, 12.0)), normalize((16.0, 12.0))
    assert (before.bound(2), after.bound(2)) == (15.0, 20.0)  # 3-4-5 triangles, without rounding
    sgd, sigma = by(torch.optim.SGD, lr=0.1), 2.0
    common = {"groups": per_layer, "bias": False, "steps": 1}
    signal = [split(trained(sgd, clip, sigma=0.0, **common)) for clip in (before, after)]
    update = [split(trained(sgd, clip, sigma=sigma, **common)) for clip in (before, after)]
    for layer, factor in ((0, 16 / 9), (1, 1.0)):
        torch.testing.assert_close(
            signal[1][layer], factor * signal[0][layer], rtol=1e-10, atol=1e-12
        )
        noise = [update[i][layer] - signal[i][layer] for i in (0, 1)]
        assert gap(noise[1], 4 / 3 * noise[0]) < 2.0**-13
    # The ratios of the paper, of the noise's scale to a record's share in the layer.
    ratios = [[clip.bound(2) / R for R in clip.clip_norm] for clip in (before, after)]
    assert ratios == [[5 / 3, 5 / 4], [5 / 4, 5 / 3]]
    for rate in torch.linspace(0.05, 0.4, 71).tolist():
        assert gap(torch.cat(update[1], 1), rate / 0.1 * torch.cat(update[0], 1)) > 0.05


def test_clipping_norms_in_proportion_keep_it() -> None:
    moved = trained(by(torch.optim.SGD, lr=0.1), normalize((18.0, 24.0)), groups=per_layer)
    as_one = trained(by(torch.optim.SGD, lr=0.2), normalize((9.0, 12.0)), groups=per_layer)
    assert torch.equal(moved, as_one)
    other = trained(by(torch.optim.SGD, lr=0.2), normalize((16.0, 12.0)), groups=per_layer)
    assert gap(other, as_one) > 0.05


# --- every optimizer of torch gets the released gradient, and nothing else ---

REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)
ONE_GRADIENT = [
    kind
    for kind in (getattr(torch.optim, name) for name in torch.optim.__all__)
    if isinstance(kind, type) and kind not in REFUSED and kind is not Optimizer
]


def first_step(net: nn.Module, optimizer: Optimizer) -> None:
    plan = hg.plan(
        records=RECORDS, batch=BATCH, epochs=0.25, delta=1e-3, noise_multiplier=1.0, clip=abadi(1.0)
    )
    run = hg.train(net, optimizer, data(), plan=plan, rng=Rng.fixed(0))
    for batch in run:
        run.step(lambda b: F.cross_entropy(net(b[0]), b[1], reduction="none"), batch)


@pytest.mark.parametrize("kind", [*ONE_GRADIENT, LARS, Lamb], ids=lambda k: k.__name__)
def test_every_first_order_optimizer_takes_a_private_step(kind: type[Optimizer]) -> None:
    source, net, plain = model(bias=False), model(bias=False), model(bias=False)
    first_step(source, torch.optim.SGD(source.parameters(), lr=0.0))
    first_step(net, kind(net.parameters(), lr=0.1))
    for p, q in zip(plain.parameters(), source.parameters(), strict=True):
        p.grad = q.grad.clone()
    kind(plain.parameters(), lr=0.1).step()
    assert torch.equal(flat(net), flat(plain))
    assert not torch.equal(flat(net), flat(source))
    assert flat(net).isfinite().all()


@pytest.mark.parametrize("kind", REFUSED)
def test_an_optimizer_that_wants_more_than_a_gradient_is_refused(kind: type[Optimizer]) -> None:
    net = model()
    before = flat(net)
    with pytest.raises(Refused, match=f"one dense gradient for each step, got {kind.__name__}"):
        first_step(net, kind(net.parameters()))
    assert torch.equal(flat(net), before)
