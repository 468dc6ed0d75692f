"""Per-sample gradients, certified for the model before they are used."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import nn

from hushgrad.persample import records
from hushgrad.persample.cache import Cache, fingerprint
from hushgrad.persample.certify import Certificate, certify
from hushgrad.persample.constants import constant, opened
from hushgrad.persample.faults import bad_indices_named, refuse_meta
from hushgrad.persample.forms import Form, auto, compiled, dense, loop, recomputed, traced
from hushgrad.persample.gradients import Gradients, difference
from hushgrad.persample.retests import extend, retest
from hushgrad.persample.sites import Unforeseen
from hushgrad.persample.structure import Structures
from hushgrad.persample.subject import Subject, held_by
from hushgrad.persample.watch import check_optimizer, check_parameters, guarded, undone_if_it_fails
from hushgrad.types import Batch, Foreseen, Loss, NotCovered, Params, Refused

__all__ = [
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
    foreseen: Foreseen | None = None,
) -> Gradients:
    """Per-sample gradients of `loss` with respect to `params`, one for each record of `batch`.

    `loss(batch)` returns one value for each record; it may be called several times. `modules` are
    those whose buffers are watched. `idle` names parameters that may be on no path to the loss.
    `foreseen` are weights by which the form `recomputed` may sum at once.

    Guarantees: the form was certified for this loss, these parameters and shapes; a record's
    gradient depends on no other record, to the extent that probes can tell; the norms are upper
    bounds. Raises `Refused` otherwise. The result's `form` says which of several was taken. An
    empty batch gives an empty result without calling `loss`.
    """
    check_parameters(params)
    size = records.count(batch)
    refuse_meta(params, batch)
    if size == 0:
        device = next(iter(params.values())).device
        return Gradients({name: {} for name in params}, params, torch.zeros(0, device=device), 0)
    batch = records.laid_out(_structures.opened(batch, loss, params))
    subject = Subject(loss, params, tuple(modules), frozenset(idle), foreseen=foreseen)
    forms = (form,) if isinstance(form, Form) else tuple(form)
    key = fingerprint(subject, forms, batch)
    for certificate in _certificates.get(key):
        gradients = _step(certificate, subject, batch, size)
        if gradients is not None:
            return gradients
    certificate = certify(subject, forms, batch, size)
    if certificate.lasting:
        _certificates.add(key, certificate, subject)
    _log.info("certified the form %s for %d parameters", certificate.form, len(params))
    for name, reason in certificate.why_not.items():
        noticed = name == compiled.name or certificate.form.alone  # it was asked for, or it is slow
        _log.log(logging.WARNING if noticed else logging.INFO, "not %s: %s", name, reason)
    gradients = _run(certificate, subject, batch)
    if gradients is None:
        raise Refused(
            "the sequence of operations on private parameters changes from batch to batch in a way "
            "that probes made from the batch do not show; use form=loop"
        )
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
    check_parameters(params)
    subject = Subject(loss, params, tuple(modules), frozenset(idle))
    forms = (form,) if isinstance(form, Form) else tuple(form)
    refuse_meta(params, batch)
    batch, _ = opened(batch)
    return certify(subject, forms, records.laid_out(batch), records.count(batch))


def forget_structure(params: Params) -> None:
    """Let the next batch of these parameters' losses have another structure, as in a new run."""
    _structures.forget(params)


def _step(certificate: Certificate, subject: Subject, batch: Batch, size: int) -> Gradients | None:
    """Use a certificate again, testing anew at other sizes and as steps go by."""
    subject = _as_certified(subject, certificate)
    try:
        if certificate.padded(size) > certificate.largest:
            extend(certificate, subject, batch, size)
        else:
            retest(certificate, subject, batch, size)
    except Unforeseen:
        return None
    gradients = _run(certificate, subject, batch)
    if gradients is not None:
        certificate.steps += 1
    return gradients


def _run(certificate: Certificate, subject: Subject, batch: Batch) -> Gradients | None:
    """Run as certified; a program that fails its proof gives way to what it was made from."""
    try:
        return run_certified(certificate, subject, batch)
    except NotCovered as refusal:
        if not certificate.form.compiles:
            raise
        _log.warning("not %s from here on: %s", certificate.form, refusal)
        certificate.take(traced)
        return run_certified(certificate, subject, batch)


def _as_certified(subject: Subject, certificate: Certificate) -> Subject:
    free = certificate.free_buffers
    return subject if subject.free_buffers == free else replace(subject, free_buffers=free)


def run_certified(certificate: Certificate, subject: Subject, batch: Batch) -> Gradients | None:
    """One watched pass, or None if it met a call that the certificate does not know."""
    subject = _as_certified(subject, certificate)
    size = records.count(batch)
    padded = certificate.padded(size)
    whole = records.pad(batch, size, padded)
    try:
        with (
            undone_if_it_fails(subject.modules if subject.free_buffers else ()),
            guarded(subject.params, subject.modules, subject.free_buffers, held_by(subject.loss)),
        ):
            with subject.rewound():
                gradients = certificate.run(subject, whole, size, padded, certificate.sites)
            subject.advance(batch)
            gradients.form = certificate.form.name
            return gradients
    except Unforeseen:
        return None
