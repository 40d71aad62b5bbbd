"""A static topic has one incarnation id, and is compacted, also at a broker that joins later."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from headrace.admin import statictopic
from headrace.admin.client import Admin
from headrace_protocol.admin_headers import GetTopicConfigHeader, TopicConfigResponseHeader
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.aio import AsyncConnection, open_stream
from tests.support.running_brokers import Brokers, brokers


async def incarnation(mq: Brokers, name: str) -> str | None:
    address = mq.brokers[name].address
    async with trio.open_nursery() as nursery:
        connection = AsyncConnection(await open_stream(mq.network.connect, address), address)
        nursery.start_soon(connection.run)
        header = GetTopicConfigHeader(topic="T")
        answer = await connection.request(RequestCode.GET_TOPIC_CONFIG, header, timeout_ms=9000)
        nursery.cancel_scope.cancel()
    return answer.expect().command.header(TopicConfigResponseHeader).incarnation


async def test_a_broker_that_joins_later_asks_another(tmp_path: Path) -> None:
    async with brokers(tmp_path, ["a", "b"]) as mq:
        async with Admin(**mq.at) as admin:
            await admin.create_static_topic("T", 2, brokers=["a", "b"])
            first = {await incarnation(mq, name) for name in "ab"}
            assert len(first) == 1
            await mq.start("c")
            await admin.create_static_topic("T", 3, brokers=["c"])
        assert {await incarnation(mq, name) for name in "abc"} == first


async def test_a_broker_that_joins_by_a_tool_without_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes = {"cleanup.policy": "COMPACTION", "key.queue": "java"}
    async with brokers(tmp_path, ["a", "b"]) as mq:
        async with Admin(**mq.at) as admin:
            await admin.create_static_topic("T", 2, attributes=attributes)
            await mq.start("c")
            monkeypatch.setattr(statictopic, "_attributes", lambda _configs: {})
            await admin.remap_static_topic("T", ["c"])
            found = await admin.topic("T")
        assert {name: config.attributes for name, config in found.items()} == dict.fromkeys(
            "abc", attributes
        )
