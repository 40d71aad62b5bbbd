"""Slices of a queue's range over a plain socket, from a real broker and from scripted ones.

Many pulls under way at a broker that gives little for each: all comes, and nothing twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace
from headrace import Message, blocking
from headrace.consumer.pulls import Wanted
from headrace.consumer.queue_slices import SliceReader
from headrace.consumer.subscription import Subscription
from headrace.errors import BrokerError, ConnectionLost, MalformedAnswer, OffsetNotFound
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.headers import PullMessageResponseHeader
from headrace_protocol.message import encode_record
from headrace_protocol.serving import Reply
from tests.support.scripted import Asked, Scripted, close, scripted_in_thread

QUEUE = MessageQueue("T", "broker-0", 0)
END = 1000


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
        first = bisect_left(self.offsets, start)
        found = self.offsets[first : first + count]
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


def slices(
    connection: BlockingConnection,
    queue: MessageQueue,
    start: int,
    end: int,
    slice_bytes: int = 1 << 20,
    tags: str = "*",
) -> SliceReader:
    wanted = Wanted("g", queue, start, Subscription("T", tags), record_bytes_max=slice_bytes)
    return SliceReader(connection, wanted, end)


def read(server: Scripted, peer: Any, start: int, end: int, slice_bytes: int) -> list[int]:
    server.answer(RequestCode.PULL_MESSAGE, peer)
    found: list[int] = []
    with BlockingConnection.connect(server.address) as connection:
        at = start
        for piece in slices(connection, QUEUE, start, end, slice_bytes):
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
    with (  # noqa: PT012
        BlockingConnection.connect(server.address) as connection,
        pytest.raises(OffsetNotFound, match="no message at offset 100"),
    ):
        for piece in slices(connection, QUEUE, 0, END):
            assert piece.columns is not None
            found += piece.columns.queue_offset.tolist()
    assert found == list(range(100))


def test_records_that_are_none(server: Scripted) -> None:
    def broken(asked: Asked) -> Reply:
        reply = Peer(list(range(END)), [10] * 4)(asked)
        return Reply(reply.header, (b"no record at all" * 9,))

    with pytest.raises(MalformedAnswer, match="PULL_MESSAGE"):
        read(server, broken, 0, END, 1 << 20)


# -- a real broker, whose pulls are bulk ones, or ordinary ones as those of Apache's ---------------

COUNT = 3000


class AsWithApache(BlockingConnection):
    peer_is_headrace = False


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[str, MessageQueue]]:
    """A broker's address and its one queue, of which each third message has the tag "a"."""
    with headrace.embedded() as mq:
        with blocking.Admin(nameserver=mq.nameserver) as admin:
            admin.create_topic("T", queues=1)
        with blocking.Producer(nameserver=mq.nameserver) as producer:
            sent = [Message("T", b"%d" % n, tag="a" if n % 3 == 0 else "b") for n in range(COUNT)]
            queue = producer.send_many(sent)[0].queue
        yield mq.broker, queue


@pytest.fixture(params=[BlockingConnection, AsWithApache], ids=["bulk", "pull"])
def connection(
    place: tuple[str, MessageQueue], request: pytest.FixtureRequest
) -> Iterator[BlockingConnection]:
    with request.param.connect(place[0]) as connection:
        yield connection


def numbers(pieces: SliceReader) -> list[int]:
    found = (piece.columns.bodies() for piece in pieces if piece.columns is not None)
    return [int(body) for bodies in found for body in bodies]


@pytest.mark.parametrize(("start", "end"), [(0, COUNT), (7, 2001), (2999, 3000), (5, 5)])
def test_a_range_is_read_and_nothing_else(
    connection: BlockingConnection, place: tuple[str, MessageQueue], start: int, end: int
) -> None:
    for _ in range(2):  # also over a connection that has read another range
        assert numbers(slices(connection, place[1], start, end)) == list(range(start, end))


def test_it_comes_in_slices(
    connection: BlockingConnection, place: tuple[str, MessageQueue]
) -> None:
    found = list(slices(connection, place[1], 0, COUNT, 16 * 1024))
    assert [piece.start_offset for piece in found] == [0, *(p.next_offset for p in found[:-1])]
    if connection.peer_is_headrace:
        assert max(len(piece.columns.data) for piece in found if piece.columns) <= 512 * 1024


def test_only_some_tags(connection: BlockingConnection, place: tuple[str, MessageQueue]) -> None:
    found = numbers(slices(connection, place[1], 10, 2000, tags="a"))
    assert found == [n for n in range(10, 2000) if n % 3 == 0]


@pytest.mark.parametrize(("start", "end"), [(COUNT, COUNT + 1), (COUNT + 10, COUNT + 20)])
def test_what_is_not_there_is_an_error(
    connection: BlockingConnection, place: tuple[str, MessageQueue], start: int, end: int
) -> None:
    with pytest.raises(
        OffsetNotFound, match=f"no message at offset {start}; its offsets run from 0 to {COUNT}"
    ):
        list(slices(connection, place[1], start, end))


EXPIRED = PullMessageResponseHeader(
    suggest_which_broker_id=0, next_begin_offset=50, min_offset=50, max_offset=90
)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (close, ConnectionLost, "closed"),
        (Reply(code=ResponseCode.NO_PERMISSION), BrokerError, "NO_PERMISSION"),
        (Reply(EXPIRED, code=ResponseCode.PULL_OFFSET_MOVED), OffsetNotFound, "run from 50 to 90"),
    ],
    ids=["ended", "refused", "deleted"],
)
def test_what_is_no_message_is_an_error(
    server: Scripted, answer: Callable[..., Any] | Reply, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        read(server, answer, 0, 10, 1 << 20)
