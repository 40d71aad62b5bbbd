"""A broker stays registered, whatever becomes of its nameserver and the way to it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing

from headrace import Admin
from headrace_broker.cluster.registration import IdentityTaken
from headrace_broker.server import Broker
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.admin_headers import CreateTopicHeader, DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.aio import AsyncConnection
from headrace_protocol.nameserver_headers import GetRouteInfoHeader
from headrace_protocol.serving import Reply
from tests.support.running import nameserver, small_config
from tests.support.scripted import scripted

NAMESERVER = "127.0.0.1:9876"


async def run_broker(
    network: MemoryNetwork,
    folder: Path,
    task_status: trio.TaskStatus[str],
    at: str = NAMESERVER,
) -> None:
    config = small_config(
        folder, listen_port=0, namesrv_addr=at, mapped_file_size_consume_queue=20_000
    )
    await Broker(config, network).run(task_status=task_status)


async def registered(network: MemoryNetwork) -> list[str]:
    async with Admin(nameserver=NAMESERVER, connect=network.connect) as admin:
        return [node.address for node in await admin.cluster()]


async def test_a_nameserver_that_starts_again_hears_of_the_broker_at_once(
    tmp_path: Path, autojump_clock: object
) -> None:
    network = MemoryNetwork()
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            async with nameserver(network):
                address = await nursery.start(run_broker, network, tmp_path)
                assert await registered(network) == [address]
            for _ in range(3):
                await trio.sleep(50)
                async with nameserver(network):
                    # Well before the next period of 30 s.
                    await trio.sleep(5)
                    assert await registered(network) == [address]
            await trio.sleep(50)
            nursery.cancel_scope.cancel()
    events = [entry["event"] for entry in logs]
    assert events.count("registered") == 4
    place = f"nameserver {NAMESERVER}"
    # Once for each time that it was away and each half minute, not once for each try.
    assert [event.partition(": ")[0] for event in events if event.startswith(place)] == [
        f"{place} is unavailable, retrying",
        f"{place} has been unavailable for 30 s (16 attempts)",
        f"{place} is available again after 52 s",
    ] * 3 + [
        f"{place} is unavailable, retrying",
        f"{place} has been unavailable for 30 s (16 attempts)",
    ]


async def test_a_nameserver_that_denies_the_registration_is_an_outage_with_a_way_out(
    tmp_path: Path, autojump_clock: object
) -> None:
    network = MemoryNetwork()
    denial = "User:inner has no permission to access Cluster:c from 127.0.0.1, no matched policies."
    async with scripted(network) as (server,), trio.open_nursery() as nursery:
        denied = Reply(code=ResponseCode.NO_PERMISSION, remark=denial)
        for code in (RequestCode.GET_BROKER_MEMBER_GROUP, RequestCode.REGISTER_BROKER):
            server.answer(code, denied)
        with structlog.testing.capture_logs() as logs:
            await nursery.start(partial(run_broker, network, tmp_path, at=server.address))
            await trio.sleep(20)
        nursery.cancel_scope.cancel()
    [line] = [each["event"] for each in logs if "unavailable" in each["event"]]
    assert f"{denial} (set innerClientAuthenticationCredentials to those of" in line


async def test_two_brokers_with_one_identity_are_told_apart(
    tmp_path: Path, autojump_clock: object
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery, nameserver(network):
        address = await nursery.start(run_broker, network, tmp_path / "one")
        with pytest.RaisesGroup(
            pytest.RaisesExc(IdentityTaken, match=f"already runs at {address}.*another brokerName"),
            flatten_subgroups=True,
        ):
            async with trio.open_nursery() as second:
                await second.start(run_broker, network, tmp_path / "two")
        assert await registered(network) == [address]
        nursery.cancel_scope.cancel()


async def test_a_topic_is_known_everywhere_when_its_making_is_answered(
    tmp_path: Path, autojump_clock: object
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery, nameserver(network):
        address = await nursery.start(run_broker, network, tmp_path)
        broker = AsyncConnection(await network.connect(address), address)
        known = AsyncConnection(await network.connect(NAMESERVER), NAMESERVER)
        nursery.start_soon(broker.run)
        nursery.start_soon(known.run)
        for number in range(50):
            topic = f"topic-{number}"
            header = CreateTopicHeader(
                topic=topic,
                read_queue_nums=1,
                write_queue_nums=1,
                perm=6,
                topic_filter_type="SINGLE_TAG",
            )
            made = await broker.request(
                RequestCode.UPDATE_AND_CREATE_TOPIC, header, timeout_ms=1000
            )
            made.expect()
            route = GetRouteInfoHeader(topic=topic)
            found = await known.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, route, timeout_ms=1000)
            found.expect()
            gone = await broker.request(
                RequestCode.DELETE_TOPIC_IN_BROKER,
                DeleteTopicHeader(topic=topic),
                timeout_ms=1000,
            )
            gone.expect()
        nursery.cancel_scope.cancel()


async def test_a_topic_is_made_without_a_nameserver_too(
    tmp_path: Path, autojump_clock: object
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        address = await nursery.start(run_broker, network, tmp_path)
        broker = AsyncConnection(await network.connect(address), address)
        nursery.start_soon(broker.run)
        header = CreateTopicHeader(
            topic="t",
            read_queue_nums=1,
            write_queue_nums=1,
            perm=6,
            topic_filter_type="SINGLE_TAG",
        )
        made = await broker.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header, timeout_ms=1000)
        made.expect()
        nursery.cancel_scope.cancel()
