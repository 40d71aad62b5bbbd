"""Refusals of appends, by the log's life and the room on its disk."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from headrace_broker.store.disk_room import DiskRoom
from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.files.filesystem import NO_ROOM
from headrace_broker.store.life import Event, State, StoreLife

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.clock import Clock
    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.store.settings import StoreSettings

# How old a refusal may be where the file system tells its usage.
ROOM_RETRY_MS: Final = 100
# The pause after an attempt that failed though there seems to be room, as with a quota.
RETRY_MS: Final = 1000
RETRY_MS_MAX: Final = 5000


class LogRefusals:
    """The part of a log that refuses appends, and accepts them again.

    ``append_end`` is where the fast path must stop: half of the file (time to request the next
    one), its end, or -1 while appends are refused.
    """

    def __init__(self, settings: StoreSettings, fs: Files, clock: Clock) -> None:
        self.clock = clock
        self.append_end = -1
        self.life = StoreLife(settings.root, clock)
        self.room = DiskRoom(settings, fs)
        self._root = settings.root
        # Whether the usage of the disk is why messages are refused.
        self.is_full = False
        # When an append found no room last.
        self.tried_ms = 0

    def refuse(
        self,
        reason: str,
        path: Path,
        *,
        error_number: int | None = None,
        is_final: bool = False,
        retry_ms_max: int = RETRY_MS_MAX,
    ) -> StoreNotWritable:
        """Refuse appends: until a restart, or until an attempt succeeds.

        error_number: errno of the OSError that is the reason; ENOLCK, a lost lock, is final.
        Returns the exception to raise.
        """
        is_final |= error_number == errno.ENOLCK
        refusal = StoreNotWritable(reason, path, error_number)
        retry_ms = ROOM_RETRY_MS if error_number in NO_ROOM else RETRY_MS
        event = Event.FAIL if is_final else Event.REFUSE
        self.stop_appends(event, refusal, retry_ms, retry_ms_max)
        return self.refused()

    def refuse_for(self, error: OSError, path: Path) -> StoreNotWritable:
        """Refuse appends because a file could not grow; returns the exception to raise."""
        return self.refuse(self.room.reason(error), path, error_number=error.errno)

    def stop_appends(
        self, event: Event, refusal: StoreNotWritable, retry_ms: int = 0, retry_ms_max: int = 0
    ) -> None:
        """Accept no more appends, at an event of the log's life."""
        self.append_end = -1
        self.life.apply(event, refusal, retry_ms, retry_ms_max)

    def refused(self) -> StoreNotWritable:
        """The exception to raise while messages are refused."""
        refusal = self.life.refusal
        assert refusal is not None
        return refusal

    def accept(self) -> None:
        """Accept appends after the load; the next one opens the file."""
        self.life.apply(Event.LOADED)

    def resume(self) -> None:
        """Accept appends again, unless they were refused for good."""
        self.life.apply(Event.RESUME)

    def look_again(self, *, is_healed: bool = False) -> None:
        """Refuse or accept appends by the room that the disk has now.

        is_healed: whether all that was refused before has succeeded since. Where the usage says
        nothing about a refusal, as with a quota, only that ends it.
        """
        was_full, self.is_full = self.is_full, False
        problem = self.room.problem(self.room.wanted_bytes)
        if problem is not None:
            self.is_full = True
            self.refuse(problem, self._root, error_number=errno.ENOSPC, retry_ms_max=ROOM_RETRY_MS)
        elif is_healed or was_full:
            self.resume()

    def check_room(self, byte_count: int) -> None:
        """Require room for ``byte_count`` elsewhere in the store, as for a message.

        Raises StoreNotWritable.
        """
        self.look_again_if_due()
        if self.life.state is not State.OPEN:
            raise self.refused_append()
        problem = self.room.problem(byte_count)
        if problem is not None:
            raise StoreNotWritable(problem, self._root, errno.ENOSPC)

    def look_again_if_due(self) -> None:
        """As ``look_again``, if the last refusal is old enough."""
        if self.life.may_retry:
            self.look_again()

    def refused_append(self) -> StoreNotWritable:
        """As ``refused``, for an append, which is noted."""
        self.tried_ms = self.clock.now_ms()
        return self.refused()
