"""The frugal form: two backward passes, one for the norms and one for the sum.

Each pass has one parameter's factors at a time and lets go of them, so that a step needs little
more memory than an ordinary one. The model runs forward once; between the passes its activations
are kept, and the norms.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from hushgrad.numerics import Square, exact_products, wide
from hushgrad.persample import records
from hushgrad.persample.factors import Use
from hushgrad.persample.gradients import Factors, Gradients, Key, all_finite, with_padding
from hushgrad.persample.rules import RULES
from hushgrad.persample.settled import Known, settle
from hushgrad.persample.sites import Replaying
from hushgrad.persample.subject import Subject
from hushgrad.persample.tape import HandOver, Tape
from hushgrad.persample.traced import checked_losses
from hushgrad.persample.watch import guarded, refuse_kept, refuse_strangers
from hushgrad.types import Batch, Refused


class Recomputed(Gradients):
    """Per-sample gradients of which only the norms are held; they can be summed once.

    Guarantees: as `Gradients`; the sum is taken from the factors that the norms were taken from.
    """

    def __init__(
        self, subject: Subject, batch: Batch, size: int, padded: int, guide: Replaying
    ) -> None:
        self._subject, self._params = subject, subject.params
        self._padded, self._guide, self._scale = padded, guide, 1.0
        self._tape = tape = Tape(subject.params, padded, guide, RULES)
        with torch.enable_grad(), tape.watching():
            losses = checked_losses(subject.loss(batch), padded)
            known = (tape.token, *records.tensors(batch))
            self._others = refuse_strangers(losses, subject.params, known)
        self._graph: Tensor | None = losses
        self._losses = losses.detach()[:size]
        self._position = guide.position
        self._all: dict[str, Square] = {}
        self._known: dict[str, Known] = {}
        self._pass_back(self._measure, again=True)

    def _measure(self, name: str, uses: dict[Key, Use]) -> None:
        gradient = settle(tuple(uses.values()), tuple(self._params[name].shape))
        self._all[name], self._known[name] = gradient.square, gradient.measured

    def _pass_back(self, hand_over: HandOver, *, again: bool) -> None:
        tape, guide, graph = self._tape, self._guide, self._graph
        if graph is None:
            raise Refused(
                "gradients of the form recomputed are summed once, since their graph is gone after "
                "it; take them again, or use form=traced"
            )
        guide.position = self._position
        with torch.enable_grad(), tape.watching(), tape.handing_over(hand_over):
            if graph.requires_grad:
                graph.backward(torch.ones_like(graph), retain_graph=again)
            guide.finish()
            late = tape.finish(again=again)
        with torch.no_grad(), exact_products(graph.device):
            for name, uses in late.items():
                if uses:
                    hand_over(name, dict(uses))

    @property
    def squares(self) -> dict[str, Square]:
        """Squared norms as estimate and slack."""
        none = torch.zeros(self._padded, dtype=torch.float64, device=self._losses.device)
        every = dict.fromkeys(self._params, Square(none, none)) | self._all
        scale = self._scale**2
        return {
            name: Square(*(scale * part for part in square.first(self.batch)))
            for name, square in every.items()
        }

    def weighted_sum(self, weights: Mapping[str, Float[Tensor, " batch"]]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        padded = {id(w): with_padding(w, self._padded) for w in weights.values()}
        finite = all_finite(self._all.values())

        def add(name: str, uses: dict[Key, Use]) -> None:
            shape = tuple(self._params[name].shape)
            gradient = settle(tuple(uses.values()), shape, known=self._known[name])
            own = padded[id(weights[name])]
            total = gradient.weighted_sum(own, None if finite else own != 0)
            sums[name] = total * self._scale if self._scale != 1 else total

        subject = self._subject
        with guarded(subject.params, subject.modules, subject.free_buffers):
            self._pass_back(add, again=False)
        self._graph = None
        refuse_kept(self._others)
        return {
            name: sums[name] if name in sums else wide(torch.zeros_like(p))
            for name, p in self._params.items()
        }

    def __rmul__(self, factor: float) -> Recomputed:
        scaled = copy.copy(self)
        scaled._scale, scaled._losses = factor * self._scale, factor * self._losses
        return scaled

    @property
    def factors(self) -> Factors:  # type: ignore[override]
        raise Refused(
            "gradients of the form recomputed hold no factors, so they cannot be added or "
            "subtracted; use form=traced"
        )
