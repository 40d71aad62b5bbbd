"""The phases of a client, pair by pair."""

from __future__ import annotations

import itertools

import pytest

from headrace_daemon.serving.server import RemotingServer
from headrace_daemon.serving.server_channel import NEXT_PHASE, Event, Phase, ServerChannel
from tests.support.echo import Echo, frame


class Nowhere:
    """A transport that moves nothing."""

    def flush(self, channel: ServerChannel) -> None:
        pass

    def set_reading(self, *, reading: bool) -> None:
        pass

    def close(self) -> None:
        pass


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
