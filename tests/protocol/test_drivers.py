"""The client drivers, trio, asyncio and blocking, against a scripted server on real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import anyio
import pytest
import trio
import trio.testing

from headrace_daemon.network import MemoryByteStream, MemoryNetwork
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_ONEWAY
from headrace_protocol.connection import RequestReceived
from headrace_protocol.drivers.address import split_address
from headrace_protocol.drivers.aio import AsyncConnection, connect_tcp, open_stream
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.drivers.errors import (
    BrokerError,
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    MalformedAnswer,
    RequestTimeout,
    WrongServer,
)
from headrace_protocol.frame import Buffer
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import GetMinOffsetHeader, OffsetResponseHeader
from headrace_protocol.serving import Reply
from tests.support.ports import free_port
from tests.support.running import in_background
from tests.support.scripted import Scripted, close, scripted, scripted_in_thread

CODE = RequestCode.GET_MIN_OFFSET
HEADER = GetMinOffsetHeader(topic="T", queue_id=1)


class AsyncFace:
    """One request at a time over an AsyncConnection, as a blocking call."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def ask(self, address: str, *requests: Any, timeout_ms: int = 5000) -> list[Any]:
        async def main() -> None:
            stream = await open_stream(connect_tcp, address)
            connection = AsyncConnection(stream, address)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(connection.run)
                try:
                    for code, header, body in requests:
                        answers.append(
                            await connection.request(code, header, body, timeout_ms=timeout_ms)
                        )
                except HeadraceError as error:
                    answers.append(error)
                tasks.cancel_scope.cancel()

        answers: list[Any] = []
        anyio.run(main, backend=self.backend)
        return answers


class BlockingFace:
    def ask(self, address: str, *requests: Any, timeout_ms: int = 5000) -> list[Any]:
        answers: list[Any] = []
        with BlockingConnection.connect(address) as connection:
            try:
                for code, header, body in requests:
                    answers.append(connection.request(code, header, body, timeout_ms=timeout_ms))
            except HeadraceError as error:
                answers.append(error)
        return answers


@pytest.fixture(params=["trio", "asyncio", "blocking"])
def face(request: pytest.FixtureRequest) -> AsyncFace | BlockingFace:
    return BlockingFace() if request.param == "blocking" else AsyncFace(request.param)


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted_in_thread() as (script,):
        yield script


# -- one suite for all drivers ---------------------------------------------------------------------


def test_requests_are_answered(face: AsyncFace | BlockingFace, server: Scripted) -> None:
    server.answer(CODE, lambda asked: Reply(OffsetResponseHeader(offset=7), (asked.body,)))
    first, second = face.ask(server.address, (CODE, HEADER, b"a"), (CODE, HEADER, b"b" * 200_000))
    assert first.expect().header(OffsetResponseHeader).offset == 7
    assert bytes(first.body) == b"a"
    assert bytes(second.body) == b"b" * 200_000


def test_an_answer_of_several_megabytes_arrives_whole(
    face: AsyncFace | BlockingFace, server: Scripted
) -> None:
    body = bytes(range(256)) * 20_000
    server.answer(CODE, Reply(body=(body,)))
    (answer,) = face.ask(server.address, (CODE, HEADER, b""))
    assert bytes(answer.body) == body


def test_a_large_answer_that_is_cut_off_fails_what_waits(face: AsyncFace | BlockingFace) -> None:
    def serve(listener: Any) -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(1000)
            accepted.sendall(encode_frame(0, CODE, 1, flag=1, body_bytes=10_000_000))
            accepted.sendall(bytes(5_000_000))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        (error,) = face.ask(f"127.0.0.1:{listener.getsockname()[1]}", (CODE, HEADER, b""))
        thread.join()
    assert isinstance(error, ConnectionLost)
    assert error.retryable


def test_a_refusal_is_a_response_until_a_success_is_expected(
    face: AsyncFace | BlockingFace, server: Scripted
) -> None:
    server.answer(CODE, Reply(code=ResponseCode.TOPIC_NOT_EXIST, remark="no T here"))
    (answer,) = face.ask(server.address, (CODE, HEADER, b""))
    assert answer.expect(ResponseCode.TOPIC_NOT_EXIST) is answer
    with pytest.raises(BrokerError) as caught:
        answer.expect()
    error = caught.value
    assert (error.code, error.remark, error.address) == (17, "no T here", server.address)
    assert (error.retryable, error.refresh_route) == (True, True)
    assert "GET_MIN_OFFSET" in str(error)
    assert "headrace topic create" in str(error)


def test_an_answer_without_its_fields_is_malformed(
    face: AsyncFace | BlockingFace, server: Scripted
) -> None:
    (answer,) = face.ask(server.address, (CODE, HEADER, b""))
    with pytest.raises(MalformedAnswer, match="offset"):
        answer.header(OffsetResponseHeader)


def test_a_connection_that_ends_fails_what_waits(
    face: AsyncFace | BlockingFace, server: Scripted
) -> None:
    server.answer(CODE, close)
    (error,) = face.ask(server.address, (CODE, HEADER, b""))
    assert isinstance(error, ConnectionLost)
    assert error.retryable
    assert server.address in str(error)


def test_silence_is_a_timeout_that_names_request_and_server(
    face: AsyncFace | BlockingFace, server: Scripted
) -> None:
    server.answer(CODE, None)
    (error,) = face.ask(server.address, (CODE, HEADER, b""), timeout_ms=20)
    assert isinstance(error, RequestTimeout)
    assert "GET_MIN_OFFSET" in str(error)
    assert server.address in str(error)


def test_a_server_of_another_protocol_is_named(face: AsyncFace | BlockingFace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1000)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (error,) = face.ask(address, (CODE, HEADER, b""))
        thread.join()
    assert isinstance(error, WrongServer)
    assert str(error).startswith(f"{address}: speaks HTTP")


def test_a_connection_that_was_reset_has_no_number() -> None:
    reset = ConnectionResetError(104, "Connection reset by peer")
    assert str(ConnectionLost("b:1", reset)).endswith("is closed: Connection reset by peer")
    assert str(ConnectionLost("b:1", "its end")).endswith("is closed: its end")


@pytest.mark.parametrize(
    ("code", "remark", "has_remedy"),
    [
        (16, None, True),
        (16, "the topic[T] sending message is forbidden", True),
        (16, "the broker[b] pulling message is forbidden", True),
        (16, "reviveQueueNum can't change while the broker runs", False),
        (17, "no route info of this topic: T", True),
        (17, "no topic T: create it with `headrace topic create T`", False),
    ],
)
def test_a_remedy_fits_the_remark(code: int, remark: str | None, has_remedy: bool) -> None:
    error = BrokerError(code, remark, "b:1", RequestCode.SEND_MESSAGE)
    assert str(error).endswith(")") == has_remedy


def test_nobody_there_is_an_error_with_the_address(face: AsyncFace | BlockingFace) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectFailed, match=f"{address}: Connection refused"):
        face.ask(address, (CODE, HEADER, b""))


# -- asynchronous ----------------------------------------------------------------------------------


class Running:
    """A connection to a scripted server, both in memory."""

    def __init__(self, on_request: Callable[..., Any] | None = None) -> None:
        self.on_request = on_request

    async def __aenter__(self) -> tuple[Scripted, AsyncConnection]:
        network = MemoryNetwork()
        self._servers = scripted(network)
        (self.server,) = await self._servers.__aenter__()
        stream = await network.connect(self.server.address)
        self.connection = AsyncConnection(stream, self.server.address, self.on_request)
        self._nursery = trio.open_nursery()
        nursery = await self._nursery.__aenter__()
        nursery.start_soon(self.connection.run)
        self.stop = nursery.cancel_scope.cancel
        return self.server, self.connection

    async def __aexit__(self, *error: Any) -> None:  # noqa: PYI036 - a nursery wants its own
        self.stop()
        await self._nursery.__aexit__(*error)
        await self._servers.__aexit__(*error)


async def test_a_burst_of_requests_leaves_in_one_send() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    connection = AsyncConnection(MemoryByteStream(ours), "memory")
    answers = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(100):
            connection.submit(CODE, HEADER, b"x", lambda *answer: answers.append(answer))
        burst = await theirs.receive_some()
        assert burst.count(b'"code":31') == 100
        await theirs.aclose()
    assert len(answers) == 100
    assert all(isinstance(error, ConnectionLost) for _, _, error in answers)


async def test_callbacks_come_once_and_in_the_order_of_the_answers() -> None:
    async with Running() as (server, connection):
        server.answer(CODE, lambda asked: Reply(body=(asked.body,)))
        bodies = []
        done = trio.Event()

        def callback(_command: object, body: Buffer | None, _error: object) -> None:
            bodies.append(bytes(body or b""))
            if len(bodies) == 50:
                done.set()

        for number in range(50):
            connection.submit(CODE, HEADER, b"%d" % number, callback)
        await done.wait()
        assert bodies == [b"%d" % number for number in range(50)]


async def test_a_cancelled_request_leaves_the_connection_usable() -> None:
    async with Running() as (server, connection):
        server.answer(CODE, None, Reply(body=(b"second",)))
        with trio.CancelScope() as scope:
            scope.cancel()
            await connection.request(CODE, HEADER, timeout_ms=1000)
        answer = await connection.request(CODE, HEADER, timeout_ms=1000)
        assert bytes(answer.body) == b"second"


async def test_a_late_answer_goes_to_nobody(autojump_clock: object) -> None:
    async with Running() as (server, connection):
        server.answer(CODE, None)
        with pytest.raises(RequestTimeout):
            await connection.request(CODE, HEADER, timeout_ms=60_000)
        late = server.last(CODE)
        server.answer(CODE, Reply(body=(b"mine",)))
        late.channel.write(encode_frame(0, 0, 1, flag=1))
        answer = await connection.request(CODE, HEADER, timeout_ms=1000)
        assert bytes(answer.body) == b"mine"
        assert trio.current_time() >= 60


async def test_requests_of_the_server_reach_the_handler_and_are_answered() -> None:
    requests = []

    def on_request(connection: AsyncConnection, request: RequestReceived) -> None:
        requests.append(request.command.code)
        connection.respond(request, 0, body=b"info")

    async with Running(on_request) as (server, connection):
        await connection.request(CODE, HEADER, timeout_ms=1000)
        channel = server.last(CODE).channel
        channel.write(encode_frame(0, RequestCode.GET_CONSUMER_RUNNING_INFO, 9))
        await trio.testing.wait_all_tasks_blocked()
        assert requests == [RequestCode.GET_CONSUMER_RUNNING_INFO]


async def test_a_connection_without_a_handler_ignores_notices() -> None:
    async with Running() as (server, connection):
        await connection.request(CODE, HEADER, timeout_ms=1000)
        notice = encode_frame(0, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, 9, flag=FLAG_ONEWAY)
        server.last(CODE).channel.write(notice)
        await connection.request(CODE, HEADER, timeout_ms=1000)


async def test_headers_become_msgpack_with_a_server_of_ours() -> None:
    async with Running() as (server, connection):
        server.is_headrace = True
        await connection.request(CODE, HEADER, timeout_ms=1000)
        await connection.request(CODE, HEADER, timeout_ms=1000)
        assert server.last(CODE).serialize_type == SerializeType.MSGPACK


@pytest.mark.parametrize("ours", [True, False])
async def test_the_first_answer_tells_of_what_kind_the_server_is(
    ours: bool, autojump_clock: object
) -> None:
    async with Running() as (server, connection):
        server.is_headrace = ours
        await connection.greeted(1000)
        assert trio.current_time() >= 1, "nobody has asked anything"
        assert not connection.is_greeted
        connection.submit(CODE, HEADER, b"", lambda *_: None)
        await connection.greeted(1000)
        assert connection.is_greeted
        assert connection.peer_is_headrace == ours


async def test_nobody_waits_for_the_greeting_of_a_connection_that_ended(
    autojump_clock: object,
) -> None:
    running = Running()
    async with running as (_, connection):
        running.stop()
    await connection.greeted(1000)
    assert trio.current_time() < 1


async def test_what_comes_before_the_writer_is_free_goes_into_one_write() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    connection = AsyncConnection(MemoryByteStream(ours), "memory")
    waiting: list[bytes] = []

    def fill() -> None:
        connection.send_soon(b"".join(waiting))
        waiting.clear()

    async with in_background(connection.run):
        await trio.testing.wait_all_tasks_blocked()
        waiting.append(b"a")
        connection.before_write(fill)
        waiting.append(b"b")
        connection.send_soon(b"!")
        assert await theirs.receive_some() == b"!ab"


async def test_a_fill_of_a_connection_that_ends_finds_it_closed() -> None:
    found = []
    async with Running() as (server, connection):
        server.answer(CODE, close)

        def fill_when_it_failed(*_: Any) -> None:
            connection.before_write(lambda: found.append(connection.is_open))

        connection.submit(CODE, HEADER, b"", fill_when_it_failed)
        await trio.testing.wait_all_tasks_blocked()
    assert found == [False]


async def test_large_bodies_arrive_between_small_ones() -> None:
    async with Running() as (server, connection):
        server.answer(CODE, lambda asked: Reply(body=(asked.body,)))
        bodies = [b"%d" % n * size for n, size in enumerate((1, 100_000, 2, 250_000, 200_000, 3))]
        found = []
        for body in bodies:
            connection.submit(
                CODE, HEADER, body, lambda _c, body, _e: found.append(bytes(body or b""))
            )
        await connection.request(CODE, HEADER, timeout_ms=1000)
        assert found == bodies


async def test_a_closed_connection_refuses_requests_at_once() -> None:
    running = Running()
    async with running as (_, connection):
        assert connection.is_open
        running.stop()
    assert not connection.is_open
    with pytest.raises(ConnectionLost, match="this client closed it"):
        await connection.request(CODE, HEADER, timeout_ms=1000)
    with pytest.raises(ConnectionLost):
        connection.oneway(CODE, HEADER)


async def test_a_stream_that_breaks_while_writing_ends_the_connection() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    connection = AsyncConnection(MemoryByteStream(ours), "memory")
    theirs.receive_stream.close()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        with pytest.raises(ConnectionLost):
            await connection.request(CODE, HEADER, timeout_ms=1000)
    assert not connection.is_open


async def test_connecting_takes_a_limited_time(autojump_clock: object) -> None:
    async def never(_address: str) -> NoReturn:
        await trio.sleep_forever()

    with pytest.raises(ConnectFailed, match="no answer within 5 s"):
        await open_stream(never, "somewhere:1")


# -- blocking --------------------------------------------------------------------------------------


def test_blocking_requests_can_be_pipelined(server: Scripted) -> None:
    server.answer(CODE, lambda asked: Reply(body=(asked.body,)))
    bodies = []
    with BlockingConnection.connect(server.address) as connection:
        for number in range(200):
            body = b"%d" % number * 5000
            connection.submit(CODE, HEADER, body, lambda answer: bodies.append(bytes(answer.body)))
            connection.drain(100, timeout_ms=5000)
        connection.drain(timeout_ms=5000)
    assert bodies == [b"%d" % number * 5000 for number in range(200)]


def test_blocking_oneway_requests_go_out_with_the_next_wait(server: Scripted) -> None:
    with BlockingConnection.connect(server.address) as connection:
        connection.oneway(RequestCode.UPDATE_CONSUMER_OFFSET, HEADER)
        connection.request(CODE, HEADER, timeout_ms=5000)
    assert server.last(RequestCode.UPDATE_CONSUMER_OFFSET).is_oneway


def test_a_closed_blocking_connection_refuses_requests(server: Scripted) -> None:
    connection = BlockingConnection.connect(server.address)
    connection.close()
    with pytest.raises(ConnectionLost):
        connection.request(CODE, HEADER, timeout_ms=100)


def test_drain_gives_up_in_time(server: Scripted) -> None:
    server.answer(CODE, None)
    with BlockingConnection.connect(server.address) as connection:
        connection.submit(CODE, HEADER, b"", lambda _answer: None)
        with pytest.raises(RequestTimeout):
            connection.drain(timeout_ms=20)


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9876", ("127.0.0.1", 9876)),
        ("broker.example:1", ("broker.example", 1)),
        ("[::1]:10911", ("::1", 10911)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(text)
