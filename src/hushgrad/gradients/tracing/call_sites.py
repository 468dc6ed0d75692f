"""Call sites: what consumed a private parameter, and where the records were when it did.

A probe pass infers the sites of a model; every later pass replays the certified ones. A pass that
meets anything else stops before it can be used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hushgrad.gradients.tracing.layout import Layout, infer
from hushgrad.types import Shape


class Unforeseen(Exception):
    """The pass met a call that its certificate does not know."""


@dataclass(frozen=True)
class Place:
    """A tensor at a call site: where its records are, and its shape without them."""

    layout: Layout | None
    shape: Shape

    def fits(self, shape: Shape, batch: int) -> bool:
        if self.layout is None:
            return shape == self.shape
        return self.layout.fits(shape, batch) and self.layout.without(shape) == self.shape


@dataclass(frozen=True)
class Site:
    """One intercepted operation: the parameters it consumed and where its tensors' records are."""

    operation: str
    parameters: tuple[str, ...]
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]


@dataclass
class Probing:
    """A guide that infers places, from a probe size that divides no other dimension."""

    batch: int
    records_last: frozenset[int] = frozenset()
    sites: list[Site] = field(default_factory=list)

    def _place(self, shape: Shape) -> Place:
        # A site is known by its position in the pass: the same for all probe sizes.
        layout = infer(shape, self.batch, len(self.sites) not in self.records_last)
        return Place(layout, shape if layout is None else layout.without(shape))

    def inputs(
        self, operation: str, parameters: tuple[str, ...], shapes: list[Shape]
    ) -> tuple[Place, ...]:
        """The places of the tensors that go into the next call."""
        return tuple(self._place(shape) for shape in shapes)

    def outputs(
        self,
        operation: str,
        parameters: tuple[str, ...],
        inputs: tuple[Place, ...],
        shapes: list[Shape],
    ) -> tuple[Place, ...]:
        """The places of the tensors that come out of it; this ends the call."""
        places = tuple(self._place(shape) for shape in shapes)
        # Only whole calls are sites: one that was refused between input and output is none.
        self.sites.append(Site(operation, parameters, inputs, places))
        return places


@dataclass
class Replaying:
    """A guide that follows the certified sites and stops at the first call that differs."""

    certified: tuple[Site, ...]
    batch: int
    position: int = 0

    def _next_site(self, operation: str, parameters: tuple[str, ...]) -> Site:
        # Sites come in the order of the calls, so only the next one can fit.
        if self.position < len(self.certified):
            site = self.certified[self.position]
            if (site.operation, site.parameters) == (operation, parameters):
                return site
        raise Unforeseen(f"{operation} on {', '.join(parameters)}")

    def _check(self, places: tuple[Place, ...], shapes: list[Shape], operation: str) -> None:
        # Another shape may mean another layout, and nobody has seen where its records are.
        if len(places) != len(shapes) or not all(
            place.fits(shape, self.batch) for place, shape in zip(places, shapes, strict=True)
        ):
            raise Unforeseen(f"{operation} with tensors of other shapes")

    def inputs(
        self, operation: str, parameters: tuple[str, ...], shapes: list[Shape]
    ) -> tuple[Place, ...]:
        site = self._next_site(operation, parameters)
        self._check(site.inputs, shapes, operation)
        return site.inputs

    def outputs(
        self,
        operation: str,
        parameters: tuple[str, ...],
        inputs: tuple[Place, ...],
        shapes: list[Shape],
    ) -> tuple[Place, ...]:
        site = self._next_site(operation, parameters)
        self._check(site.outputs, shapes, operation)
        self.position += 1
        return site.outputs

    def finish(self) -> None:
        """Raise if the pass ended before the certified sequence did."""
        # A call that is left out would leave a use of the parameter out of its gradient.
        if self.position != len(self.certified):
            missing = self.certified[self.position]
            raise Unforeseen(f"no {missing.operation} on {', '.join(missing.parameters)}")


Guide = Probing | Replaying
"""Tells a pass where the records are, call by call."""
