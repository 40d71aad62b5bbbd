"""Reading a range of a queue over a plain socket: against a real broker, and scripted ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headrace
from headrace import Message, MessageQueue, blocking
from headrace.consumer.queue_reader import read_queue
from headrace.errors import BrokerError, ConnectionLost, OffsetNotFound
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.headers import PullMessageResponseHeader
from headrace_protocol.serving import Reply
from tests.support.scripted import close, scripted_in_thread

COUNT = 3000


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[str, MessageQueue]]:
    """A broker's address and its one queue, of which each third message has the tag "a"."""
    with headrace.embedded() as mq:
        with blocking.Admin(nameserver=mq.nameserver) as admin:
            admin.create_topic("T", queues=1)
            (broker,) = admin.cluster()
        with blocking.Producer(nameserver=mq.nameserver) as producer:
            results = producer.send_many(
                [Message("T", b"%d" % n, tag="a" if n % 3 == 0 else "b") for n in range(COUNT)]
            )
        queue = results[0].queue
        with blocking.PullConsumer(nameserver=mq.nameserver) as consumer:
            consumer.assign([queue])
            while consumer.position(queue) < COUNT:
                consumer.receive_many()
        yield broker.address, queue


@pytest.fixture(params=[True, False], ids=["bulk", "pull"])
def connection(
    place: tuple[str, MessageQueue], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BlockingConnection]:
    if not request.param:
        monkeypatch.setattr(BlockingConnection, "peer_is_headrace", False)
    with BlockingConnection.connect(place[0]) as connection:
        yield connection


def numbers(batches: Any) -> list[int]:
    return [int(body) for batch in batches for body in batch.values()]


@pytest.mark.parametrize(("start", "end"), [(0, COUNT), (7, 2001), (2999, 3000), (5, 5)])
def test_a_range_is_read_and_nothing_else(
    connection: BlockingConnection, place: tuple[str, MessageQueue], start: int, end: int
) -> None:
    assert numbers(read_queue(connection, place[1], start, end)) == list(range(start, end))


def test_it_comes_in_slices(
    connection: BlockingConnection, place: tuple[str, MessageQueue]
) -> None:
    batches = list(read_queue(connection, place[1], 0, COUNT, slice_bytes=16 * 1024))
    assert numbers(batches) == list(range(COUNT))
    if connection.peer_is_headrace:
        assert max(batch.buffer_bytes for batch in batches) <= 512 * 1024
    assert [batch.queue_offset for batch in batches[1:]] == [b.next_offset for b in batches[:-1]]


def test_only_some_tags(connection: BlockingConnection, place: tuple[str, MessageQueue]) -> None:
    found = read_queue(connection, place[1], 10, 2000, tags="a")
    assert numbers(found) == [n for n in range(10, 2000) if n % 3 == 0]


@pytest.mark.parametrize(("start", "end"), [(COUNT, COUNT + 1), (COUNT + 10, COUNT + 20)])
def test_what_is_not_there_is_an_error(
    connection: BlockingConnection, place: tuple[str, MessageQueue], start: int, end: int
) -> None:
    with pytest.raises(
        OffsetNotFound, match=f"no message at offset {start}; its offsets run from 0 to {COUNT}"
    ):
        list(read_queue(connection, place[1], start, end))


def test_what_there_is_comes_before_the_error(
    connection: BlockingConnection, place: tuple[str, MessageQueue]
) -> None:
    found = []
    with pytest.raises(OffsetNotFound):  # noqa: PT012
        for batch in read_queue(connection, place[1], 2990, COUNT + 5):
            found += batch.values()
    assert [int(body) for body in found] == list(range(2990, COUNT))


def test_two_ranges_over_one_connection(
    connection: BlockingConnection, place: tuple[str, MessageQueue]
) -> None:
    for start in (0, 100):
        assert numbers(read_queue(connection, place[1], start, 100 + start))[0] == start


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
    answer: Callable[..., Any] | Reply, error: type[Exception], text: str
) -> None:
    queue = MessageQueue("T", "broker-0", 0)
    with scripted_in_thread() as (server,), BlockingConnection.connect(server.address) as broken:
        server.answer(RequestCode.PULL_MESSAGE, answer)
        with pytest.raises(error, match=text):
            list(read_queue(broken, queue, 0, 10))
