"""A user's own loader, with the user's word for what it samples."""

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

_TRIED = 16  # records of a loader of the user's own, whose collate function is tried


@dataclass(frozen=True)
class Stated:
    """Batches from `loader`, accounted as `scheme` because the user says so.

    Guarantees: none of its own; the statement carries "as stated by the user". A torch loader
    that plainly samples otherwise, such as shuffled batches stated as Poisson, is refused, and one
    whose collate function lets records meet.
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
        """As stated; nothing rests on it, since hushgrad does not draw these batches."""
        return False

    def expected_batch(self, num_records: int) -> float:
        """The public divisor of a step's sum, from the plan's public record count."""
        return self.scheme.expected_batch(num_records)

    def resized(self, batch: int, *, num_records: int) -> Sampling:
        """Refused: the loader's batches are what they are."""
        raise refuse_resizing(self)

    def epoch(self, num_records: int) -> int | None:
        """So many steps deal every record out once, as stated."""
        return self.scheme.epoch(num_records)

    def amplify(self, event: dp.DpEvent, *, num_records: int) -> dp.DpEvent:
        """The event of one step that runs `event` on one batch."""
        return self.scheme.amplify(event, num_records=num_records)

    def run_event(self, event: dp.DpEvent, *, num_records: int, num_steps: int) -> dp.DpEvent:
        """The event of the steps 0 up to `num_steps`, each running `event` on its batch."""
        return self.scheme.run_event(event, num_records=num_records, num_steps=num_steps)

    def batches(self, *, num_records: int, steps: range) -> Iterator[Batch]:
        """One batch for each step, going through the loader as often as it takes.

        With shuffled epochs each pass must be one epoch, or a record would come more often than
        it is accounted for.
        """
        epoch = self.scheme.epoch(num_records)
        if epoch and steps.start % epoch:
            raise Refused(
                f"expected a first step that begins an epoch of {epoch} steps, got "
                f"{steps.start}; resume a loader of your own at the end of an epoch"
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
                    f"the loader, got {step - first}; pass an iterable that starts anew each time "
                    "and leaves out no batch"
                )


def _require_no_contradiction(loader: Iterable[Batch], scheme: Scheme) -> None:
    """Refuse a statement that torch's own samplers contradict."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return
    cut, order = loader.batch_sampler, loader.batch_sampler.sampler
    one_each = isinstance(order, SequentialSampler) or (
        isinstance(order, RandomSampler) and not order.replacement
    )
    if one_each and scheme != Shuffled(cut.batch_size):
        raise Refused(
            f"expected the statement Shuffled({cut.batch_size}) for a DataLoader that cuts each "
            f"epoch into batches of {cut.batch_size}, got {scheme}; state that, or let "
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
    """Try a torch loader's data set and collate function on a few records."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return
    if isinstance(loader.dataset, IterableDataset):
        return
    source = Records(loader.dataset)
    refuse_coupling(source, loader.collate_fn, list(range(min(len(source), _TRIED))))
