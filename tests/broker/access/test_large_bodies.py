"""Digests of large bodies are computed in threads, and a client's requests keep their order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from trio.testing import MockClock

from headrace_broker.server import Broker
from headrace_daemon.network import MemoryNetwork
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_protocol.channel import Channel
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import NotReady, RequestError
from headrace_protocol.frame import Frame, FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.message import decode_records
from headrace_protocol.rights.credentials import Credentials
from headrace_protocol.serving import LARGE_BODY_BYTES, Then
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.paused_clients import SEND, clients_of, codes
from tests.support.rights import rights_of, signed, users_of
from tests.support.wire import pull_header, send_header

OK, REFUSED = ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION
LARGE = bytes(LARGE_BODY_BYTES + 1)
FIELDS = {"a": "p", "b": "T", "c": "TBW102", "d": 1, "e": 0, "f": 0, "g": 1, "h": 0, "i": ""}


class Threads:
    """Digests that wait for ``run``."""

    def __init__(self) -> None:
        self.waiting: list[tuple[NotReady, Then]] = []

    def start(self, _channel: Channel, wait: NotReady, then: Then) -> None:
        self.waiting.append((wait, then))

    def run(self) -> None:
        ((wait, then),) = self.waiting
        self.waiting.clear()
        wait.fetch()
        then(None)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerUnderTest]:
    rights = rights_of(users_of(alice=["Topic:T Pub"], bob=["Topic:T Pub"]))
    broker = BrokerUnderTest(tmp_path, rights=rights, commit_log_file_bytes=1 << 23)
    broker.create_topic("T", 1)
    yield broker
    broker.close()
    assert not broker.unexpected


@pytest.fixture
def threads(broker: BrokerUnderTest) -> Threads:
    threads = Threads()
    broker.registry.run_fetch = threads.start
    return threads


def signer() -> MemoryChannel:
    channel = MemoryChannel()
    channel.is_greeted = True
    return channel


def sends(*bodies: bytes, user: str = "alice", secret: str = "secret") -> list[Frame]:
    """Signed sends of one read; each opaque is its number."""
    data = b""
    for number, body in enumerate(bodies):
        data += encode_frame(
            SerializeType.JSON,
            RequestCode.SEND_MESSAGE_V2,
            number,
            fields=signed(user, FIELDS, body, secret),
            body_bytes=len(body),
        )
        data += body
    return FrameReader().feed(data)


def handle(broker: BrokerUnderTest, channel: MemoryChannel, frames: list[Frame]) -> list[Frame]:
    """Serve frames in a turn; returns those that were deferred."""
    loop = broker.core.serving.frames
    rest = loop.handle(cast("ServerChannel", channel), frames)
    loop.finish_turn()
    loop.replied()
    return rest


def replies(channel: MemoryChannel) -> list[tuple[int, int]]:
    return [(command.opaque, command.code) for command, _ in channel.replies()]


@pytest.mark.parametrize(("secret", "code"), [("secret", OK), ("wrong", REFUSED)])
def test_what_comes_behind_a_large_body_waits_for_it(
    broker: BrokerUnderTest, threads: Threads, secret: str, code: int
) -> None:
    alice, bob = signer(), signer()
    frames = sends(LARGE, secret=secret) + sends(b"-", b"1", b"2")[1:]
    rest = handle(broker, alice, frames)
    assert rest == frames[1:]
    assert handle(broker, alice, rest) == rest
    assert alice.charged_bytes > len(LARGE)
    assert handle(broker, bob, sends(b"b", user="bob")) == []
    assert (replies(alice), replies(bob)) == ([], [(0, OK)])
    threads.run()
    assert replies(alice) == [(0, code)]
    assert handle(broker, alice, rest) == []
    assert (replies(alice), alice.charged_bytes) == ([(1, OK), (2, OK)], 0)
    stored = [bytes(message.body)[-1:] for message in broker.stored("T")]
    assert stored == [b"b", *([b"\0"] if code == OK else []), b"1", b"2"]


def test_a_digest_that_fails_holds_nobody_up(broker: BrokerUnderTest, threads: Threads) -> None:
    """As when the client leaves before its turn."""
    alice = signer()
    rest = handle(broker, alice, sends(LARGE, b"1"))
    ((_, then),) = threads.waiting
    then(RequestError(ResponseCode.SYSTEM_ERROR, "the client has disconnected"))
    assert handle(broker, alice, rest) == []
    assert replies(alice) == [(0, ResponseCode.SYSTEM_ERROR), (1, OK)]


def test_a_small_body_and_one_of_a_session_wait_for_no_thread(
    broker: BrokerUnderTest, threads: Threads
) -> None:
    alice, logged_in = signer(), signer()
    logged_in.user = "alice"
    assert handle(broker, alice, sends(LARGE[:-1], b"1")) == []
    assert handle(broker, logged_in, sends(LARGE, b"1")) == []
    assert replies(alice) == replies(logged_in) == [(0, OK), (1, OK)]
    assert threads.waiting == []


async def test_a_running_broker_keeps_the_order(tmp_path: Path, mock_clock: MockClock) -> None:
    network = MemoryNetwork()
    settings = {
        "authentication_enabled": True,
        "auth_requires_tls": "none",
        "init_authentication_user": '{"username":"root","password":"a password of root"}',
        "inner_client_authentication_credentials": '{"accessKey":"inner","secretKey":"of brokers"}',
    }
    broker = Broker(broker_config(tmp_path, bind_address="127.0.0.1", **settings), network)
    async with clients_of(broker, network, mock_clock, 1) as (client,):
        await client.become(Credentials("inner", "of brokers"), by_session=False)
        await client.send()
        sent = [LARGE, b"1", LARGE, b"2", b"3"]
        answers = [await client.begin(SEND, send_header(queue_id=0), body) for body in sent]
        while not all(answers):
            await client.rest()
        assert [codes(each) for each in answers] == [[OK]] * len(sent)
        stored: list[bytes] = []
        while len(stored) < len(sent):
            header = pull_header(queue_offset=1 + len(stored))
            found = await client.ask(RequestCode.PULL_MESSAGE, header)
            stored += [bytes(record.body) for record in decode_records(found.body)]
        assert stored == sent
