"""Public data sets, read from the files in which they are published.

A loader takes the folder of the data sets, or reads it from `HUSHGRAD_DATA`. It verifies each
file before it parses it, and prepares records by public constants alone.
"""

from collections.abc import Callable
from typing import Any

from hushgrad.data.images import fashion_mnist, mnist
from hushgrad.data.split import Images, Split

DATASETS: dict[str, Callable[..., Split[Any]]] = {
    "fashion-mnist": fashion_mnist,
    "mnist": mnist,
}
"""The loaders by the names that the command line has for them."""

__all__ = ["DATASETS", "Images", "Split", "fashion_mnist", "mnist"]
