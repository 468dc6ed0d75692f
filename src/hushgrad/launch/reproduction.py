"""A reproduction: a function that computes a result of a paper again, and leaves it in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StudySettings:
    """What a reproduction is run with.

    Args:
        out: the folder for its tables and figures, which is there.
        data: the folder of the data sets; what HUSHGRAD_DATA names if None.
        seeds: how often each setting is run, with the seeds 0, 1, 2, …
        progress: told in a line what is being computed.
    """

    out: Path
    data: Path | None = None
    seeds: int = 10
    progress: Callable[[str], None] = lambda line: None


Reproduction = Callable[[StudySettings], None]
"""What `hushgrad reproduce` runs."""
