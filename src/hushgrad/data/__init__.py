"""Public data sets, read from the files in which they are published.

A loader takes the folder of the data sets, or reads its name from the environment variable
`HUSHGRAD_DATA`. It verifies each file's SHA-256 before parsing it, and prepares records with public
constants only, so that preparation costs no privacy.

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
"""The loaders, by the name of the data set; each takes the folder of the data sets, or None."""

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
