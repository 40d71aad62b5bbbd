"""Requests from a daemon to its clients, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from headrace_protocol.command import Command, header_fields
from headrace_protocol.header_codecs import SerializeType, encode_frame

if TYPE_CHECKING:
    import msgspec

    from headrace_protocol.channel import Channel
    from headrace_protocol.codes import RequestCode
    from headrace_protocol.frame import Buffer

# How long the peer's broker waits for a client.
TIMEOUT_S: Final = 10.0
_OPAQUE_MASK = 0x7FFFFFFF
# Memory of a pending request, including its caller's.
_WAITING_BYTES = 2048


class Answer(NamedTuple):
    """A client's answer; the body is as received, and no bound was checked."""

    command: Command
    body: Buffer


# Gets the answer; None if the client did not answer in time, or disconnected. Must not raise.
Then = Callable[[Answer | None], None]


class _Pending(NamedTuple):
    channel: Channel
    then: Then
    deadline: float


class ClientRequests:
    """Pending requests to clients, each with the function that gets its answer.

    All have the same timeout, so the oldest expires first. Each is charged to its client, and ends
    when the client disconnects.
    """

    def __init__(self) -> None:
        # Keyed by opaque, the oldest first.
        self._pending: dict[int, _Pending] = {}
        self._by_channel: dict[Channel, dict[int, None]] = {}
        self._last_opaque = 0
        self._has_pending = trio.Event()

    def ask(
        self,
        channel: Channel,
        code: RequestCode,
        header: msgspec.Struct | None,
        body: Buffer,
        then: Then,
    ) -> None:
        """Send a request; ``then`` is called once, immediately if the client has disconnected.

        Raises LocalProtocolError if the request does not fit a frame.
        """
        if not channel.is_open:
            then(None)
            return
        opaque = self._last_opaque = (self._last_opaque + 1) & _OPAQUE_MASK
        # In JSON, which every client reads.
        frame = encode_frame(
            SerializeType.JSON, code, opaque, fields=header_fields(header), body_bytes=len(body)
        )
        self._pending[opaque] = _Pending(channel, then, trio.current_time() + TIMEOUT_S)
        self._by_channel.setdefault(channel, {})[opaque] = None
        self._has_pending.set()
        channel.charge(_WAITING_BYTES)
        channel.write(frame, body)

    def pending_count(self, channel: Channel) -> int:
        """Number of requests that a client has not answered yet."""
        return len(self._by_channel.get(channel, ()))

    def answered(self, channel: Channel, command: Command, body: Buffer) -> bool:
        """Pass an answer to its ``then``; returns False if no request to this client matches."""
        pending = self._pending.get(command.opaque)
        if pending is None or pending.channel is not channel:
            return False
        self._end(command.opaque, Answer(command, body))
        return True

    def channel_closed(self, channel: Channel) -> None:
        """End all requests to a client that has disconnected."""
        for opaque in list(self._by_channel.get(channel, ())):
            self._end(opaque, None)

    async def run(self) -> None:
        """End requests that time out, until cancelled."""
        while True:
            await self._has_pending.wait()
            while self._pending:
                opaque, oldest = next(iter(self._pending.items()))
                await trio.sleep_until(oldest.deadline)
                if opaque in self._pending:
                    self._end(opaque, None)
            self._has_pending = trio.Event()

    def _end(self, opaque: int, answer: Answer | None) -> None:
        channel, then, _ = self._pending.pop(opaque)
        opaques = self._by_channel[channel]
        del opaques[opaque]
        if not opaques:
            del self._by_channel[channel]
        channel.charge(-_WAITING_BYTES)
        then(answer)
