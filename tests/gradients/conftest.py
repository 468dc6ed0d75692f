"""What the tests of gradients share; modules beside it are found from the folders below."""

from __future__ import annotations

from typing import Any

import pytest

from hushgrad.gradients import taking


@pytest.fixture
def certifications(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every certification."""
    seen: list[Any] = []
    plain = taking.certify

    def counted(*args: Any) -> Any:
        seen.append(args)
        return plain(*args)

    monkeypatch.setattr(taking, "certify", counted)
    return seen
