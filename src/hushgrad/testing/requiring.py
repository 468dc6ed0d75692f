"""How a contract suite says what is wrong."""

from __future__ import annotations


def require(holds: bool, expected: str, came: object, fix: str) -> None:
    """Raise `AssertionError` with what was expected, what came and how to mend it."""
    if not holds:
        raise AssertionError(f"expected {expected}, got {came}; {fix}")
