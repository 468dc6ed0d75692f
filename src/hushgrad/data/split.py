"""What a loader returns: the records to train on, those to test on, and how they were prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxtyping import Float32, Int64
from torch import Tensor

Images = tuple[Float32[Tensor, "record channel height width"], Int64[Tensor, " record"]]
"""Pixels from 0 to 1, and the class of each image."""

Records = TypeVar("Records")


@dataclass(frozen=True)
class Split(Generic[Records]):
    """A public data set in its standard split.

    `train` plays the private records, `test` the public ones. `source` is its public home.
    `preparation` is one sentence on what was done to a record: by public constants alone, so that
    no record depends on another. `classes` names the labels 0, 1, …; a data set without labels has
    none.
    """

    name: str
    source: str
    train: Records
    test: Records
    preparation: str
    classes: tuple[str, ...] = ()
    validation: Records | None = None
