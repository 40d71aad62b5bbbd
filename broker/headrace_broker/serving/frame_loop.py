"""The broker's handling of frames: store, reply, publish, wake, and hold producers back.

Messages of a turn are in the log before its replies leave, and in their queues right after.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace_broker.store.message_store import MessageStore
    from headrace_daemon.quotas.metering import Metering
    from headrace_daemon.serving.server import HoldBack, RemotingServer
    from headrace_daemon.serving.server_channel import ServerChannel
    from headrace_protocol.frame import Frame
    from headrace_protocol.serving import Registry

log = structlog.get_logger("headrace.broker")

_PRESSURE_TIMEOUT_S = 2.0
_PRESSURE_POLL_S = 0.01


class FrameLoop:
    """The broker's FrameHandler: passes frames to the registry, and commits what they stored.

    on_closed: each is called with a client that has disconnected.
    meter: serves frames in place of ``serve``, which it calls, while there are quotas; else None.
    client: whose request is being served; None between requests.
    """

    _registry: Registry
    _hold_back: HoldBack
    _end_turn: Callable[[], bool]

    def __init__(
        self,
        store: MessageStore,
        on_closed: Iterable[Callable[[ServerChannel], None]],
    ) -> None:
        self._commit_log = store.commit_log
        self._write_path = store.write_path
        self._on_closed = tuple(on_closed)
        self.meter: Metering | None = None
        self.client: ServerChannel | None = None
        self._producers_of_turn: list[ServerChannel] = []
        self._held_back: list[ServerChannel] = []
        self._is_stored = False
        self._under_pressure = trio.Event()

    def connect(
        self, registry: Registry, hold_back: HoldBack, end_turn: Callable[[], bool]
    ) -> None:
        """Set the registry that serves frames, and the function that pauses a client.

        end_turn: appends what belongs to the messages of the turn, and returns whether it did.

        Must be called before the first frame. These are not arguments of the constructor, because
        the server needs its FrameHandler, and the registry needs the server to report errors.
        """
        self._registry = registry
        self._hold_back = hold_back
        self._end_turn = end_turn

    def add_turn_end(self, end: Callable[[], None]) -> None:
        """Call a function too at the end of each turn, before its messages are written."""
        others = self._end_turn

        def end_all() -> bool:
            end()
            return others()

        self._end_turn = end_all

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        """See FrameHandler."""
        commit_log = self._commit_log
        self._write_path.begin()
        end = commit_log.max_offset
        self.client = channel
        try:
            if self.meter is not None:
                return self.meter.handle(channel, frames, self._registry.handle)
            return self._registry.handle(channel, frames)
        finally:
            self.client = None
            # Also if an unreadable frame followed those that stored messages.
            if commit_log.max_offset != end:
                self._producers_of_turn.append(channel)

    def in_turn(
        self, server: RemotingServer, channel: ServerChannel, step: Callable[[], object]
    ) -> None:
        """Run a step of a request that had to wait; its messages are published as in ``handle``."""
        server.alone(channel, partial(self._run_storing, channel, step))

    def _run_storing(self, channel: ServerChannel, step: Callable[[], object]) -> None:
        commit_log = self._commit_log
        self._write_path.begin()
        end = commit_log.max_offset
        # A step may be run by a request of another client.
        former, self.client = self.client, channel
        try:
            step()
        finally:
            self.client = former
            if commit_log.max_offset != end:
                self._producers_of_turn.append(channel)

    def finish_turn(self) -> None:
        """Write the messages of the turn to the log."""
        self._is_stored = self._end_turn() or bool(self._producers_of_turn)
        if self._is_stored:
            self._write_path.commit()

    def replied(self) -> None:
        """Publish the messages of the turn, which wakes the requests that wait for them.

        The answers of requests that continue here leave after it. What they have stored is written
        by then, too.
        """
        while self._is_stored:
            producers, self._producers_of_turn = self._producers_of_turn, []
            self._is_stored = False
            self._write_path.publish()
            if self._write_path.pressure():
                self._hold_all_back(producers)
            if self._producers_of_turn:
                self.finish_turn()

    def _hold_all_back(self, producers: list[ServerChannel]) -> None:
        for channel in producers:
            self._hold_back(channel, is_held_back=True)
        self._held_back += producers
        self._under_pressure.set()

    def closed(self, channel: ServerChannel) -> None:
        """Remove a client that has disconnected."""
        if self.meter is not None:
            self.meter.closed(channel)
        for remove in self._on_closed:
            remove(channel)
        if notices := channel.take_notices():
            self._registry.run_long(_notify_each(notices))

    async def relieve_pressure(self) -> None:
        """Resume reading from producers once dispatch has caught up, or after a timeout.

        After a timeout they fill the rest of the ring, and then get SYSTEM_BUSY.
        """
        while True:
            await self._under_pressure.wait()
            with trio.move_on_after(_PRESSURE_TIMEOUT_S):
                while self._write_path.pressure():
                    await trio.sleep(_PRESSURE_POLL_S)
                    self._write_path.publish()
            if taker := self._write_path.pressure():
                log.warning("dispatch is behind, sends will be rejected", taker=taker)
            self._under_pressure = trio.Event()
            held_back, self._held_back = self._held_back, []
            for channel in held_back:
                self._hold_back(channel, is_held_back=False)


def _notify_each(notices: Iterable[Callable[[], None]]) -> Iterator[None]:
    for notify in notices:
        notify()
        yield
