"""Up to which physical offset messages may be seen and acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import trio

from headrace_broker.store.errors import StoreNotWritable

if TYPE_CHECKING:
    from pathlib import Path

OnConfirmed = Callable[[bool], None]


class Gate(NamedTuple):
    """Something that messages wait for, such as the disk.

    offset: up to where it lets messages through, the end of a record; it never goes back, and a
    gate that is added later begins where the others stand, since what was seen stays visible.
    ask: have it move on to the end of the log soon. when_passed: call back with True once it lets
    messages through up to an offset, with False when it never will; at once when that is known.
    """

    offset: Callable[[], int]
    ask: Callable[[], None]
    when_passed: Callable[[int, OnConfirmed], None]


class Confirmation:
    """The least of its gates. Without a gate everything is confirmed as soon as it is written.

    A gate that has moved, and has called back those that waited, calls ``moved``.
    """

    def __init__(self) -> None:
        self.is_immediate = True
        self._gates: list[Gate] = []
        self._on_moved: list[Callable[[], None]] = []

    def add(self, gate: Gate) -> None:
        """Have messages wait for one more."""
        self._gates.append(gate)
        self.is_immediate = False

    def on_moved(self, callback: Callable[[], None]) -> None:
        """Call back whenever a gate has moved."""
        self._on_moved.append(callback)

    def moved(self) -> None:
        """A gate has moved."""
        for callback in self._on_moved:
            callback()

    @property
    def offset(self) -> int | None:
        """Records that begin before it are confirmed; None: all are."""
        return min((gate.offset() for gate in self._gates), default=None)

    def ask(self, end_offset: int) -> None:
        """Have the gates move on to the end of the log, where they are not there yet."""
        for gate in self._gates:
            if gate.offset() < end_offset:
                gate.ask()

    def when_confirmed(self, end_offset: int, callback: OnConfirmed) -> None:
        """Call back with True once the log is confirmed up to there, with False if it never is."""
        self._pass_gates(0, end_offset, callback)

    def _pass_gates(self, number: int, end_offset: int, callback: OnConfirmed) -> None:
        """Wait for one gate after the other: who passes the last has passed all."""
        if number == len(self._gates):
            callback(True)
        elif number == len(self._gates) - 1:
            self._gates[number].when_passed(end_offset, callback)
        else:
            self._gates[number].when_passed(
                end_offset,
                lambda is_passed: (
                    self._pass_gates(number + 1, end_offset, callback)
                    if is_passed
                    else callback(False)
                ),
            )


async def wait_for(when: Callable[[int, OnConfirmed], None], end_offset: int, root: Path) -> None:
    """Wait until the log is confirmed, or on disk, up to an offset, as ``when`` says.

    Raises StoreNotWritable if it never will be.
    """
    called = trio.Event()
    outcomes: list[bool] = []

    def note(is_confirmed: bool) -> None:
        outcomes.append(is_confirmed)
        called.set()

    when(end_offset, note)
    await called.wait()
    if outcomes != [True]:
        raise StoreNotWritable("a flush failed", root)
