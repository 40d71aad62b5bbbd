"""The phases of a client, pair by pair."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from headrace_daemon.quotas.metering import Metering
from headrace_daemon.quotas.table import QuotaTable
from headrace_daemon.serving.server import RemotingServer
from headrace_daemon.serving.server_channel import NEXT_PHASE, Event, Phase, ServerChannel
from headrace_protocol.frame import FrameReader
from headrace_protocol.quotas import Quota
from headrace_protocol.serving import Registry
from headrace_protocol.waiting import at_once
from tests.support.echo import Echo, frame


class Nowhere:
    """A transport that moves nothing."""

    def flush(self, channel: ServerChannel) -> None:
        pass

    def set_reading(self, *, reading: bool) -> None:
        pass

    def close(self) -> None:
        pass


class Chokes(Nowhere):
    """A transport that moves so many bytes, at most."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max

    def flush(self, channel: ServerChannel) -> None:
        count = min(self.bytes_max, channel.out_bytes)
        self.bytes_max -= count
        channel.out_bytes -= count


# The shortest way to each phase.
WAYS = {
    Phase.CONNECTED: (),
    Phase.SENT_FRAME: (Event.FRAME,),
    Phase.GREETED: (Event.FRAME, Event.REQUEST),
    Phase.CLOSED: (Event.CLOSE,),
}


def channel_in(phase: Phase) -> ServerChannel:
    channel = RemotingServer(Echo()).open_channel(Nowhere(), "10.0.0.1", 1)
    for event in WAYS[phase]:
        channel.apply(event)
    assert channel.phase is phase
    return channel


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
async def test_every_pair_leads_on_or_is_a_fault(phase: Phase, event: Event) -> None:
    channel = channel_in(phase)
    if (phase, event) not in NEXT_PHASE:
        with pytest.raises(KeyError):
            channel.apply(event)
        assert channel.phase is phase
        return
    channel.apply(event)
    after = channel.phase
    assert after is NEXT_PHASE[phase, event]
    assert channel.is_open == (after is not Phase.CLOSED)
    # Closing changes neither flag: the rest of a read is served as it began.
    sent_frame = {Phase.SENT_FRAME, Phase.GREETED}
    assert channel.has_sent_frame == bool(sent_frame & {phase, after})
    assert channel.is_greeted == (Phase.GREETED in {phase, after})


def test_a_closed_client_stays_closed() -> None:
    after = {NEXT_PHASE.get((Phase.CLOSED, event), Phase.CLOSED) for event in Event}
    assert after == {Phase.CLOSED}


async def test_a_client_that_is_cut_off_twice_is_closed_once() -> None:
    echo = Echo()
    server = RemotingServer(echo)
    channel = server.open_channel(Nowhere(), "10.0.0.1", 1)
    server.begin_turn()
    server.received(channel, frame(b"hello"))
    server.end_turn()
    assert channel.phase is Phase.SENT_FRAME
    for _ in range(2):
        channel.close("")
    assert channel.phase is Phase.CLOSED
    assert echo.closed_channels == [channel.address]
    server.received(channel, frame(b"too late"))
    assert echo.closed_channels == [channel.address]


async def test_a_closed_client_is_not_counted_as_turned_away() -> None:
    server = RemotingServer(Echo())
    channel = server.open_channel(Nowhere(), "10.0.0.1", 1)
    channel.close("")
    server.close_if_silent(channel, channel.partial_since + 1000)
    assert server.turned_away_count == 0


async def test_a_client_at_its_quota_is_read_little_by_little() -> None:
    """All that it sends while it is held back would hold up the others."""
    table, server = QuotaTable(None), RemotingServer(Echo())
    at_once(table.put(Quota(of="user", name="10.0.0.1", requests=1.0)))
    metering = Metering(table, Registry(lambda *_: None), server.hold_back)
    held, other = (
        server.open_channel(Nowhere(), address, 1) for address in ("10.0.0.1", "10.0.0.2")
    )
    first_bytes = held.receive_bytes
    for channel in (held, other):
        channel.apply(Event.FRAME)
        channel.receive_bytes = 1 << 20
        for _ in range(2):
            metering.handle(channel, FrameReader().feed(frame(b"body")), lambda *_: [])
    assert (held.receive_bytes, held.holds) == (first_bytes, 1)
    assert (other.receive_bytes, other.holds) == (1 << 20, 0)
    # A request that is refused is no way round it.
    for _ in range(4):
        metering.handle(held, FrameReader().feed(frame(b"body")), lambda *_: [])
    assert metering.refused
    assert held.holds == 5


@pytest.mark.parametrize(
    ("sent_bytes", "lost"), [(0, "abc"), (9, "abc"), (10, "bc"), (29, "c"), (30, "")]
)
async def test_a_client_that_is_closed_has_lost_what_was_not_sent_whole(
    sent_bytes: int, lost: str
) -> None:
    server = RemotingServer(Echo())
    channel = server.open_channel(Chokes(sent_bytes), "10.0.0.1", 1)
    told: list[str] = []
    with server.joined():
        for name in "abc":
            channel.write(bytes(10))
            channel.when_lost(partial(told.append, name))
    server.close_channel(channel, "")
    for notify in channel.take_notices():
        notify()
    assert "".join(told) == lost
    assert list(channel.take_notices()) == []


async def test_what_is_written_to_a_closed_client_is_lost_at_once() -> None:
    channel = channel_in(Phase.CLOSED)
    told: list[str] = []
    channel.write(b"a")
    channel.when_lost(partial(told.append, "a"))
    assert told == ["a"]


async def test_a_client_that_reads_leaves_no_notices_behind() -> None:
    server = RemotingServer(Echo())
    transport = Chokes(0)
    channel = server.open_channel(transport, "10.0.0.1", 1)
    for _ in range(100):
        channel.write(bytes(10))
        channel.when_lost(lambda: None)
        transport.bytes_max = 10
    assert len(list(channel.take_notices())) == 1
