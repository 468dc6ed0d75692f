"""Each test starts as a process does that has fitted nothing."""

from __future__ import annotations

from collections import deque

import pytest

from hushgrad.glm import fits


@pytest.fixture(autouse=True)
def no_fits_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "_known", deque(maxlen=fits._FITS))
    monkeypatch.setattr(fits, "_copies", {})
