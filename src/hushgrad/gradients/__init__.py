"""Per-sample gradients, certified for the model before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from hushgrad.batches import records
from hushgrad.gradients.certification.cache import Cache, fingerprint
from hushgrad.gradients.certification.certify import Certificate, certify
from hushgrad.gradients.certification.faults import bad_indices_named, refuse_meta
from hushgrad.gradients.certification.retests import extend, retest
from hushgrad.gradients.constants import constant, unwrap_constants
from hushgrad.gradients.factors.gradients import Gradients, difference
from hushgrad.gradients.factors.slots import Slots, in_turn
from hushgrad.gradients.forms.choices import Form, auto, compiled, dense, loop, recomputed, traced
from hushgrad.gradients.guards import check_optimizer, check_parameters, guarded, undone_if_it_fails
from hushgrad.gradients.objective import Objective, held_by
from hushgrad.gradients.structure import Structures
from hushgrad.gradients.tracing.call_sites import Unforeseen
from hushgrad.parallel.single import refuse_accumulator_hooks, refuse_wrapped, require_one_process
from hushgrad.types import Batch, EagerWeights, Loss, NotCovered, Params, Refused

__all__ = [
    "Certificate",
    "Form",
    "Gradients",
    "auto",
    "certificate_for",
    "check_optimizer",
    "compiled",
    "constant",
    "dense",
    "difference",
    "forget_structure",
    "loop",
    "per_sample",
    "recomputed",
    "run_certified",
    "traced",
]

_certificates = Cache()
_structures = Structures()
_log = logging.getLogger(__name__)


@bad_indices_named()
def per_sample(
    loss: Loss,
    params: Params,
    batch: Batch,
    *,
    form: Form | Sequence[Form] = auto,
    modules: Sequence[nn.Module] = (),
    idle: Collection[str] = (),
    foreseen: EagerWeights | None = None,
    capacity: int = 0,
) -> Gradients:
    """Per-sample gradients of `loss` with respect to `params`, one for each record of `batch`.

    `loss(batch)` returns one value for each record; it may be called several times. `modules` are
    those whose buffers are watched. `idle` names parameters that may be on no path to the loss.
    `foreseen` are weights by which the form `recomputed` may sum at once. `capacity` is a public
    number of records that batches seldom pass: certified up to it, they need no further test at
    each batch that is larger than those before it.

    Guarantees: the form was certified for this loss, these parameters and shapes; a record's
    gradient depends on no other record, to the extent that probes can tell; the norms are upper
    bounds. Raises `Refused` otherwise. The result's `form` says which of several was taken. An
    empty batch gives an empty result without calling `loss`.
    """
    require_one_process()
    check_parameters(params)
    size = records.count(batch)
    refuse_meta(params, batch)
    if size == 0:
        device = next(iter(params.values())).device
        return Gradients(
            {name: {} for name in params}, params, torch.zeros(0, device=device), in_turn(0)
        )
    batch = records.lay_out(_structures.checked(batch, loss, params))
    objective = Objective(loss, params, tuple(modules), frozenset(idle), foreseen=foreseen)
    forms = (form,) if isinstance(form, Form) else tuple(form)
    key = fingerprint(objective, forms, batch)
    known = _certificates.get(key)
    for certificate in reversed(known):  # the last: it may be of a form that takes every batch
        gradients = _unless_given_up(partial(_step, certificate, objective, batch, capacity))
        if gradients is not None:
            return gradients
    certificate, gradients = _begun(objective, forms, batch, capacity, changing=bool(known))
    if certificate.lasting:
        _certificates.add(key, certificate, objective)
    return gradients


@bad_indices_named()
def certificate_for(
    loss: Loss,
    params: Params,
    batch: Batch,
    *,
    form: Form | Sequence[Form] = auto,
    modules: Sequence[nn.Module] = (),
    idle: Collection[str] = (),
) -> Certificate:
    """Certify without using the result: what `per_sample` would do on the first such batch."""
    require_one_process()
    check_parameters(params)
    objective = Objective(loss, params, tuple(modules), frozenset(idle))
    forms = (form,) if isinstance(form, Form) else tuple(form)
    refuse_meta(params, batch)
    batch, _ = unwrap_constants(batch)
    return _certified(objective, forms, records.lay_out(batch))


def forget_structure(params: Params) -> None:
    """Let the next batch of these parameters' losses have another structure, as in a new run."""
    _structures.forget(params)


def _begun(
    objective: Objective, forms: tuple[Form, ...], batch: Batch, capacity: int, *, changing: bool
) -> tuple[Certificate, Gradients]:
    """Certify, and use the certificate for the first time.

    Where the calls change from batch to batch (a recurrence up to the longest sequence, an expert
    without records), only forms that follow no calls are left: certified anew for every sequence
    of calls, one record would move all others from one program to another.
    """
    following = {form.name: _CHANGING for form in forms if form.replays}
    others = tuple(form for form in forms if not form.replays)
    for left in (others or forms,) if changing else (forms, others):
        if not left:
            break
        certificate = _certified(objective, left, batch, capacity)
        if left is others:
            certificate.why_not = following | certificate.why_not
        gradients = _unless_given_up(partial(_first_use, certificate, objective, batch, capacity))
        if gradients is not None:
            _report(certificate, len(objective.params))
            return certificate, gradients
    raise Refused(f"{_CHANGING}; use form=loop")


def _unless_given_up(attempt: Callable[[], Gradients | None]) -> Gradients | None:
    """Make an attempt; if it is given up, the next one draws what it has drawn."""
    before = torch.get_rng_state()
    gradients = attempt()
    if gradients is None:
        torch.set_rng_state(before)
    return gradients


def _first_use(
    certificate: Certificate, objective: Objective, batch: Batch, capacity: int
) -> Gradients | None:
    """Use a new certificate, also where drawn places take more rows than it was tested with."""
    slots = certificate.slots(records.count(batch))
    if slots.rows > certificate.largest:
        rows = max(slots.rows, certificate.room(capacity))
        extend(certificate, _as_certified(objective, certificate), batch, rows)
    return _run(certificate, objective, batch, slots)


_CHANGING = (
    "the sequence of operations on private parameters changes from batch to batch in a way that "
    "probes made from one batch do not show (a recurrence up to the longest sequence of the batch, "
    "an expert that is skipped without records?)"
)


def _report(certificate: Certificate, parameters: int) -> None:
    _log.info("certified the form %s for %d parameters", certificate.form, parameters)
    for name, reason in certificate.why_not.items():
        noticed = name == compiled.name or certificate.form.alone  # it was asked for, or it is slow
        _log.log(logging.WARNING if noticed else logging.INFO, "not %s: %s", name, reason)


def _certified(
    objective: Objective, forms: Sequence[Form], batch: Batch, capacity: int = 0
) -> Certificate:
    """Certify, once it is clear that no other process has a part in the gradients."""
    _refuse_other_processes(objective)
    if any(form.compiles for form in forms):
        capacity = 0  # a program is made for each size: only those that come are worth it
    _log.info("certifying the model: its gradients are compared with those of single records")
    return certify(objective, forms, batch, records.count(batch), capacity)


def _refuse_other_processes(objective: Objective) -> None:
    refuse_wrapped(objective.modules)
    refuse_accumulator_hooks(objective.params)


def _step(
    certificate: Certificate, objective: Objective, batch: Batch, capacity: int
) -> Gradients | None:
    """Use a certificate again, testing anew at other sizes and as steps go by."""
    step, slots = certificate.steps + 1, certificate.slots(records.count(batch))
    objective = _as_certified(objective, certificate)
    try:
        if step & (step - 1) == 0:
            _refuse_other_processes(objective)
            _log.info("testing the certified model again, at use %d", step)
        if slots.rows > certificate.largest:
            extend(certificate, objective, batch, max(slots.rows, certificate.room(capacity)))
        else:
            retest(certificate, objective, batch, slots.rows)
    except Unforeseen:
        return None
    gradients = _run(certificate, objective, batch, slots)
    if gradients is not None:
        certificate.steps += 1
    return gradients


def _run(
    certificate: Certificate, objective: Objective, batch: Batch, slots: Slots
) -> Gradients | None:
    """Run as certified; a program that fails its proof gives way to what it was made from."""
    try:
        return run_certified(certificate, objective, batch, slots)
    except NotCovered as refusal:
        if not certificate.form.compiles:
            raise
        _log.warning("not %s from here on: %s", certificate.form, refusal)
        certificate.take(traced)
        return run_certified(certificate, objective, batch, slots)


def _as_certified(objective: Objective, certificate: Certificate) -> Objective:
    free = certificate.free_buffers
    return objective if objective.free_buffers == free else replace(objective, free_buffers=free)


def run_certified(
    certificate: Certificate, objective: Objective, batch: Batch, slots: Slots
) -> Gradients | None:
    """One watched pass, or None if it met a call that the certificate does not know."""
    objective = _as_certified(objective, certificate)
    rows = slots.filled(batch)
    try:
        with (
            undone_if_it_fails(objective.modules if objective.free_buffers else ()),
            guarded(
                objective.params, objective.modules, objective.free_buffers, held_by(objective.loss)
            ),
        ):
            with objective.rewound():
                gradients = certificate.run(objective, rows, slots, certificate.sites)
            objective.advance(batch)
            gradients.form = certificate.form.name
            return gradients
    except Unforeseen:
        return None
