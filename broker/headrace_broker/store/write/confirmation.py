"""The confirmed offset: messages before it may be read and acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import trio

from headrace_broker.store.errors import StoreNotWritable

if TYPE_CHECKING:
    from pathlib import Path

OnConfirmed = Callable[[bool], None]


class Gate(NamedTuple):
    """A condition for confirming messages, such as being on disk.

    offset: end of the last record that the gate lets through. It never decreases, and a gate added
    later starts where the others stand, because messages that were readable stay readable.
    advance: ask the gate to move to the end of the log soon.
    when_passed: call back with True once the gate lets messages through up to an offset, or with
    False if it never will; immediately if that is already known.
    """

    offset: Callable[[], int]
    advance: Callable[[], None]
    when_passed: Callable[[int, OnConfirmed], None]


class Confirmation:
    """The minimum of all gates' offsets; without gates, a written record is confirmed.

    After a gate has moved and run its callbacks, it calls ``moved``.
    """

    def __init__(self) -> None:
        self.is_immediate = True
        self._gates: list[Gate] = []
        self._on_moved: list[Callable[[], None]] = []

    def add(self, gate: Gate) -> None:
        """Make confirmation depend on one more gate."""
        self._gates.append(gate)
        self.is_immediate = False

    def on_moved(self, callback: Callable[[], None]) -> None:
        """Register a callback for each time a gate has moved."""
        self._on_moved.append(callback)

    def moved(self) -> None:
        """Run the callbacks: a gate has moved."""
        for callback in self._on_moved:
            callback()

    @property
    def offset(self) -> int | None:
        """Records that begin before this offset are confirmed; None if all are."""
        return min((gate.offset() for gate in self._gates), default=None)

    def advance(self, end_offset: int) -> None:
        """Ask every gate that is behind the end of the log to move there."""
        for gate in self._gates:
            if gate.offset() < end_offset:
                gate.advance()

    def when_confirmed(self, end_offset: int, callback: OnConfirmed) -> None:
        """Call back with True once the log is confirmed up to an offset, False if it never is."""
        passed = callback
        for gate in reversed(self._gates):
            passed = partial(_pass, gate, end_offset, passed)
        passed(True)


def _pass(gate: Gate, end_offset: int, then: OnConfirmed, is_passed: bool) -> None:
    """Wait for a gate once the one before it is passed."""
    if is_passed:
        gate.when_passed(end_offset, then)
    else:
        then(False)


async def wait_for(when: Callable[[int, OnConfirmed], None], end_offset: int, root: Path) -> None:
    """Wait until ``when`` calls back for an offset: the log is confirmed, or on disk, up to there.

    Raises StoreNotWritable if it never will be.
    """
    called = trio.Event()
    outcomes: list[bool] = []

    def finish(is_confirmed: bool) -> None:
        outcomes.append(is_confirmed)
        called.set()

    when(end_offset, finish)
    await called.wait()
    if outcomes != [True]:
        raise StoreNotWritable("a flush failed", root)
