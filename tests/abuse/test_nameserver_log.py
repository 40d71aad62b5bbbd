"""The nameserver's log names who asked for a change, and no host can flood it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import structlog.testing
import trio
import trio.testing

from headrace_daemon.host_log import LINES_MAX
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.bodies import QueueData, TopicRouteData
from headrace_protocol.codes import RequestCode
from headrace_protocol.nameserver_headers import (
    KVKeyHeader,
    PutKVConfigHeader,
    TopicInNamesrvHeader,
    UnregisterBrokerHeader,
    WritePermOfBrokerHeader,
)
from tests.support.channel import MemoryChannel
from tests.support.nameserver import NameServerUnderTest, frame, register_body, register_header

CLIENT = "192.0.2.8:50000"
ROUTE = TopicRouteData(queue_datas=[QueueData(broker_name="b0", perm=6)])


def client() -> MemoryChannel:
    channel = MemoryChannel()
    channel.address = CLIENT
    return channel


@pytest.mark.parametrize(
    ("code", "header", "body"),
    [
        (RequestCode.PUT_KV_CONFIG, PutKVConfigHeader(namespace="n", key="k", value="v"), b""),
        (RequestCode.DELETE_KV_CONFIG, KVKeyHeader(namespace="n", key="k"), b""),
        (RequestCode.WIPE_WRITE_PERM_OF_BROKER, WritePermOfBrokerHeader(broker_name="b0"), b""),
        (RequestCode.ADD_WRITE_PERM_OF_BROKER, WritePermOfBrokerHeader(broker_name="b0"), b""),
        (RequestCode.DELETE_TOPIC_IN_NAMESRV, TopicInNamesrvHeader(topic="T"), b""),
        (RequestCode.REGISTER_TOPIC_IN_NAMESRV, TopicInNamesrvHeader(topic="N"), ROUTE.encode()),
        (
            RequestCode.UNREGISTER_BROKER,
            UnregisterBrokerHeader(
                broker_name="b0", broker_addr="127.0.0.1:10911", cluster_name="c0", broker_id=0
            ),
            b"",
        ),
        (RequestCode.REGISTER_BROKER, register_header(name="b1", address="b:1"), b""),
        # Refused.
        (RequestCode.REGISTER_BROKER, register_header(address="b:1"), b""),
    ],
    ids=lambda value: value.name if isinstance(value, RequestCode) else "",
)
def test_a_change_is_logged_with_its_client(
    code: RequestCode, header: msgspec.Struct, body: bytes
) -> None:
    server = NameServerUnderTest(channel=client())
    registered = register_body("T", "U").encode()
    server.ask(RequestCode.REGISTER_BROKER, register_header(), registered)
    with structlog.testing.capture_logs() as logs:
        server.ask(code, header, body)
    assert [entry["client"] for entry in logs] == [CLIENT]


def test_a_refused_registration_is_logged_with_both_addresses() -> None:
    server = NameServerUnderTest()
    server.ask(RequestCode.REGISTER_BROKER, register_header())
    with structlog.testing.capture_logs() as logs:
        server.ask(RequestCode.REGISTER_BROKER, register_header(address="b:1"), channel=client())
    (entry,) = logs
    assert "b:1" in entry["reason"]
    assert "127.0.0.1:10911" in entry["reason"]


@pytest.mark.parametrize(
    ("code", "header"),
    [
        (
            RequestCode.WIPE_WRITE_PERM_OF_BROKER,
            WritePermOfBrokerHeader(broker_name="x" * 100_000),
        ),
        (RequestCode.DELETE_TOPIC_IN_NAMESRV, TopicInNamesrvHeader(topic="x" * 100_000)),
        (
            RequestCode.DELETE_TOPIC_IN_NAMESRV,
            TopicInNamesrvHeader(topic="T", cluster_name="x" * 100_000),
        ),
        (RequestCode.DELETE_KV_CONFIG, KVKeyHeader(namespace="n", key="x" * 100_000)),
        (RequestCode.REGISTER_BROKER, register_header(name="x" * 100_000)),
    ],
)
def test_a_line_of_the_log_is_bounded(code: RequestCode, header: Any) -> None:
    server = NameServerUnderTest()
    with structlog.testing.capture_logs() as logs:
        assert server.ask(code, header)[0].code == 29
    assert len(repr(logs)) < 1000


async def test_the_lines_of_a_host_are_bounded(autojump_clock: object) -> None:
    network = MemoryNetwork()
    config = NameServerConfig(listen_port=0)
    wipe = frame(RequestCode.WIPE_WRITE_PERM_OF_BROKER, WritePermOfBrokerHeader(broker_name="b0"))
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            address = await nursery.start(NameServer(config, network).run)
            stream = await network.connect(address)
            await stream.send(wipe * 500)
            await trio.sleep(6)
            nursery.cancel_scope.cancel()
    wiped = [entry for entry in logs if entry["event"] == "write permission wiped"]
    (left_out,) = [entry for entry in logs if entry["event"] == "lines suppressed"]
    assert (len(wiped), left_out["count"]) == (LINES_MAX, 500 - LINES_MAX)
