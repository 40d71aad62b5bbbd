"""Durations of sends, measured per turn of the loop, not per message."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from headrace_broker.serving.frame_loop import FrameLoop
from headrace_daemon.metrics.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.store.message_store import MessageStore
    from headrace_daemon.serving.server_channel import ServerChannel
    from headrace_protocol.frame import Frame


class TimedFrameLoop(FrameLoop):
    """A FrameLoop that measures its turns; without a monitor the plain one costs nothing.

    send_times: seconds from reading the first send of a turn to the replies, once for each message.
    """

    def __init__(
        self, store: MessageStore, on_closed: Iterable[Callable[[ServerChannel], None]]
    ) -> None:
        super().__init__(store, on_closed)
        self.send_times = Histogram()
        self._ring = store.ring
        self._confirmation = store.write_path.confirmation
        # When the first send of the turn was read, and how many rows the ring had by then.
        self._began = 0.0
        self._rows = 0

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        """See FrameHandler."""
        if not self._producers_of_turn:
            self._began, self._rows = perf_counter(), self._ring.written
        return FrameLoop.handle(self, channel, frames)

    def _run_storing(self, channel: ServerChannel, step: Callable[[], object]) -> None:
        if not self._producers_of_turn:
            self._began, self._rows = perf_counter(), self._ring.written
        FrameLoop._run_storing(self, channel, step)

    def replied(self) -> None:
        """See FrameHandler."""
        if self._producers_of_turn:
            began, count = self._began, self._ring.written - self._rows
            if self._confirmation.is_immediate:
                self.send_times.add(perf_counter() - began, count)
            else:
                self._time_later(began, count)
        FrameLoop.replied(self)

    def _time_later(self, began: float, count: int) -> None:
        """Measure replies that wait for a gate once they left."""

        def note(is_confirmed: bool) -> None:
            if is_confirmed:
                self.send_times.add(perf_counter() - began, count)

        self._confirmation.when_confirmed(self._commit_log.max_offset, note)
