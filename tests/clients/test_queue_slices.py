"""Many pulls under way at a broker that gives little for each: all comes, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.consumer.queue_slices import SliceReader
from headrace.consumer.subscription import Subscription
from headrace.errors import MalformedAnswer, OffsetNotFound
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.headers import PullMessageResponseHeader
from headrace_protocol.message import encode_record
from headrace_protocol.serving import Reply
from tests.support.scripted import Asked, Scripted, scripted_in_thread

QUEUE = MessageQueue("T", "broker-0", 0)
END = 2000


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted_in_thread() as (running,):
        yield running


class Peer:
    """A queue with holes, as one has that is compacted, and a broker's way to read it."""

    def __init__(self, offsets: list[int], given_counts: list[int], delta: int = 0) -> None:
        self.offsets = offsets
        self.given_counts = given_counts
        self.delta = delta
        self.pull_count = 0

    def __call__(self, asked: Asked) -> Reply:
        self.pull_count += 1
        start = int(asked.ext["queueOffset"])
        count = min(int(asked.ext["maxMsgNums"]), self.given_counts[self.pull_count % 4])
        found = [offset for offset in self.offsets if offset >= start][:count]
        next_offset = found[-1] + 1 if found else start
        header = PullMessageResponseHeader(
            suggest_which_broker_id=0,
            next_begin_offset=next_offset,
            min_offset=0,
            max_offset=END,
            offset_delta=self.delta_at(start) or None,
        )
        records = [
            encode_record(
                topic="T",
                queue_id=0,
                body=b"x" * (offset % 7),
                queue_offset=offset - self.delta_at(start),
            )
            for offset in found
        ]
        code = ResponseCode.SUCCESS if found else ResponseCode.PULL_NOT_FOUND
        return Reply(header, tuple(records), code=code)

    def delta_at(self, start: int) -> int:
        return self.delta if start > END // 2 else 0


def read(server: Scripted, peer: Any, start: int, end: int, slice_bytes: int) -> list[int]:
    server.answer(RequestCode.PULL_MESSAGE, peer)
    found: list[int] = []
    with BlockingConnection.connect(server.address) as connection:
        at = start
        for piece in SliceReader(
            connection,
            QUEUE,
            start,
            end,
            subscription=Subscription("T"),
            group="tests",
            slice_bytes=slice_bytes,
        ):
            assert piece.start_offset == at
            at = piece.next_offset
            if piece.columns is not None:
                found += piece.columns.queue_offset.tolist()
    return found


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sets(st.integers(0, END - 1), max_size=300),
    st.lists(st.sampled_from([1, 3, 32, 100]), min_size=4, max_size=4),
    st.sampled_from([0, 0, 7]),
    st.integers(0, END // 2),
    st.sampled_from([1, 2000, 1 << 20]),
)
def test_a_queue_with_holes(
    server: Scripted,
    holes: set[int],
    given_counts: list[int],
    delta: int,
    start: int,
    slice_bytes: int,
) -> None:
    offsets = sorted(set(range(END)) - holes | {END - 1})
    peer = Peer(offsets, given_counts, delta)
    found = read(server, peer, start, END, slice_bytes)
    assert found == [offset for offset in offsets if offset >= start]


def test_it_learns_how_much_a_broker_gives(server: Scripted) -> None:
    steady = Peer(list(range(END)), [50] * 4)
    assert read(server, steady, 0, END, 1 << 20) == list(range(END))
    assert steady.pull_count <= END // 50 + 2
    # The first answer may be short, as at the end of a file.
    growing = Peer(list(range(END)), [50, 1, 50, 50])
    assert len(read(server, growing, 0, END, 1 << 20)) == END


def test_what_there_is_comes_before_the_error(server: Scripted) -> None:
    server.answer(RequestCode.PULL_MESSAGE, Peer(list(range(100)), [10] * 4))
    found: list[int] = []
    with BlockingConnection.connect(server.address) as connection:
        reader = SliceReader(
            connection,
            QUEUE,
            0,
            END,
            subscription=Subscription("T"),
            group="tests",
            slice_bytes=1 << 20,
        )
        with pytest.raises(OffsetNotFound, match="no message at offset 100"):  # noqa: PT012
            for piece in reader:
                assert piece.columns is not None
                found += piece.columns.queue_offset.tolist()
    assert found == list(range(100))


def test_records_that_are_none(server: Scripted) -> None:
    def broken(asked: Asked) -> Reply:
        reply = Peer(list(range(END)), [10] * 4)(asked)
        return Reply(reply.header, (b"no record at all" * 9,))

    with pytest.raises(MalformedAnswer, match="PULL_MESSAGE"):
        read(server, broken, 0, END, 1 << 20)
