"""What a loader returns: the records to train on, those to test on, and how they were prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

SplitPart = TypeVar("SplitPart")


@dataclass(frozen=True)
class Split(Generic[SplitPart]):
    """A public data set in its standard split.

    `train` plays the private records; `test` and `validation`, where there is one, are public.
    `source` is its public home. `preparation` says what was done to a record, by public constants
    alone: no record depends on another. `classes` names the labels 0, 1, …, if there are labels.
    """

    name: str
    source: str
    train: SplitPart
    test: SplitPart
    preparation: str
    classes: tuple[str, ...] = ()
    validation: SplitPart | None = None
