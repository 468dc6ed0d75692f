"""A user's own loader, with the user's statement of how it samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import dp_accounting as dp
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hushgrad.sampling.coupling import refuse_coupling
from hushgrad.sampling.fixed import Shuffled
from hushgrad.sampling.scheme import Sampling, Scheme, refuse_resizing
from hushgrad.sampling.sources import Records
from hushgrad.types import Batch, Refused, Relation

_TRIED = 16  # records of the user's loader on which its collate function is tested


@dataclass(frozen=True)
class Stated:
    """Batches from your own `loader`, accounted for as `scheme` on your word.

    Guarantees: none of its own; the guarantee of the run says "as stated by the user". A torch
    loader whose samplers contradict the statement is refused, such as shuffled batches stated as
    Poisson sampling, and so is a collate function that mixes records.

    Args:
        loader: an iterable of batches, which starts again each time it is iterated.
        scheme: the sampling scheme that describes what the loader does.

    Raises:
        Refused: if the loader contradicts the statement.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.zeros(6, 2))
        >>> stated = Stated(DataLoader(data, batch_size=2, shuffle=True), Shuffled(2))
        >>> stated.statement
        'shuffled epochs in batches of 2, no amplification, as stated by the user'
    """

    loader: Iterable[Batch]
    scheme: Scheme
    participation: ClassVar[None] = None

    def __post_init__(self) -> None:
        _require_no_contradiction(self.loader, self.scheme)

    @property
    def relations(self) -> frozenset[Relation]:
        """The relations between data sets under which the amplification holds."""
        return self.scheme.relations

    @property
    def statement(self) -> str:
        """The words by which a guarantee names the sampling, and who vouches for it."""
        return f"{self.scheme.statement}, as stated by the user"

    @property
    def sees_all(self) -> bool:
        """False: hushgrad does not draw these batches, so it cannot tell."""
        return False

    def expected_batch(self, num_records: int) -> float:
        """Return the public divisor of a step's sum, from the plan's public number of records."""
        return self.scheme.expected_batch(num_records)

    def resized(self, batch: int, *, num_records: int) -> Sampling:
        """Raise `Refused`: hushgrad cannot change the loader's batches."""
        raise refuse_resizing(self)

    def epoch(self, num_records: int) -> int | None:
        """Return the steps in which each record comes once, as stated."""
        return self.scheme.epoch(num_records)

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """Return the event of one step that runs `event` on one batch."""
        return self.scheme.amplify(event, num_records=num_records)

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """Return the event of the steps 0 up to `num_steps`, each with `event` on its batch."""
        return self.scheme.run_event(event, num_records=num_records, num_steps=num_steps)

    def batches(self, *, num_records: int, steps: range) -> Iterator[Batch]:
        """Yield one batch for each step, iterating over the loader as often as needed.

        With shuffled epochs each pass over the loader must be one epoch. Otherwise a record would
        be used more often than it is accounted for.
        """
        epoch = self.scheme.epoch(num_records)
        if epoch and steps.start % epoch:
            raise Refused(
                f"expected a first step that begins an epoch of {epoch} steps, got step "
                f"{steps.start}; with a loader of your own, stop and resume at the end of an epoch"
            )
        _refuse_coupling(self.loader)
        step, first = steps.start, steps.start
        while step < steps.stop:
            first = step
            for batch in self.loader:
                yield batch
                step += 1
                if step >= steps.stop or step - first == epoch:
                    break
            if step == first or (epoch and step < steps.stop and step - first < epoch):
                raise Refused(
                    f"expected {f'{epoch} batches' if epoch else 'a batch'} from each pass over "
                    f"the loader, got {step - first}; pass an iterable that starts again each time "
                    "and skips no batch"
                )


def _require_no_contradiction(loader: Iterable[Batch], scheme: Scheme) -> None:
    """Refuse a statement that the loader's torch samplers contradict, or that none can keep."""
    turns = scheme.participation
    if turns is not None and turns.cycle > 1:
        raise Refused(
            "expected a scheme that each pass over a loader can begin anew, got "
            f"{scheme.statement}, whose groups take turns from the run's first step to its last; "
            "pass the data set and the scheme, and hushgrad draws its batches"
        )
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return
    cut, order = loader.batch_sampler, loader.batch_sampler.sampler
    one_each = isinstance(order, SequentialSampler) or (
        isinstance(order, RandomSampler) and not order.replacement
    )
    if one_each and scheme != Shuffled(cut.batch_size):
        raise Refused(
            f"expected the statement Shuffled({cut.batch_size}) for a DataLoader that cuts each "
            f"epoch into batches of {cut.batch_size}, got {scheme}; state Shuffled, or let "
            "hushgrad sample: pass the data set and the scheme"
        )
    if isinstance(order, RandomSampler) and order.replacement:
        raise Refused(
            "expected a sampling that can be accounted for, got a DataLoader that draws with "
            "replacement; pass the data set and a scheme such as Poisson(rate)"
        )
    if one_each and cut.drop_last:
        raise Refused(
            "expected every batch of an epoch, got a DataLoader with drop_last=True, whose epochs "
            "are shorter than accounted; leave drop_last out"
        )


def _refuse_coupling(loader: Iterable[Batch]) -> None:
    """Test a torch loader's data set and collate function on a few records."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return
    if isinstance(loader.dataset, IterableDataset):
        return
    source = Records(loader.dataset)
    refuse_coupling(source, loader.collate_fn, list(range(min(len(source), _TRIED))))
