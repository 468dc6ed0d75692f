"""The protocol of docs/ledger.md as a state machine: what a ledger claims is never below the truth.

Any number of processes begin, resume, go on, save, end and are killed between any two writes, on
edited data, with lost keys, older checkpoints, copied folders and losses of power, in any order. A
model keeps every release that was really made. What those cost together, at one order of Rényi DP,
must never be more than what the ledger of the run has charged for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from protocol_machine import Protocol, every_write_can_be_the_last


@pytest.fixture(autouse=True, scope="module")
def killable() -> Iterator[None]:
    with every_write_can_be_the_last():
        yield


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)


@pytest.mark.slow
class TestProtocolLonger(Protocol.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
