"""Others' errors in our words: their numbers may be a batch's size, or values of its records."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\b\d[\w.]*")


def without_numbers(error: Exception) -> str:
    """What an error says, in one line.

    >>> without_numbers(RuntimeError("mat1 and mat2 shapes cannot be multiplied (40x6 and 5x2)"))
    'RuntimeError: mat1 and mat2 shapes cannot be multiplied (… and …)'
    """
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {_NUMBER.sub('…', first)}"
