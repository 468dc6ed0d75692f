"""Faults of a batch or a model, named as what they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hushgrad.batches import records
from hushgrad.types import Batch, Params, Refused


@contextmanager
def name_bad_indices() -> Iterator[None]:
    """Say what an IndexError of the loss most likely is, without the record's value."""
    try:
        yield
    except IndexError as error:
        raise Refused(
            "the loss raised an IndexError: most likely a record's label or index is outside of "
            "the model's range; expected labels from 0 to the number of outputs less one, or the "
            "loss's ignore_index, and indices below the number of rows of their table; check the "
            "data's largest and least ones"
        ) from error


def refuse_meta(params: Params, batch: Batch) -> None:
    """Refuse tensors that have a shape and no values."""
    for name, p in params.items():
        if p.is_meta:
            raise Refused(
                f"the parameter {name} is on the meta device and has no values; load the model's "
                "weights (to_empty and load_state_dict, or from_pretrained without device_map)"
            )
    if any(x.is_meta for x in records.tensors(batch)):
        raise Refused(
            "expected a batch with values, got a tensor on the meta device; load the records on "
            f"{next(iter(params.values())).device}"
        )


def no_finite_record(together_finite: bool) -> Refused:
    """What it means that no record by itself has a finite loss and gradient."""
    if together_finite:
        return Refused(
            "the loss of a record depends on other records: among copies of itself it is not "
            "finite, beside other records it is, as where the batch is divided by its own "
            "deviation; compute each record's loss from that record alone"
        )
    return Refused(
        "none of the records that certification drew has a finite loss and gradient; clean the "
        "data, or lower the scale of the model's first outputs"
    )
