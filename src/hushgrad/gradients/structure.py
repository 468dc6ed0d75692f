"""What of a batch is in no tensor must be the same in every batch that a loss gets."""

from __future__ import annotations

from collections.abc import Hashable
from types import CodeType

from torch.utils.weak import WeakIdKeyDictionary

from hushgrad.gradients.constants import BatchStructure, unwrap_constants
from hushgrad.gradients.objective import references_of
from hushgrad.types import Batch, Loss, Params, Refused


class Structures:
    """The form of the first batch, for each loss of some parameters."""

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def check(self, batch: Batch, loss: Loss, params: Params) -> Batch:
        """The batch as the loss gets it; refused if it has another form than those before."""
        batch, form = unwrap_constants(batch)
        # By the first parameter, weakly: what is known of a model goes with it.
        known: dict[Hashable, BatchStructure] = self._known.setdefault(
            next(iter(params.values())), {}
        )
        first = known.setdefault(_code_of(loss), form)
        if form != first:
            raise Refused(
                "expected a batch of the same structure and with the same constants as the batches "
                "before, got another, and one record could have made the difference; build every "
                "batch alike (the same keys, None at the same places), and declare constant only "
                "what is the same for every batch"
            )
        return batch

    def forget(self, params: Params) -> None:
        """Expect batches of any form, as at the start of another run."""
        for p in params.values():
            self._known.pop(p, None)


def _code_of(loss: Loss) -> Hashable:
    """Which function it is, whatever values it closes over."""
    return (type(loss), *(x for x in references_of(loss) if isinstance(x, CodeType | type)))
