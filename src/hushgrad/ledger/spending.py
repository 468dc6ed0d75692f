"""What is charged to a budget, and the JSON form of events."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any

import attr
from dp_accounting import DpEvent, dp_event

from hushgrad import events
from hushgrad.types import Refused, Relation

# Only these classes are read back: a file must not be able to choose which code runs.
_KINDS: dict[str, type[DpEvent]] = {
    name: kind
    for module in (dp_event, events)
    for name, kind in vars(module).items()
    if inspect.isclass(kind) and issubclass(kind, DpEvent) and attr.has(kind)
}


@dataclass(frozen=True)
class Spend:
    """A cost: an event, and its ε at δ by the accountant that was chosen for it.

    Args:
        event: what is released.
        relation: what makes two data sets neighbours.
        epsilon: ε; infinite for a run without noise, which only a budget without limit accepts.
        delta: δ.

    Raises:
        ValueError: if ε or δ is out of range.

    Example:
        >>> from hushgrad.accounting import PLD, gaussian
        >>> noise = gaussian(4.0)
        >>> cost = Spend(noise, Relation.ADD_REMOVE, PLD.epsilon(noise, delta=1e-5), 1e-5)
        >>> f"{cost.epsilon:.2f}"
        '0.93'
    """

    event: DpEvent
    relation: Relation
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (self.epsilon >= 0 and 0 <= self.delta <= 1):
            raise ValueError(
                f"expected epsilon >= 0 and 0 <= delta <= 1, got {self.epsilon} and {self.delta}; "
                "pass what an accountant says"
            )


def event_to_json(event: DpEvent) -> str:
    """Return an event as JSON, from which `event_from_json` makes an equal event.

    >>> from hushgrad.accounting import gaussian, poisson
    >>> event_to_json(poisson(0.5, gaussian(2.0)))
    '["PoissonSampledDpEvent", {"event": ["GaussianDpEvent", {"noise_multiplier": 2.0}], \
"sampling_probability": 0.5}]'
    """
    return json.dumps(_plain(event), sort_keys=True)


def event_from_json(text: str) -> DpEvent:
    """Return the event that `event_to_json` wrote."""
    return _event(json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, DpEvent):
        name = type(value).__name__
        if _KINDS.get(name) is not type(value):
            raise Refused(
                f"expected an event of dp_accounting or hushgrad.events, got {name}; use one of "
                "those, because a ledger must be able to read it again"
            )
        fields = attr.asdict(value, recurse=False)
        return [name, {field: _plain(content) for field, content in fields.items()}]
    if isinstance(value, list | tuple):
        return ["", [_plain(content) for content in value]]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # a number of numpy
        return value.item()
    raise Refused(
        f"expected an event made of numbers and events, got a {type(value).__name__} in it; "
        "use an event whose fields are numbers and events"
    )


def _event(found: Any) -> Any:
    if not isinstance(found, list):
        return found
    name, content = found
    if name == "":
        return [_event(value) for value in content]
    if name not in _KINDS:
        raise Refused(
            f"expected an event that this version knows, got {name} from the ledger; use the "
            "version of hushgrad that wrote it"
        )
    return _KINDS[name](**{field: _event(value) for field, value in content.items()})
