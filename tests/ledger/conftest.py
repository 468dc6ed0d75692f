"""What the tests of the ledger share."""

from __future__ import annotations

from pathlib import Path

import pytest

from hushgrad.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")
