"""The serving side: every request gets one answer, is one-way or is held."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from headrace_protocol.channel import Channel
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.connection import Connection, RequestReceived, ResponseReceived
from headrace_protocol.errors import Lane, NotReady, RemoteProtocolError, RequestError
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame, notice
from headrace_protocol.headers import GetMinOffsetHeader, OffsetResponseHeader
from headrace_protocol.serving import Registry, Reply, Request, ServedElsewhere, Then, Work
from headrace_protocol.waiting import Run, Until, now_or_later, ready, take_break
from tests.support.channel import MemoryChannel

LANE = Lane("tests", threads=1)


def offset(request: Request) -> Reply:
    header = request.header(GetMinOffsetHeader)
    if header.topic == "missing":
        raise RequestError(ResponseCode.TOPIC_NOT_EXIST, "no topic missing: create it")
    if header.topic == "bug":
        raise ZeroDivisionError("a bug")
    return Reply(OffsetResponseHeader(offset=header.queue_id), (b"bo", memoryview(b"dy")))


class Service:
    def __init__(self) -> None:
        self.unexpected: list[str] = []
        self.held: list[Request] = []
        self.registry = Registry(lambda _, error: self.unexpected.append(str(error)))
        self.registry.route(RequestCode.GET_MIN_OFFSET, offset)
        self.registry.route(RequestCode.PULL_MESSAGE, self.hold)
        self.channel = MemoryChannel()

    def hold(self, request: Request) -> None:
        self.held.append(request)

    def take(self, data: bytes) -> bytes:
        self.channel.written.clear()
        self.registry.handle(self.channel, FrameReader().feed(data))
        return bytes(self.channel.written)


def ask(service: Service, connection: Connection[str], topic: str) -> list[Any]:
    _, buffers = connection.request(
        RequestCode.GET_MIN_OFFSET, GetMinOffsetHeader(topic=topic, queue_id=3), waiter=topic
    )
    return connection.receive_data(service.take(b"".join(buffers)))


@pytest.mark.parametrize("serialize_type", list(SerializeType))
def test_request_and_response_back_to_back(serialize_type: SerializeType) -> None:
    connection: Connection[str] = Connection(serialize_type)
    (event,) = ask(Service(), connection, "t")
    assert isinstance(event, ResponseReceived)
    assert event.waiter == "t"
    assert event.command.header(OffsetResponseHeader).offset == 3
    assert bytes(event.body) == b"body"
    assert connection.waiting_count == 0


def test_a_side_that_shows_that_it_is_ours_is_spoken_to_in_msgpack() -> None:
    service, connection = Service(), Connection[str]()
    ask(service, connection, "t")
    assert connection.serialize_type is SerializeType.MSGPACK
    ask(service, connection, "t")
    ((serialize_type, _, _),) = FrameReader().feed(bytes(service.channel.written))
    assert serialize_type == SerializeType.MSGPACK


def test_a_side_that_shows_nothing_never_sees_msgpack() -> None:
    request = encode_frame(0, 31, 1, fields={"topic": "t", "queueId": 0}, language="JAVA")
    ((serialize_type, _, _),) = FrameReader().feed(Service().take(request))
    assert serialize_type == SerializeType.JSON


@pytest.mark.parametrize(
    ("topic", "code", "remark"),
    [
        ("missing", ResponseCode.TOPIC_NOT_EXIST, "create it"),
        ("bug", ResponseCode.SYSTEM_ERROR, "ZeroDivisionError: a bug"),
    ],
)
def test_errors_become_codes(topic: str, code: int, remark: str) -> None:
    service = Service()
    (event,) = ask(service, Connection(SerializeType.ROCKETMQ), topic)
    assert event.command.code == code
    assert remark in event.command.remark
    assert service.unexpected == (["a bug"] if topic == "bug" else [])


def answer_to(data: bytes) -> Any:
    connection: Connection[str] = Connection()
    connection.request(1, waiter="first")
    return connection.receive_data(Service().take(data))[0].command


def test_malformed_and_unknown_requests_are_answered() -> None:
    answer = answer_to(encode_frame(0, 31, 1, fields={"topic": "t", "queueId": "x"}))
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "GET_MIN_OFFSET (31)" in answer.remark
    assert "$.queueId" in answer.remark
    answer = answer_to(encode_frame(0, 99999, 1))
    assert (answer.code, answer.remark) == (3, " request type 99999 not supported")


def test_one_way_requests_and_stray_responses_get_no_answer() -> None:
    fields = {"topic": "missing", "queueId": 0}
    assert Service().take(encode_frame(0, 31, 1, flag=2, fields=fields)) == b""
    assert Service().take(encode_frame(0, 0, 1, flag=1)) == b""


def test_a_held_request_is_answered_later_in_its_own_codec() -> None:
    service = Service()
    assert service.take(encode_frame(SerializeType.ROCKETMQ, 11, 9)) == b""
    service.held[0].reply(Reply(code=19, remark="nothing"))
    ((serialize_type, _, _),) = FrameReader().feed(bytes(service.channel.written))
    assert serialize_type == SerializeType.ROCKETMQ


def test_a_held_request_keeps_nothing_alive_that_only_it_knows() -> None:
    service = Service()
    channel: Any = service.channel
    channel.held = service.held  # as a channel knows its server, and so who holds it
    service.take(encode_frame(SerializeType.JSON, RequestCode.PULL_MESSAGE, 1))
    assert service.held
    channel = weakref.ref(service.channel)
    del service
    gc.collect()
    assert channel() is None


def test_an_unreadable_header_is_for_the_driver_to_close() -> None:
    with pytest.raises(RemoteProtocolError, match="malformed JSON header"):
        Service().take(bytes([0, 0, 0, 6, 0, 0, 0, 2]) + b"{]")


def test_a_notice_reaches_the_client() -> None:
    (event,) = Connection[str]().receive_data(
        b"".join(notice(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED))
    )
    assert isinstance(event, RequestReceived)
    assert event.command.is_oneway


# -- requests that take long -----------------------------------------------------------------------


async def counted(request: Request) -> Reply:
    """As ``offset``, in as many slices as the queue id says."""
    for _ in range(request.header(GetMinOffsetHeader).queue_id):
        await take_break()
    return offset(request)


def long_service() -> tuple[Service, list[Iterator[None]]]:
    service = Service()
    works: list[Iterator[None]] = []
    service.registry = Registry(lambda _, error: service.unexpected.append(str(error)))
    service.registry.route_long(RequestCode.GET_MIN_OFFSET, counted)
    service.registry.run_long = works.append
    service.registry.slice_s = 0.0
    return service, works


def answer_codes(channel: MemoryChannel) -> list[int]:
    """The codes of the answers since the last time."""
    return [command.code for command, _ in channel.replies() if command.is_response]


def test_long_work_is_answered_at_its_end() -> None:
    (service, works), connection = long_service(), Connection[str](SerializeType.JSON)
    assert ask(service, connection, "t") == []
    (work,) = works
    assert sum(1 for _ in work) == 3
    (event,) = connection.receive_data(bytes(service.channel.written))
    assert event.command.header(OffsetResponseHeader).offset == 3


@pytest.mark.parametrize(
    ("topic", "code"),
    [("missing", ResponseCode.TOPIC_NOT_EXIST), ("bug", ResponseCode.SYSTEM_ERROR)],
)
def test_errors_of_long_work_become_codes(topic: str, code: int) -> None:
    (service, works), connection = long_service(), Connection[str](SerializeType.JSON)
    ask(service, connection, topic)
    list(works[0])
    (event,) = connection.receive_data(bytes(service.channel.written))
    assert event.command.code == code
    assert service.unexpected == (["a bug"] if topic == "bug" else [])


def test_long_requests_of_a_client_are_done_one_after_the_other() -> None:
    service, works = long_service()
    connections = [Connection[str](SerializeType.JSON) for _ in range(2)]
    for topic in ("first", "second", "third"):
        assert ask(service, connections[0], topic) == []
    service.channel, first = MemoryChannel(), service.channel
    ask(service, connections[1], "other")
    one, other = works
    assert first.charged_bytes > 3 * 2048 > service.channel.charged_bytes > 2048
    next(one)
    assert sum(1 for _ in other) == 3
    assert answer_codes(service.channel) == [0]
    list(one)
    assert answer_codes(first) == [0, 0, 0]
    assert first.charged_bytes == service.channel.charged_bytes == 0
    # Who comes back after that is served as before.
    ask(service, connections[1], "again")
    list(works[2])
    assert answer_codes(service.channel) == [0]


def test_what_a_client_waited_for_is_not_begun_when_it_is_gone() -> None:
    (service, works), connection = long_service(), Connection[str](SerializeType.JSON)
    for topic in ("t", "bug", "bug"):
        ask(service, connection, topic)
    next(works[0])
    service.channel.is_open = False
    for work in works:
        list(work)
    assert service.unexpected == []


class Disk:
    """The data that must be fetched from it before a request can be served."""

    def __init__(self, fetches: int, problem: OSError | None = None) -> None:
        self.missing = fetches
        self.problem = problem

    def serve(self, request: Request) -> Reply | Work | None:
        return now_or_later(partial(self.offset, request))

    def offset(self, request: Request) -> Reply:
        if self.missing:
            raise NotReady(self.fetch, LANE)
        return offset(request)

    def fetch(self) -> None:
        self.missing -= 1

    def run(self, _channel: Channel, wait: NotReady, then: Then) -> None:
        wait.fetch()
        then(self.problem)


@pytest.mark.parametrize("fetches", [0, 1, 5])
@pytest.mark.parametrize("is_aside", [False, True])
def test_what_must_be_fetched_is_served_then(fetches: int, is_aside: bool) -> None:
    service, disk = Service(), Disk(fetches)
    service.registry = Registry(lambda _, error: service.unexpected.append(str(error)))
    service.registry.route(RequestCode.GET_MIN_OFFSET, disk.serve)
    if is_aside:
        service.registry.run_fetch = disk.run
    (event,) = ask(service, Connection(SerializeType.JSON), "t")
    assert event.command.header(OffsetResponseHeader).offset == 3
    assert disk.missing == 0


def test_what_waits_for_the_disk_is_charged_to_its_client() -> None:
    service, disk, waiting = Service(), Disk(1), []
    service.registry = Registry(lambda _, error: service.unexpected.append(str(error)))
    service.registry.route(RequestCode.GET_MIN_OFFSET, disk.serve)
    service.registry.run_fetch = lambda _, wait, then: waiting.append((wait.fetch, then))
    ask(service, Connection(SerializeType.JSON), "t")
    assert service.channel.charged_bytes > 2048
    ((fetch, then),) = waiting
    fetch()
    then(None)
    assert answer_codes(service.channel) == [0]
    assert service.channel.charged_bytes == 0


def test_what_can_not_be_fetched_is_told() -> None:
    service, disk = Service(), Disk(1, OSError(5, "Input/output error"))
    service.registry = Registry(lambda _, error: service.unexpected.append(str(error)))
    service.registry.route(RequestCode.GET_MIN_OFFSET, disk.serve)
    service.registry.run_fetch = disk.run
    (event,) = ask(service, Connection(SerializeType.JSON), "t")
    assert event.command.code == ResponseCode.SYSTEM_ERROR
    assert "Input/output error" in (event.command.remark or "")


async def each_offset(disk: Disk, request: Request) -> Reply:
    replies = [await ready(partial(disk.offset, request)) for _ in range(3)]
    assert len(replies) == 3
    return replies[-1]


def long_disk_service(disk: Disk) -> tuple[Service, list[Iterator[None]]]:
    service = Service()
    works: list[Iterator[None]] = []
    service.registry = Registry(lambda _, error: service.unexpected.append(str(error)))
    service.registry.route_long(RequestCode.GET_MIN_OFFSET, partial(each_offset, disk))
    service.registry.run_long = works.append
    service.registry.slice_s = 0.0
    service.registry.run_fetch = disk.run
    return service, works


@pytest.mark.parametrize("fetches", [0, 1, 5])
def test_long_work_goes_on_with_what_it_waited_for(fetches: int) -> None:
    disk = Disk(fetches)
    service, works = long_disk_service(disk)
    connection: Connection[str] = Connection(SerializeType.JSON)
    assert ask(service, connection, "t") == []
    turns = 0
    while works:
        turns += sum(1 for _ in works.pop())
    (event,) = connection.receive_data(bytes(service.channel.written))
    assert event.command.header(OffsetResponseHeader).offset == 3
    # A turn for each read and each fetch.
    assert (disk.missing, turns) == (0, 3 + fetches)


def test_long_work_ends_with_what_can_not_be_fetched() -> None:
    service, works = long_disk_service(Disk(1, OSError(5, "Input/output error")))
    connection: Connection[str] = Connection(SerializeType.JSON)
    ask(service, connection, "t")
    while works:
        list(works.pop())
    (event,) = connection.receive_data(bytes(service.channel.written))
    assert event.command.code == ResponseCode.SYSTEM_ERROR
    assert "Input/output error" in (event.command.remark or "")
    assert service.channel.charged_bytes == 0


def test_long_work_that_waits_for_the_disk_keeps_its_turn() -> None:
    service, works = long_disk_service(Disk(1))
    waiting: list[tuple[Callable[[], None], Callable[[OSError | None], None]]] = []
    service.registry.run_fetch = lambda _, wait, then: waiting.append((wait.fetch, then))
    connection: Connection[str] = Connection(SerializeType.JSON)
    for topic in ("first", "second"):
        ask(service, connection, topic)
    list(works.pop())
    ((fetch, then),) = waiting
    assert works == []
    assert answer_codes(service.channel) == []
    fetch()
    then(None)
    list(works.pop())
    assert answer_codes(service.channel) == [0, 0]
    assert service.channel.charged_bytes == 0


@pytest.mark.parametrize("is_begun", [True, False])
def test_long_work_of_a_client_that_has_left_ends_if_it_has_begun(is_begun: bool) -> None:
    steps: list[str] = []

    async def change(_: Request) -> Reply:
        steps.append("begun")
        await NotReady(lambda: None, LANE)
        steps.append("ended")
        return Reply()

    service, works, waiting = Service(), list[Iterator[None]](), list[Then]()
    service.registry = Registry(lambda _, error: service.unexpected.append(str(error)))
    service.registry.route_long(RequestCode.GET_MIN_OFFSET, change)
    service.registry.run_long = works.append
    service.registry.slice_s = 0.0
    service.registry.run_fetch = lambda _channel, _wait, then: waiting.append(then)
    ask(service, Connection(SerializeType.JSON), "t")
    if is_begun:
        list(works.pop())
    service.channel.is_open = False
    for then in waiting:
        then(None)
    for work in works:
        list(work)
    assert steps == ["begun", "ended"] * is_begun
    assert service.channel.charged_bytes == 0


def work_for(seconds: float) -> Reply:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return Reply()


def run_all(works: list[Iterator[None]]) -> None:
    while works:
        list(works.pop())


def pass_on(runs: list[Run], _: Request) -> Reply:
    async def serve(_: Request) -> Reply:
        await Until("another broker", runs.append)
        return Reply()

    raise ServedElsewhere(1, "another broker leads", serve)


@pytest.mark.parametrize(
    ("code", "late_s", "reported"),
    [
        (RequestCode.GET_MIN_OFFSET, 0.0, ["tests"]),
        (RequestCode.GET_MAX_OFFSET, 0.0, ["a flush, a save or a client"]),
        (RequestCode.QUERY_MESSAGE, 0.0, ["its turn", "slices", "tests", "the client's reads"]),
        (RequestCode.GET_CONSUMER_LIST_BY_GROUP, 0.0, ["its own work"]),
        (RequestCode.END_TRANSACTION, 0.0, ["another broker"]),
        (RequestCode.PULL_MESSAGE, 0.0, []),
        (RequestCode.GET_MIN_OFFSET, 60.0, []),
    ],
)
def test_late_answers_are_reported_with_their_waits(
    code: RequestCode, late_s: float, reported: list[str]
) -> None:
    service, works, waits, disk = Service(), list[Iterator[None]](), list[str](), Disk(1)
    fetches, runs = list[tuple[NotReady, Then]](), list[Run]()
    service.registry = registry = Registry(
        lambda _, error: service.unexpected.append(str(error)),
        run_long=works.append,
        late_s=late_s,
        on_late=lambda _, waited_s: waits.extend(waited_s),
    )
    registry.run_fetch = lambda _, wait, then: fetches.append((wait, then))
    registry.route(RequestCode.GET_MIN_OFFSET, disk.serve)
    registry.route(RequestCode.GET_CONSUMER_LIST_BY_GROUP, lambda _: work_for(0.006))
    registry.route(RequestCode.GET_MAX_OFFSET, service.hold)
    registry.route(RequestCode.PULL_MESSAGE, service.hold)
    registry.route(RequestCode.END_TRANSACTION, partial(pass_on, runs))
    registry.route_long(RequestCode.QUERY_MESSAGE, partial(each_offset, disk))
    service.channel.is_slow = True
    service.take(encode_frame(0, code, 1, fields={"topic": "t", "queueId": 3}))
    run_all(works)
    service.channel.is_slow = False
    if service.channel.on_drained:
        service.channel.on_drained()
    run_all(works)
    for wait, then in fetches:
        disk.run(service.channel, wait, then)
    run_all(works)
    for run in runs:
        run.resume()
    for request in service.held:
        request.reply(Reply())
    assert sorted(waits) == sorted(reported)


def test_slow_requests_are_told_by_name() -> None:
    def takes_6_ms(request: Request) -> Reply:
        until = time.perf_counter() + 0.006
        while time.perf_counter() < until:
            pass
        return offset(request)

    service, slow = Service(), []
    service.registry.functions[RequestCode.GET_MIN_OFFSET] = takes_6_ms
    service.registry.on_slow = lambda name, seconds: slow.append((name, seconds > 0.005))
    ask(service, Connection(SerializeType.JSON), "t")
    assert slow == [("GET_MIN_OFFSET", True)]
