"""Public data sets, read from the files in which they are published.

A loader takes the folder of the data sets, or finds it in the environment as `HUSHGRAD_DATA`. It
verifies each file before it parses it, and prepares records by public constants alone.

>>> split = digits()
>>> split.train[0].shape, split.preparation
(torch.Size([1437, 1, 8, 8]), 'pixels ÷ 16')
"""

from collections.abc import Callable
from typing import Any

from hushgrad.data.cifar import cifar10
from hushgrad.data.embedded import digits
from hushgrad.data.idx import fashion_mnist, mnist
from hushgrad.data.images import Images
from hushgrad.data.split import Split
from hushgrad.data.tables import LabelledTable, a9a, ijcnn1
from hushgrad.data.text import Pairs, Sentences, e2e, sst2

CLASSIFIED: dict[str, Callable[..., Split[Any]]] = {
    "a9a": a9a,
    "cifar10": cifar10,
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "ijcnn1": ijcnn1,
    "mnist": mnist,
}
"""The data sets of numbers with a class for each record: those that `hushgrad train NAME` knows."""

DATASETS: dict[str, Callable[..., Split[Any]]] = CLASSIFIED | {"e2e": e2e, "sst2": sst2}
"""The loaders by the names of their folders; each takes the folder of the data sets, or None."""

__all__ = [
    "CLASSIFIED",
    "DATASETS",
    "Images",
    "LabelledTable",
    "Pairs",
    "Sentences",
    "Split",
    "a9a",
    "cifar10",
    "digits",
    "e2e",
    "fashion_mnist",
    "ijcnn1",
    "mnist",
    "sst2",
]
