"""Which is cheaper for a parameter: its gradient held as factors, or written out?"""

from __future__ import annotations

import math

from hushgrad.gradients.factors.gram import Rough, width_of
from hushgrad.gradients.factors.held import Gradient, Gram, Known, Materialised, Measured, Stacked
from hushgrad.gradients.factors.kinds import Dense, Factor, Outer, Rows, Use, merge
from hushgrad.types import Shape

Cost = tuple[float, float]
"""Floating-point operations (memory traffic converted), and bytes held."""

# What moving one byte costs, in floating-point operations of a matrix product, on a processor.
_FLOPS_PER_BYTE = 8
# Bytes; a record's gradient that would need more stays factored. One record's, not the batch's: the
# choice moves every norm by its slack, so it must not depend on how many records there are.
_LARGEST_MATERIALISED = 2**22


def settle(
    uses: tuple[Use, ...], shape: Shape, rough: Rough | None = None, known: Known = None
) -> Gradient:
    """Choose how to hold the sum of one parameter's uses: Gram or materialised, by cost.

    `rough` are its norms where they were computed already, and `known` what was `measured` when
    the same uses were settled before.
    """
    blocks = _blocks(uses)
    if blocks:
        before = known if isinstance(known, dict) else {}
        held = {
            rows.start: settle(block, _some(rows, shape), known=before.get(rows.start))
            for rows, block in blocks.items()
        }
        return Stacked(held, shape)
    factored = _join(uses)
    if _cheaper(factored, shape) == "Gram":
        products = tuple(f for f in factored if not isinstance(f, Dense))
        return Gram(products, shape, rough, known if isinstance(known, Measured) else None)
    return Materialised(factored, shape, rough)


def cost_of(uses: tuple[Use, ...], shape: Shape) -> Cost:
    """What it costs as `settle` holds it."""
    blocks = _blocks(uses)
    if blocks:
        parts = [cost_of(block, _some(rows, shape)) for rows, block in blocks.items()]
        return sum(flops for flops, _ in parts), sum(size for _, size in parts)
    factored = _join(uses)
    return costs(factored, shape)[_cheaper(factored, shape)]


def _join(uses: tuple[Use, ...]) -> tuple[Factor, ...]:
    if len(uses) == 1 and not isinstance(uses[0], Rows):
        return (uses[0],)
    return tuple(merge(tuple(use.whole() if isinstance(use, Rows) else use for use in uses)))


def _cheaper(factors: tuple[Factor, ...], shape: Shape) -> str:
    if any(isinstance(factor, Dense) for factor in factors):
        return "materialised"
    if len(factors) == 1 and isinstance(factors[0], Outer) and factors[0].positions == 1:
        return "Gram"  # the product of two norms, always the cheaper one
    cost = costs(factors, shape)
    return "Gram" if cost["Gram"][0] <= cost["materialised"][0] else "materialised"


def _some(rows: range, shape: Shape) -> Shape:
    return (len(rows), *shape[1:])


def _blocks(uses: tuple[Use, ...]) -> dict[range, tuple[Factor, ...]]:
    """The factors by the rows that they are about, if those are alike or disjoint; else nothing."""
    blocks: dict[range, tuple[Factor, ...]] = {}
    for use in uses:
        if not isinstance(use, Rows):
            return {}
        blocks[use.rows] = (*blocks.get(use.rows, ()), use.inner)
    edges = [edge for rows in sorted(blocks, key=_ends) for edge in _ends(rows)]
    return blocks if edges == sorted(edges) else {}


def _ends(rows: range) -> tuple[int, int]:
    return rows.start, rows.stop


def costs(factors: tuple[Factor, ...], shape: Shape) -> dict[str, Cost]:
    """What each form would cost."""
    batch, size = factors[0].batch, math.prod(shape)
    held = flops_gram = flops_write = 0.0
    for factor in factors:
        if isinstance(factor, Dense):
            flops_write += factor.values.numel()
            continue
        t, width = factor.positions, width_of(factor) + factor.b.shape[-1]
        work = 2.0 * t * (size if isinstance(factor, Outer) else factor.b.shape[-1])
        flops_gram += (2.0 * t * t * width if t > 1 else 2.0 * width) + work
        flops_write += 1.5 * work  # many small products are slower than one large one
        held += batch * t * width * factor.b.element_size()
    written = float(batch * size * 4)
    traffic = 3 * written / batch * _FLOPS_PER_BYTE  # write, read for the norm, read for the sum
    too_large = math.inf if size * 4 > _LARGEST_MATERIALISED else 0.0
    return {
        "Gram": (batch * flops_gram, held),
        "materialised": (batch * (flops_write + traffic) + too_large, written),
    }
