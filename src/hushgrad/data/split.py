"""What a loader returns: training records, test records, and how they were prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

SplitPart = TypeVar("SplitPart")


@dataclass(frozen=True)
class Split(Generic[SplitPart]):
    """A public data set in its standard split.

    Guarantees: each record was prepared on its own, with public constants only.

    Args:
        name: the data set's name.
        source: where it is published.
        train: the training records, which experiments treat as private.
        test: the test records, which are public.
        preparation: what was done to a record, in words.
        classes: the names of the labels 0, 1, …, if there are labels.
        validation: public validation records, if the standard split has them.

    Example:
        >>> from hushgrad.data import digits
        >>> split = digits()
        >>> split.name, split.classes[:3]
        ('digits', ('0', '1', '2'))
    """

    name: str
    source: str
    train: SplitPart
    test: SplitPart
    preparation: str
    classes: tuple[str, ...] = ()
    validation: SplitPart | None = None
