"""The papers' tables and figures, run anew, each with a table beside the paper's."""

from __future__ import annotations

from collections.abc import Callable

from hushgrad_reproductions import (
    glm_dimension,
    glm_lower_bound,
    lazy_region,
    srm_mnist,
    srm_table2,
)
from hushgrad_reproductions.study import StudySettings

Reproduction = Callable[[StudySettings], None]

REPRODUCTIONS: dict[str, Reproduction] = {
    "glm-dimension": glm_dimension.glm_dimension,
    "glm-lower-bound": glm_lower_bound.glm_lower_bound,
    "lazy-region": lazy_region.lazy_regions,
    "srm-mnist": srm_mnist.srm_mnist,
    "srm-table2": srm_table2.srm_table2,
}
"""By the names that `hushgrad reproduce` knows."""

__all__ = ["REPRODUCTIONS", "Reproduction", "StudySettings"]
