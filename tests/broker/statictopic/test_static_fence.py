"""A broker that was away does not take messages for queues that moved meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog.testing
import trio
import trio.testing

from headrace_broker.server import Broker
from headrace_broker.statictopic.fence import Fence
from headrace_broker.statictopic.table import MAPPING_NAME, MappingTable
from headrace_broker.store.files.config_file import ConfigFile
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.bodies import (
    DataVersion,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicRouteData,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.aio import AsyncConnection, open_stream
from headrace_protocol.nameserver_headers import GetRouteInfoHeader, RegisterBrokerHeader
from headrace_protocol.registration import RegisterBrokerBody
from headrace_protocol.statictopic.mapping import MappingInfo
from headrace_protocol.waiting import at_once
from tests.broker.statictopic.test_static_changes import EPOCH, change, led_here, stored
from tests.support.broker import BrokerUnderTest
from tests.support.nameserver import HA_ADDRESS
from tests.support.running import nameserver, small_config
from tests.support.wire import send_header

NAMESERVER = "127.0.0.1:9876"
OTHER = "10.0.0.2:10911"
NO_LEADER = ResponseCode.SERVICE_NOT_AVAILABLE


def claim(*queues: int, epoch: int = EPOCH + 1000, bname: str = "broker-b") -> MappingInfo:
    return MappingInfo(
        topic="T",
        total_queues=2,
        bname=bname,
        epoch=epoch,
        curr_id_map=dict.fromkeys(queues, 7),
    )


def test_a_newer_claim_stops_a_queue_until_the_mapping_is_newer_still(
    broker: BrokerUnderTest,
) -> None:
    broker.clock.ms = EPOCH
    change(broker, led_here())
    fence, table = broker.part(Fence), broker.mappings
    before = broker.topics.data_version.counter
    for harmless in (
        claim(0, epoch=EPOCH),
        claim(0, epoch=EPOCH - 1),
        claim(0, bname="broker-a"),
        claim(),
    ):
        at_once(fence.compare("T", {harmless.bname: harmless}))
    assert table.led("T") == {0: 0, 1: 1}
    assert broker.topics.data_version.counter == before

    at_once(fence.compare("T", {"broker-b": claim(0)}))
    assert table.led("T") == {1: 1}
    assert table.led_count() == 1
    assert "broker-b leads it since" in (table.stopped("T", 0) or "")
    assert broker.topics.data_version.counter == before + 1  # nameservers learn it

    change(broker, led_here(epoch=EPOCH + 1000))
    assert table.led("T") == {1: 1}
    change(broker, led_here(epoch=EPOCH + 2000))
    assert table.led("T") == {0: 0, 1: 1}
    at_once(fence.compare("T", {"broker-b": claim(0)}))
    at_once(fence.compare("PLAIN", {"broker-b": claim(0)}))
    assert table.led("T") == {0: 0, 1: 1}
    assert stored(broker).epoch == EPOCH + 2000


@asynccontextmanager
async def connected(network: MemoryNetwork, address: str) -> AsyncIterator[AsyncConnection]:
    async with trio.open_nursery() as nursery:
        connection = AsyncConnection(await open_stream(network.connect, address), address)
        nursery.start_soon(connection.run)
        yield connection
        nursery.cancel_scope.cancel()


async def register_other(nameserver: AsyncConnection, info: MappingInfo) -> None:
    topic = TopicConfig(topic_name="T", read_queue_nums=8, write_queue_nums=8)
    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigSerializeWrapper(
            topic_config_table={"T": topic, "U": TopicConfig(topic_name="U")},
            data_version=DataVersion(timestamp=1, counter=1),
            topic_queue_mapping_info_map={"T": info},
        )
    )
    header = RegisterBrokerHeader(
        broker_name="broker-b",
        broker_addr=OTHER,
        cluster_name="DefaultCluster",
        ha_server_addr=HA_ADDRESS,
        broker_id=0,
        compressed=False,
        body_crc32=0,
    )
    answer = await nameserver.request(
        RequestCode.REGISTER_BROKER, header, body.encode(), timeout_ms=9000
    )
    answer.expect()


def store_with_mapping(folder: Path, *topics: str) -> None:
    """A store that has the topic T, behind others of these names."""
    table = MappingTable("broker-a", ConfigFile(folder / "config" / MAPPING_NAME), lambda: EPOCH)
    for topic in (*topics, "T"):
        table.put(msgspec.structs.replace(led_here(), topic=topic))
        table.marks.add(topic, "static-1")


@asynccontextmanager
async def running(network: MemoryNetwork, folder: Path) -> AsyncIterator[AsyncConnection]:
    config = small_config(
        folder, listen_port=0, namesrv_addr=NAMESERVER, mapped_file_size_consume_queue=20_000
    )
    async with trio.open_nursery() as nursery:
        address = await nursery.start(Broker(config, network).run)
        async with connected(network, address) as connection:
            yield connection
        nursery.cancel_scope.cancel()


async def send(broker: AsyncConnection, queue: int) -> int:
    header = send_header(queue)
    answer = await broker.request(RequestCode.SEND_MESSAGE_V2, header, b"body", timeout_ms=9000)
    return answer.command.code


async def test_a_broker_that_comes_back_asks_before_it_leads(tmp_path: Path) -> None:
    network = MemoryNetwork()
    store_with_mapping(tmp_path)
    async with nameserver(network), connected(network, NAMESERVER) as routes:
        await register_other(routes, claim(0))
        async with running(network, tmp_path) as broker:
            assert await send(broker, 0) == NO_LEADER
            assert await send(broker, 1) == ResponseCode.SUCCESS
            answer = await routes.request(
                RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoHeader(topic="T"), timeout_ms=9000
            )
            infos = answer.decode(TopicRouteData).topic_queue_mapping_by_broker
            assert infos is not None
            assert infos["broker-a"].curr_id_map == {1: 1}
            assert infos["broker-a"].epoch == EPOCH


async def test_a_claim_is_found_among_many_topics(tmp_path: Path) -> None:
    network = MemoryNetwork()
    store_with_mapping(tmp_path, *(f"T{number}" for number in range(70)))
    async with nameserver(network), connected(network, NAMESERVER) as routes:
        await register_other(routes, claim(0))
        async with running(network, tmp_path) as broker:
            assert await send(broker, 0) == NO_LEADER
            assert await send(broker, 1) == ResponseCode.SUCCESS


async def test_a_claim_that_appears_later_is_seen_within_a_period(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    network = MemoryNetwork()
    store_with_mapping(tmp_path)
    async with nameserver(network), running(network, tmp_path) as broker:
        assert await send(broker, 0) == ResponseCode.SUCCESS
        async with connected(network, NAMESERVER) as routes:
            await register_other(routes, claim(0))
            await trio.sleep(31)
        assert await send(broker, 0) == NO_LEADER


async def test_without_a_nameserver_the_broker_goes_by_its_own_mapping(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    network = MemoryNetwork()
    store_with_mapping(tmp_path)
    with structlog.testing.capture_logs() as logs:
        async with running(network, tmp_path) as broker:
            await trio.sleep(3.1)
            assert await send(broker, 0) == ResponseCode.SUCCESS
    assert any("using this broker's own mappings" in line["event"] for line in logs)
