"""Certification: a form is used on a model only after it was proved equal to the slow one there.

Probe batches of several sizes, made from the user's own records, are run with randomness
neutralised and the parameters randomly perturbed, and compared with runs of one record. What is
certified is where the records are at every call site, that no record's loss or gradient depends
on other records, that nothing is written or trained unseen, and that norms and gradients agree.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hushgrad.batches import records
from hushgrad.gradients.certification.deterministic import WithoutRandomness, perturb_randomly
from hushgrad.gradients.certification.faults import no_finite_record
from hushgrad.gradients.certification.free_buffers import consult_finding_buffers
from hushgrad.gradients.certification.generators import refuse_own_generators
from hushgrad.gradients.certification.independence import (
    LARGEST_MULTIPLE,
    Passes,
    check_independence,
    multiple_for,
)
from hushgrad.gradients.certification.near_misses import (
    POINTS,
    NearMiss,
    is_nearly_right,
    refusal_of,
    retry_near_misses,
)
from hushgrad.gradients.certification.oracle import Evidence, Oracle, compare, refuse_unreached
from hushgrad.gradients.certification.places import MovingBits, period_of
from hushgrad.gradients.certification.way_back import (
    RARE_DRAWS,
    beside_neighbours,
    reason_of,
    refuse_gradients_beside_copies,
    refuse_loud_gradients,
    refuse_mixed_gradients,
    replays_of,
    trace_probe,
)
from hushgrad.gradients.factors.slots import Slots, draw_slots, in_turn, room
from hushgrad.gradients.forms.choices import AnyGradients, Form, RunForm, traced
from hushgrad.gradients.forms.compiled import VECTOR, LongerPeriod
from hushgrad.gradients.guards import WatchedKey, restored
from hushgrad.gradients.objective import Objective, layer_called
from hushgrad.gradients.probes import distinct, distinct_records, own_records, probe_sizes
from hushgrad.gradients.tracing.call_sites import Probing, Replaying, Site, Unforeseen
from hushgrad.gradients.tracing.layout import Ambiguous
from hushgrad.gradients.tracing.rules.lookup import refuse_coupled_embedding
from hushgrad.types import Batch, NotCovered, Refused

_log = logging.getLogger(__name__)


@dataclass
class Certificate:
    """What was proved about one loss, its parameters and the shapes of its batches.

    Args:
        form: the form that was certified, and is used.
        run: its run, with what it keeps from pass to pass.
        sites: the operations on private parameters, in order, and where the records were.
        free_buffers: the buffers that a pass may write, since it writes the same for any records.
        largest: the most rows of a pass that was tested.
        evidence: the worst that was seen.
        why_not: for each form that could not be certified, why.
        multiple: passes are padded to a multiple of so many rows.
        period: rows are rounded alike whose places are equal modulo this.
        sizes: numbers of rows at which independence was tested.
        lasting: False if all records were alike, so that the next batch must be tested anew.
        steps: how many times it was used after the first.

    Example:
        >>> from hushgrad.gradients import certificate_for
        >>> layer = torch.nn.Linear(2, 1)
        >>> params = dict(layer.named_parameters())
        >>> certificate = certificate_for(lambda x: layer(x).squeeze(1), params, torch.randn(4, 2))
        >>> len(certificate.sites), certificate.why_not
        (1, {})
    """

    form: Form
    run: RunForm
    sites: tuple[Site, ...]
    free_buffers: frozenset[WatchedKey]
    largest: int
    evidence: Evidence
    why_not: dict[str, str]
    multiple: int
    period: int
    sizes: set[int]
    lasting: bool
    steps: int = 0

    def switch_to(self, form: Form) -> None:
        """Go on in another form that follows the same call sites."""
        self.form, self.run = form, form.start(self.evidence.precision)

    def slots(self, size: int) -> Slots:
        """Where the records of a batch stand in its pass; drawn anew where places matter."""
        return draw_slots(size, self.multiple, self.period)

    def room(self, size: int) -> int:
        """So many rows are enough for a batch of `size` records, nearly always."""
        return room(size, self.multiple, self.period)


@contextmanager
def probe_at(objective: Objective, point: int | None) -> Iterator[dict[WatchedKey, Tensor]]:
    """Put everything back after the passes inside; yields what they wrote.

    They run at the parameters as they are, or perturbed at random in one of several ways.
    """
    at = nullcontext() if point is None else perturb_randomly(objective.params, seed=point)
    watched = restored(objective.params, objective.modules)
    quiet = warnings.catch_warnings()
    with torch.random.fork_rng(), at, watched as changed, quiet, refuse_own_generators(objective):
        # Reentrant checkpointing says so of every pass that is made without gradients.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad", UserWarning)
        yield changed


def certify(
    objective: Objective, forms: Sequence[Form], batch: Batch, size: int, capacity: int = 0
) -> Certificate:
    """Certify the first of `forms` that can be, for batches of `capacity` records, or say why."""
    _refuse_coupling_layers(objective)
    # A few records are enough: what one layer does to a record it does to all.
    few = _few_records(objective, batch, size)
    room = max(size, capacity)
    return retry_near_misses(
        POINTS, lambda point: _certify_near(objective, forms, few, room, point)
    )


def _certify_near(
    objective: Objective, forms: Sequence[Form], few: Batch, size: int, point: int
) -> Certificate:
    """Certify at one point; a near miss is an answer at the last one only."""
    why_not: dict[str, str] = {}
    with probe_at(objective, point):
        objective, oracle = consult_finding_buffers(objective, few)
        evidence = Evidence(oracle.precision)
        # Nothing to compare with. A pass of all tells whether a record needs the others.
        if oracle.count == 0:
            together = Passes(objective, oracle).losses(few, records.count(few))
            raise no_finite_record(bool(together.isfinite().any()))
        # A forgotten parameter would get noise for nothing, and a share of the bound.
        refuse_unreached(objective, oracle)
        passes = Passes(objective, oracle)
        least = multiple_for(passes, size)
        # A program for each size: few sizes are worth more than the rows that they add.
        if any(form.compiles for form in forms):
            least = _coarse(least, size)
        sizes = (*probe_sizes(objective.params, few), records.padded_size(size, least))
        # Before any form: a loss that mixes records has no per-sample gradients at all.
        moved = check_independence(passes, sizes, evidence)
        for form in forms:
            _log.info("certifying the form %s", form)
            try:
                run, sites, multiple, period = _certify_form(form, passes, size, least, evidence)
                # Rounding that depends on other records is no fault where each record runs by
                # itself.
                if moved and not form.alone:
                    raise NotCovered(moved)
            except NotCovered as refusal:
                # Another point decides whether a ReLU has flipped or the form is wrong.
                if isinstance(refusal, NearMiss) and point != POINTS[-1]:
                    raise
                why_not[form.name] = str(refusal)
            except Unforeseen as call:
                why_not[form.name] = f"the sequence of operations changes with the batch: {call}"
            else:
                # Records that are all alike show no coupling: a certificate for this batch alone.
                lasting = len(distinct(oracle.records)) > 1
                largest = records.padded_size(size, multiple)
                return Certificate(
                    form=form,
                    run=run,
                    sites=sites,
                    free_buffers=objective.free_buffers,
                    largest=largest,
                    evidence=evidence,
                    why_not=why_not,
                    multiple=multiple,
                    period=period,
                    sizes={largest},
                    lasting=lasting,
                )
    reasons = "; ".join(f"{form}: {reason}" for form, reason in why_not.items())
    raise Refused(f"no form of per-sample gradients can be certified for this model. {reasons}")


def _few_records(objective: Objective, batch: Batch, size: int) -> Batch:
    """A few records that the loss accepts, different ones if it can be."""
    few = distinct_records(batch, size)
    try:
        with probe_at(objective, None), WithoutRandomness() as neutral, torch.enable_grad():
            neutral.choosing_draws(objective.loss)(few)
    except Exception:  # a variation was no record, or the batch's own are at fault, and will tell
        return own_records(batch, size)
    return few


def _certify_form(
    form: Form, passes: Passes, size: int, least: int, evidence: Evidence
) -> tuple[RunForm, tuple[Site, ...], int, int]:
    """Certify a form, with the multiple of rows and the period at which records keep their bits."""
    multiple, objective, oracle = least, passes.objective, passes.oracle
    while True:
        try:
            run, sites, period = _certify_at(form, objective, oracle, size, multiple, evidence)
        except MovingBits:
            multiple *= 2
            # A larger block moves the kernels' ends away from the records.
            if multiple > LARGEST_MULTIPLE:
                raise
        else:
            return run, sites, multiple, period


def _certify_at(
    form: Form, objective: Objective, oracle: Oracle, size: int, multiple: int, evidence: Evidence
) -> tuple[RunForm, tuple[Site, ...], int]:
    largest, period = records.padded_size(size, multiple), 1
    sites: tuple[Site, ...] = ()
    if form.replays:
        sites = _certify_sites(objective, oracle, largest, evidence)
        period = period_of(
            oracle, lambda batch, n: replays_of(sites, n)(objective, batch)[0], largest, multiple
        )
    run = form.start(oracle.precision)

    def without_draws(batch: Batch, n: int) -> AnyGradients:
        try:
            with WithoutRandomness() as neutral, objective.rewind_buffers():
                drawless = replace(objective, loss=neutral.choosing_draws(objective.loss))
                return run(drawless, batch, in_turn(n), Replaying(sites, n))
        except Exception as error:  # the plain forward pass worked: another form may do
            raise NotCovered(reason_of(error)) from error

    if form.compiles:
        probe, proved = oracle.probe(largest), False
        while not proved:
            try:
                run(objective, probe, in_turn(largest, period=period), Replaying(sites, largest))
                proved = True
            except LongerPeriod as longer:
                period = longer.period
    # The traced form was compared already, when its sites were found.
    elif form is not traced:
        wrong = compare(without_draws(oracle.probe(oracle.count), oracle.count), oracle, evidence)
        if wrong:
            raise refusal_of(wrong)
        if not form.replays and not form.alone:
            period = period_of(oracle, without_draws, largest, multiple)
    return run, sites, period


_FINEST_SHARE = 24  # not a power of two: batches near one should all get the same multiple


def _coarse(multiple: int, size: int) -> int:
    """A multiple that batches near `size` reach in few steps: each number of records compiles."""
    multiple = max(multiple, VECTOR)
    while multiple * _FINEST_SHARE < size:
        multiple *= 2
    return multiple


# --- the call sites -----------------------------------------------------------------------------


def _certify_sites(
    objective: Objective, oracle: Oracle, largest: int, evidence: Evidence
) -> tuple[Site, ...]:
    """Find the sites at two probe sizes, test them there, then replay them at the largest."""
    tried: set[int] = set()
    for _ in range(4):
        first, second = probe_sizes(objective.params, oracle.records, avoid=tried)
        # Ambiguous sizes are not tried again: another pair of primes may part the dimensions.
        tried |= {first, second}
        try:
            sites = _sites(objective, oracle, first, second, evidence)
        except Ambiguous as reason:
            last = str(reason)
            continue
        wrong = compare_replay(objective, oracle, sites, largest, evidence)
        if wrong:
            raise refusal_of(wrong, "in a larger batch ")
        # A branch that only a rare draw takes may mix the records on the way back.
        for draws in RARE_DRAWS if oracle.drew else ():
            with suppress(Unforeseen):  # other operations at other draws: certified when they come
                refuse_loud_gradients(objective, oracle, sites, draws)
        return sites
    raise NotCovered(f"no dimension could be told to be the batch: {last}")


def compare_replay(
    objective: Objective, oracle: Oracle, sites: tuple[Site, ...], size: int, evidence: Evidence
) -> dict[str, float]:
    """The parameters whose gradients are off in a batch of `size`, and by how much.

    Beside other records a record's gradient must stay what it is: the way back may mix as well.
    """
    run, batch = replays_of(sites, size), oracle.probe(size)
    quiet = run(objective, batch)
    wrong = compare(quiet[0], oracle, evidence)
    # What is far off is wrong already, and what follows would only say so less clearly.
    if is_nearly_right(wrong):
        beside = beside_neighbours(batch, size)
        refuse_mixed_gradients(objective, beside, run, quiet, oracle.precision)
        refuse_loud_gradients(objective, oracle, sites)
        refuse_gradients_beside_copies(objective, oracle, sites)
    return wrong


def _sites(
    objective: Objective, oracle: Oracle, first: int, second: int, evidence: Evidence
) -> tuple[Site, ...]:
    """The call sites, if both probe sizes agree on them and on every gradient.

    A dimension flattened into the batch is first read with the records in front; the sites of
    parameters that come out wrong are then read the other way round.
    """
    flipped: frozenset[int] = frozenset()
    readings: list[dict[str, float]] = []
    for _ in range(2):
        found: list[tuple[Site, ...]] = []
        wrong: dict[str, float] = {}
        for size in (first, second):
            guide = Probing(size, flipped)
            gradients, _ = trace_probe(objective, oracle.probe(size), size, guide)
            found.append(tuple(guide.sites))
            wrong |= compare(gradients, oracle, evidence)
        # What follows the batch at one size and not at the other was no batch dimension.
        if found[0] != found[1]:
            raise Ambiguous(_first_difference(found[0], found[1]))
        if not wrong:
            return found[0]
        readings.append(wrong)
        # Only these can be read both ways, and only where the first reading came out wrong.
        flipped = frozenset(
            i
            for i, site in enumerate(found[0])
            if _is_flattened(site) and not wrong.keys().isdisjoint(site.parameters)
        )
    raise refusal_of(min(readings, key=lambda wrong: max(wrong.values())))


def _is_flattened(site: Site) -> bool:
    return any(p.layout is not None and p.layout.share > 1 for p in site.inputs + site.outputs)


def _first_difference(one: tuple[Site, ...], other: tuple[Site, ...]) -> str:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return f"{a.operation} on {', '.join(a.parameters)} differs between probe sizes"
    return f"{len(one)} and {len(other)} operations at two probe sizes"


# --- what the model may not do ------------------------------------------------------------------


def _refuse_coupling_layers(objective: Objective) -> None:
    for module in objective.modules:
        for name, child in module.named_modules():
            if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training:
                raise Refused(
                    f"{layer_called(name)} is a {type(child).__name__} in training mode, which "
                    "normalises each record by the others, so no bound on one record exists; call "
                    "hushgrad.replace_batchnorm(model), or eval() that layer"
                )
            if type(child).__module__.startswith("torch.ao.nn.quantized.dynamic"):
                raise Refused(
                    f"{layer_called(name)} is a dynamically quantised {type(child).__name__}, "
                    "which scales each record by the range of the others, so no bound on one "
                    "record exists; use the layer that it was made from"
                )
            if isinstance(child, nn.Embedding | nn.EmbeddingBag):
                refuse_coupled_embedding(child.max_norm, child.scale_grad_by_freq)
