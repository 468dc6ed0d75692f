"""The papers' tables and figures, run anew, each with a table beside the paper's."""

from __future__ import annotations

from collections.abc import Callable

from hushgrad.reproductions.glm_dimension import glm_dimension
from hushgrad.reproductions.glm_lower_bound import glm_lower_bound
from hushgrad.reproductions.lazy_region import lazy_regions
from hushgrad.reproductions.srm_table2 import srm_table2
from hushgrad.reproductions.study import Settings

Reproduction = Callable[[Settings], None]

REPRODUCTIONS: dict[str, Reproduction] = {
    "glm-dimension": glm_dimension,
    "glm-lower-bound": glm_lower_bound,
    "lazy-region": lazy_regions,
    "srm-table2": srm_table2,
}
"""By the names that `hushgrad reproduce` knows."""

__all__ = ["REPRODUCTIONS", "Reproduction", "Settings"]
