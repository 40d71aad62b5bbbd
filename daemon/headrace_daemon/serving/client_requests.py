"""Requests of a daemon to its clients, and the answers to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from headrace_protocol.command import Command, header_fields
from headrace_protocol.header_codecs import SerializeType, encode_frame

if TYPE_CHECKING:
    import msgspec

    from headrace_protocol.codes import RequestCode
    from headrace_protocol.frame import Buffer
    from headrace_protocol.serving import Channel

# How long the peer's broker waits for a client.
TIMEOUT_S: Final = 10.0
_OPAQUE_MASK = 0x7FFFFFFF
# What a request that waits takes, with what its asker keeps for it.
_WAITING_BYTES = 2048


class Answer(NamedTuple):
    """What a client answered; the body is as it came, and no bound was checked."""

    command: Command
    body: Buffer


# Gets the answer; None if the client did not answer in time, or is gone. Must not raise.
Then = Callable[[Answer | None], None]


class _Asked(NamedTuple):
    channel: Channel
    then: Then
    deadline: float


class ClientRequests:
    """Asks clients, and hands each answer to whoever asked.

    All requests wait equally long, so the oldest is the first that is due. Each is charged to its
    client and ends with it.
    """

    def __init__(self) -> None:
        # By opaque, the oldest first.
        self._asked: dict[int, _Asked] = {}
        self._of_channels: dict[Channel, dict[int, None]] = {}
        self._last_opaque = 0
        self._is_asked = trio.Event()

    def ask(
        self,
        channel: Channel,
        code: RequestCode,
        header: msgspec.Struct | None,
        body: Buffer,
        then: Then,
    ) -> None:
        """Send a request; ``then`` is called once, at once if the client is gone.

        Raises LocalProtocolError when the request does not fit a frame.
        """
        if not channel.is_open:
            then(None)
            return
        opaque = self._last_opaque = (self._last_opaque + 1) & _OPAQUE_MASK
        # In JSON, which every client reads.
        frame = encode_frame(
            SerializeType.JSON, code, opaque, fields=header_fields(header), body_bytes=len(body)
        )
        self._asked[opaque] = _Asked(channel, then, trio.current_time() + TIMEOUT_S)
        self._of_channels.setdefault(channel, {})[opaque] = None
        self._is_asked.set()
        channel.charge(_WAITING_BYTES)
        channel.write(frame, body)

    def answered(self, channel: Channel, command: Command, body: Buffer) -> bool:
        """Hand an answer on; returns False, and drops it, if nobody asked that of the client."""
        asked = self._asked.get(command.opaque)
        if asked is None or asked.channel is not channel:
            return False
        self._end(command.opaque, Answer(command, body))
        return True

    def channel_closed(self, channel: Channel) -> None:
        """Tell all who wait for an answer of a client that is gone."""
        for opaque in list(self._of_channels.get(channel, ())):
            self._end(opaque, None)

    async def run(self) -> None:
        """Tell those who have waited too long, until cancelled."""
        while True:
            await self._is_asked.wait()
            while self._asked:
                opaque, oldest = next(iter(self._asked.items()))
                await trio.sleep_until(oldest.deadline)
                if opaque in self._asked:
                    self._end(opaque, None)
            self._is_asked = trio.Event()

    def _end(self, opaque: int, answer: Answer | None) -> None:
        channel, then, _ = self._asked.pop(opaque)
        opaques = self._of_channels[channel]
        del opaques[opaque]
        if not opaques:
            del self._of_channels[channel]
        channel.charge(-_WAITING_BYTES)
        then(answer)
