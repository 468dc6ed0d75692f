"""Refusals of events that an accountant does not cover, each with a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol, runtime_checkable

from dp_accounting import DpEvent

from hushgrad.types import Refused, Relation

_NAMES = {
    "GaussianDpEvent": "Gaussian noise",
    "LaplaceDpEvent": "Laplace noise",
    "PureDpEvent": "a pure ε step",
    "PoissonSampledDpEvent": "Poisson sampling",
    "TruncatedSubsampledGaussianDpEvent": "truncated Poisson sampling",
    "SampledWithoutReplacementDpEvent": "sampling without replacement",
    "ShuffledDpEvent": "shuffled batches",
    "RandomizedResponseDpEvent": "randomised response",
    "RepeatAndSelectDpEvent": "repeat and select",
    "MixtureOfGaussiansDpEvent": "a mixture of Gaussians",
    "ZCDpEvent": "a zCDP step",
    "MixedDpEvent": "one of several events, drawn at random",
}
_FIXED_SIZE = ("SampledWithoutReplacementDpEvent", "ShuffledDpEvent")


@runtime_checkable
class Able(Protocol):
    """The part of an accountant that a remedy needs."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    def supports(self, event: DpEvent, relation: Relation) -> bool:
        """Tell whether the event is covered under this relation."""


def event_kind(event: DpEvent) -> str:
    """Name the kind of an event in words."""
    name = type(event).__name__
    inner = getattr(event, "event", None)
    words = _NAMES.get(name, name)
    return words if inner is None else f"{words} of {event_kind(inner)}"


def refuse(
    accountant: Able, event: DpEvent, relation: Relation, *, among: Sequence[Able]
) -> NoReturn:
    """Raise `Refused` for an event that this accountant does not cover under this relation."""
    raise Refused(
        f"expected an event that the {accountant.name} accountant covers under {relation.value}, "
        f"got {event_kind(event)}; {remedy(event, relation, among=among)}"
    )


def remedy(event: DpEvent, relation: Relation, *, among: Sequence[Able]) -> str:
    """Name the accountants that cover the event, under this relation or else under another."""
    here = [a.name for a in among if a.supports(event, relation)]
    if here:
        return f"use the {' or '.join(here)} accountant"
    others = [
        f"{a.name} under {other.value}"
        for other in Relation
        for a in among
        if a.supports(event, other)
    ]
    if type(event).__name__ in _FIXED_SIZE:
        others.append(f"Poisson sampling under {relation.value}")
    return f"use {', or '.join(others)}" if others else "use Gaussian noise and Poisson sampling"
