"""What is charged to a budget, and how an event is written down and read again."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any

import attr
from dp_accounting import DpEvent, dp_event

from hushgrad import events
from hushgrad.types import Refused, Relation

# Only these are read back: a file must not choose which code is run.
_KINDS: dict[str, type[DpEvent]] = {
    name: kind
    for module in (dp_event, events)
    for name, kind in vars(module).items()
    if inspect.isclass(kind) and issubclass(kind, DpEvent) and attr.has(kind)
}


@dataclass(frozen=True)
class Spend:
    """What something costs: the event, and its ε at δ by the accountant that was chosen for it.

    `relation` says what makes two data sets neighbours. An infinite ε, of a run without noise, is
    kept by a budget without a limit only.
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
    """Write an event as JSON, so that `read` gives an equal one.

    >>> from hushgrad.accounting import gaussian, poisson
    >>> written(poisson(0.5, gaussian(2.0)))
    '["PoissonSampledDpEvent", {"event": ["GaussianDpEvent", {"noise_multiplier": 2.0}], \
"sampling_probability": 0.5}]'
    """
    return json.dumps(_plain(event), sort_keys=True)


def event_from_json(text: str) -> DpEvent:
    """Read an event that `written` wrote."""
    return _event(json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, DpEvent):
        name = type(value).__name__
        if _KINDS.get(name) is not type(value):
            raise Refused(
                f"expected an event of dp_accounting or hushgrad.events, got {name}; describe "
                "what was done by one of those, for a ledger must be able to read it again"
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
        "describe what was done by an event that can be written down"
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
