"""Sequences of crashes, edits and copies that an attacker would try: each is charged or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from protocol_machine import AT_ORDER, STEPS, Protocol, every_write_can_be_the_last

from hushgrad.ledger import Filter, total
from hushgrad.run.resuming import CHECKPOINT


@pytest.fixture(autouse=True, scope="module")
def killable() -> Iterator[None]:
    with every_write_can_be_the_last():
        yield


USUAL = {"which": 0, "edited": 0, "arithmetic": 0, "lost": False, "older": None, "fuse": None}


def begun(rule: Filter, steps: int, *, own: bool = False) -> Protocol:
    machine = Protocol()
    machine.begin(rule=rule)
    machine.start(own=own, steps=steps, fuse=None)
    return machine


def resumed(machine: Protocol, steps: int = STEPS, **changes: Any) -> None:
    machine.resume(**(USUAL | {"steps": steps} | changes))  # type: ignore[arg-type]


def lost_keys(machine: Protocol) -> None:
    for _ in range(3):
        resumed(machine, lost=True)


def edited_data(machine: Protocol) -> None:
    for edited in (1, 0, 1):
        resumed(machine, edited=edited)


def other_arithmetic(machine: Protocol) -> None:
    for arithmetic in (1, 0, 1):
        resumed(machine, arithmetic=arithmetic)
    resumed(machine, edited=1)
    resumed(machine, edited=1, arithmetic=1)


def older_checkpoints(machine: Protocol) -> None:
    machine.save(which=0, fuse=None)
    resumed(machine, lost=True)
    resumed(machine, older=1)
    resumed(machine, older=2, arithmetic=1)


def one_that_reads_and_one_that_ends(machine: Protocol) -> None:
    for edited in (1, 0):
        machine.resume_twice_at_once(which=0, edited=edited, steps=STEPS, end=True)
        assert (machine.folders[0].path / CHECKPOINT).exists()


def one_that_reads_and_one_that_goes_on(machine: Protocol) -> None:
    machine.resume_twice_at_once(which=0, edited=1, steps=STEPS, end=False)
    machine.end(which=-1, fuse=None)


def copies(machine: Protocol) -> None:
    machine.copy(which=0)
    for which in (0, 1, 0, 1):
        resumed(machine, which=which, arithmetic=which)


def copies_made_before_the_first_step(machine: Protocol) -> None:
    machine.start(own=machine.folders[0].own, steps=0, fuse=None)
    machine.copy(which=1)
    for which in (1, 2):
        resumed(machine, which=which, arithmetic=which)


def copies_of_a_run_that_ends(machine: Protocol) -> None:
    machine.copy(which=0)
    machine.end(which=0, fuse=None)
    for changes in ({"arithmetic": 1}, {"edited": 1}, {"lost": True}):
        resumed(machine, which=1, **changes)


def losses_of_power(machine: Protocol) -> None:
    for arithmetic in (1, 0):
        machine.lose_power(lost=6)
        resumed(machine, arithmetic=arithmetic)


def an_early_end(machine: Protocol) -> None:
    resumed(machine, steps=1, lost=True)
    machine.end(which=1, fuse=None)


def an_early_end_after_a_replay(machine: Protocol) -> None:
    """The process that ends it has taken one step, and the one before it four."""
    resumed(machine, steps=1)
    machine.end(which=1, fuse=None)


def kills(machine: Protocol) -> None:
    for fuse in range(12):
        resumed(machine, lost=fuse % 3 == 0, arithmetic=fuse % 2, fuse=fuse)


@pytest.mark.parametrize("rule", [total(), AT_ORDER], ids=repr)
@pytest.mark.parametrize("own", [False, True], ids=["budget", "own"])
@pytest.mark.parametrize(
    "attack",
    [
        lost_keys,
        edited_data,
        other_arithmetic,
        older_checkpoints,
        one_that_reads_and_one_that_ends,
        one_that_reads_and_one_that_goes_on,
        copies,
        copies_made_before_the_first_step,
        copies_of_a_run_that_ends,
        losses_of_power,
        an_early_end,
        an_early_end_after_a_replay,
        kills,
    ],
)
def test_an_attack_is_charged_or_refused(
    attack: Callable[[Protocol], None], own: bool, rule: Filter
) -> None:
    machine = begun(rule, 4, own=own)
    try:
        attack(machine)
        machine.the_claim_is_never_below_the_truth()
        machine.one_process_at_most_has_a_run()
        assert len(machine.folders[0].truth.made) >= 4
    finally:
        machine.teardown()
