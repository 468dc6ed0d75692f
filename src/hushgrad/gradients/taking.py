"""Per-sample gradients by certificate: one is found or made, tested again where it is time, used.

From here to the user's loss there are three frames of ours on an ordinary step: `gradients_of`,
`use_certificate`, and the form's own pass (`trace`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import nn

from hushgrad.batches import records
from hushgrad.gradients.certification.cache import Cache, fingerprint
from hushgrad.gradients.certification.certify import Certificate, certify
from hushgrad.gradients.certification.faults import name_bad_indices, refuse_meta
from hushgrad.gradients.certification.retests import extend, retest
from hushgrad.gradients.constants import unwrap_constants
from hushgrad.gradients.factors.gradients import Gradients
from hushgrad.gradients.factors.slots import Slots, in_turn
from hushgrad.gradients.forms.choices import AnyGradients, Form, auto, compiled, traced
from hushgrad.gradients.forms.compiled import LongerPeriod
from hushgrad.gradients.guards import check_parameters, undo_on_failure
from hushgrad.gradients.objective import Objective, references_of
from hushgrad.gradients.structure import Structures
from hushgrad.gradients.tracing.call_sites import Replaying, Unforeseen
from hushgrad.parallel.single import refuse_accumulator_hooks, refuse_wrapped, require_one_process
from hushgrad.types import Batch, EagerWeights, Loss, NotCovered, Params, Refused

_certificates = Cache()
_structures = Structures()
_log = logging.getLogger("hushgrad.gradients")


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
) -> AnyGradients:
    """Take the gradient of each record's loss by itself, for all records of a batch at once.

    The first batch certifies the model: a form is used only after it was compared with runs of one
    record at a time. Later batches of the same shapes use the certificate, and test it again at
    steps 1, 2, 4, 8 and so on.

    Guarantees: the form was certified for this loss, these parameters and shapes; a record's
    gradient depends on no other record, to the extent that probes can tell; the norms are upper
    bounds. An empty batch gives an empty result without a call of `loss`.

    Args:
        loss: `loss(batch)` returns one value for each record. It may be called several times.
        params: the private parameters by name, as `dict(model.named_parameters())`.
        batch: nested tensors whose first dimension counts the records.
        form: one form, or several of which the first that can be certified is used.
        modules: the modules that `loss` runs; their buffers are watched.
        idle: names of parameters that may be on no path to the loss.
        foreseen: weights by which the form `recomputed` may sum at once.
        capacity: a public number of records that batches seldom pass. Certified up to it, they need
            no further test at each batch that is larger than those before it.

    Returns:
        Gradients with `losses`, `sq_norms()` and `weighted_sum(weights)`, lazily, in factored form.
        Their `form` says which of several forms was used.

    Raises:
        Refused: if no form can be certified, or a pass wrote or trained what it may not. The
            message says what was found and what to change.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> rows = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    >>> found = per_sample(lambda x: layer(x).squeeze(1), dict(layer.named_parameters()), rows)
    >>> [round(x, 3) for x in found.sq_norms()["weight"].sqrt().tolist()]
    [5.0, 2.0]
    """
    objective = Objective(loss, params, tuple(modules), frozenset(idle), foreseen=foreseen)
    return gradients_of(objective, batch, forms=_as_tuple(form), capacity=capacity)


def gradients_of(
    objective: Objective, batch: Batch, *, forms: tuple[Form, ...], capacity: int = 0
) -> AnyGradients:
    """Take per-sample gradients of an objective; `per_sample` takes its parts instead.

    Guarantees and refusals are those of `per_sample`.

    Args:
        objective: the loss, with its parameters and modules.
        batch: nested tensors whose first dimension counts the records.
        forms: the forms to try, in this order.
        capacity: a public number of records that batches seldom exceed.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> params = dict(layer.named_parameters())
        >>> objective = Objective(lambda x: layer(x).squeeze(1), params, (layer,))
        >>> found = gradients_of(objective, torch.ones(3, 2), forms=auto)
        >>> found.batch, found.form
        (3, 'traced')
    """
    require_one_process()
    check_parameters(objective.params)
    refuse_meta(objective.params, batch)
    if records.count(batch) == 0:
        return _no_gradients(objective.params)
    with name_bad_indices():
        batch = _structures.check(batch, objective.loss, objective.params)
        batch = records.lay_out(batch)
        # Everything that decides which operations run: a known key may replay its certificate.
        key = fingerprint(objective, forms, batch)
        known = _certificates.get(key)
        for certificate in reversed(known):  # the last may be of a form that takes every batch
            gradients = use_certificate(certificate, objective, batch, capacity=capacity)
            if gradients is not None:
                return gradients
        # None is known, or none of those known fits this batch.
        certificate, gradients = _begin(objective, forms, batch, capacity, changing=bool(known))
        if certificate.lasting:
            _certificates.add(key, certificate, objective)
        return gradients


def use_certificate(
    certificate: Certificate,
    objective: Objective,
    batch: Batch,
    *,
    capacity: int = 0,
    fresh: bool = False,
) -> AnyGradients | None:
    """Take gradients as certified, after the tests that are due.

    Args:
        certificate: of this objective and the shapes of this batch, from `certificate_for`.
        objective: what gradients are taken of.
        batch: its records, without constants.
        capacity: as for `per_sample`.
        fresh: whether the certificate was made for this batch, and needs no other test yet.

    Returns:
        The gradients, or None where the pass met a call that the certificate does not cover. The
        random state is then restored, so that another form draws the same numbers.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> loss, params = lambda x: layer(x).squeeze(1), dict(layer.named_parameters())
        >>> certificate = certificate_for(loss, params, torch.ones(3, 2))
        >>> objective = Objective(loss, params)
        >>> use_certificate(certificate, objective, torch.ones(3, 2), fresh=True).batch
        3
    """
    objective, before = _with_buffers_of(certificate, objective), torch.get_rng_state()
    gradients: AnyGradients | None = None
    try:
        # The slots are drawn before the tests, so that a run draws alike with and without them.
        slots = _slots_after_tests(certificate, objective, batch, capacity, fresh)
        rows, held = slots.fill(batch), references_of(objective.loss)
        # Twice at most: a program that fails its proof gives way to the form it was made from.
        while gradients is None:
            guide = Replaying(certificate.sites, slots.rows)
            try:
                with (
                    undo_on_failure(objective.modules if objective.free_buffers else ()),
                    objective.guard_pass(held),
                ):
                    with objective.rewind_buffers():
                        gradients = certificate.run(objective, rows, slots, guide)
                    objective.advance_buffers(batch)
            except LongerPeriod:
                raise
            except NotCovered as refusal:
                gradients = None
                _leave_compiled(certificate, refusal)
    except LongerPeriod as longer:  # records draw their places anew, modulo the longer one
        torch.set_rng_state(before)
        certificate.period = longer.period
        return use_certificate(certificate, objective, batch, capacity=capacity, fresh=fresh)
    except Unforeseen:
        torch.set_rng_state(before)
        return None
    gradients.form = certificate.form.name
    certificate.steps += not fresh
    return gradients


def _slots_after_tests(
    certificate: Certificate, objective: Objective, batch: Batch, capacity: int, fresh: bool
) -> Slots:
    """Draw where the records stand, and test the certificate again if it is time to.

    A new certificate is tested, too, where drawn places take more rows than it was made with.
    """
    step, slots = certificate.steps + 1, certificate.slots(records.count(batch))
    # At powers of two: often at first, and in a long run next to never.
    if not fresh and step & (step - 1) == 0:
        _refuse_other_processes(objective)
        _log.info("testing the certified model again, at use %d", step)
    if slots.rows > certificate.largest:
        extend(certificate, objective, batch, max(slots.rows, certificate.room(capacity)))
    elif not fresh:
        retest(certificate, objective, batch, slots.rows)
    return slots


def _leave_compiled(certificate: Certificate, refusal: NotCovered) -> None:
    """Go on without the program; what refuses any other form is raised."""
    if not certificate.form.compiles:
        raise refusal
    _log.warning("not %s from here on: %s", certificate.form, refusal)
    certificate.switch_to(traced)


def _with_buffers_of(certificate: Certificate, objective: Objective) -> Objective:
    free = certificate.free_buffers
    return objective if objective.free_buffers == free else replace(objective, free_buffers=free)


def _no_gradients(params: Params) -> Gradients:
    losses = torch.zeros(0, device=next(iter(params.values())).device)
    return Gradients({name: {} for name in params}, params, losses, in_turn(0))


def _as_tuple(form: Form | Sequence[Form]) -> tuple[Form, ...]:
    return (form,) if isinstance(form, Form) else tuple(form)


# --- the first batch ----------------------------------------------------------------------------


def certificate_for(
    loss: Loss,
    params: Params,
    batch: Batch,
    *,
    form: Form | Sequence[Form] = auto,
    modules: Sequence[nn.Module] = (),
    idle: Collection[str] = (),
) -> Certificate:
    """Certify a loss without using the certificate: what `per_sample` does on the first batch.

    Args:
        loss: maps a batch to one loss for each record.
        params: the private parameters by name, as `dict(model.named_parameters())`.
        batch: nested tensors whose first dimension counts the records.
        form: one form, or several of which the first that can be certified is used.
        modules: the modules that `loss` runs; their buffers are watched.
        idle: names of parameters that may be on no path to the loss.

    Returns:
        The certificate: its `form`, the call `sites`, the `evidence`, and `why_not` for each form
        that could not be certified.

    Raises:
        Refused: if no form can be certified.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> params = dict(layer.named_parameters())
        >>> certificate_for(lambda x: layer(x).squeeze(1), params, torch.randn(4, 2)).form
        traced
    """
    require_one_process()
    check_parameters(params)
    objective = Objective(loss, params, tuple(modules), frozenset(idle))
    refuse_meta(params, batch)
    with name_bad_indices():
        batch, _ = unwrap_constants(batch)
        return _certify(objective, _as_tuple(form), records.lay_out(batch))


def forget_structure(params: Params) -> None:
    """Let the next batch of these parameters' losses have another structure, as in a new run.

    Args:
        params: the private parameters by name, as they are passed to `per_sample`.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> forget_structure(dict(layer.named_parameters()))
    """
    _structures.forget(params)


_CHANGING = (
    "the sequence of operations on private parameters changes from batch to batch in a way that "
    "probes made from one batch do not show (a recurrence up to the longest sequence of the batch, "
    "an expert that is skipped without records?)"
)


def _begin(
    objective: Objective, forms: tuple[Form, ...], batch: Batch, capacity: int, *, changing: bool
) -> tuple[Certificate, AnyGradients]:
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
        certificate = _certify(objective, left, batch, capacity)
        if left is others:
            certificate.why_not = following | certificate.why_not
        gradients = use_certificate(certificate, objective, batch, capacity=capacity, fresh=True)
        if gradients is not None:
            _report(certificate, len(objective.params))
            return certificate, gradients
    raise Refused(f"{_CHANGING}; use form=loop")


def _report(certificate: Certificate, parameters: int) -> None:
    _log.info("certified the form %s for %d parameters", certificate.form, parameters)
    for name, reason in certificate.why_not.items():
        noticed = name == compiled.name or certificate.form.alone  # it was asked for, or it is slow
        _log.log(logging.WARNING if noticed else logging.INFO, "not %s: %s", name, reason)


def _certify(
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
