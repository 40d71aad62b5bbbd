"""Clients can't take the file descriptors that the store needs."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace import Message, blocking
from headrace_daemon.serving.server import ServerLimits
from headrace_protocol.codes import RequestCode
from headrace_protocol.header_codecs import SerializeType, encode_frame
from tests.support.cluster import Cluster


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(100, 8), (200, 36), (1024, 384), (65_536, 20_000), (resource.RLIM_INFINITY, 20_000)],
)
def test_clients_get_what_the_store_leaves(
    monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert ServerLimits().connections_max == expected


@pytest.mark.slow
def test_a_broker_with_few_descriptors_serves_the_clients_it_accepted(tmp_path: Path) -> None:
    before = ("prlimit", "--nofile=200:200")
    with Cluster(tmp_path, "b", before=before) as cluster, ExitStack() as stack:
        broker = cluster.brokers["b"]
        host, port = broker.address.split(":")
        producer = stack.enter_context(blocking.Producer(nameserver=cluster.nameserver.address))
        producer.send(Message("first", b"before"))
        request = encode_frame(SerializeType.JSON, RequestCode.GET_BROKER_CONFIG, 1, body_bytes=0)
        answered = 0
        for _ in range(260):  # each says something, so none makes room for another
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            try:
                client.sendall(request)
                answered += bool(client.recv(1))
            except ConnectionError:
                break
        assert 0 < answered < 100
        for number in range(20):
            producer.send(Message(f"topic-{number}", b"while others hold what they could get"))
        broker.stop()
