"""Brokers that register, against a hostile nameserver or another broker of the same name."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from headrace_broker.cluster.registration import IdentityTaken, Registration
from headrace_broker.config import BrokerConfig
from headrace_broker.peers.nameservers import Nameservers
from headrace_broker.peers.peers import Peers
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.bodies import (
    BrokerMemberGroup,
    DataVersion,
    GetBrokerMemberGroupResponseBody,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.fastjson import Written
from headrace_protocol.serving import Reply
from headrace_protocol.tls.names import ServerNames
from headrace_protocol.waiting import take_break
from tests.support.nameserver import frame, register_header
from tests.support.scripted import Scripted, scripted

MEMBERS = RequestCode.GET_BROKER_MEMBER_GROUP
REGISTER = RequestCode.REGISTER_BROKER
OURS = "10.0.0.1:10911"


class NoTopics:
    """The part of a TopicTable that registration reads."""

    data_version = DataVersion()

    def registered(self, _broker_permission: int) -> dict[str, Any]:
        return {}


class NoMappings:
    """The part of a MappingTable that registration reads."""

    data_version = DataVersion()

    async def infos(self) -> Written:
        await take_break()
        return Written((b"{}",))


async def no_look(_nameserver: str) -> None:
    pass


def registration(peers: Peers, nameserver: str) -> Registration:
    return Registration(
        BrokerConfig(broker_name="broker-a"),
        Nameservers(peers, "DefaultCluster", [nameserver], ServerNames()),
        NoTopics(),  # type: ignore[arg-type]
        NoMappings(),
        no_look,
        OURS,
    )


@asynccontextmanager
async def registered(
    nameserver: Scripted, network: MemoryNetwork
) -> AsyncIterator[list[MutableMapping[str, Any]]]:
    """A broker that has started, and what it logs."""
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            peers = Peers(network.connect, lambda: 3000)
            nursery.start_soon(peers.run)
            await nursery.start(registration(peers, nameserver.address).run)
            yield logs
            nursery.cancel_scope.cancel()


def members(address: str) -> Reply:
    group = BrokerMemberGroup(broker_addrs={0: address})
    return Reply(body=(GetBrokerMemberGroupResponseBody(broker_member_group=group).encode(),))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[" * 5000,
        b'{"brokerMemberGroup":{"brokerAddrs":[7]}}',
        b'{"brokerMemberGroup":{"brokerAddrs":{"0":"..:1"}}}',
        b'{"brokerMemberGroup":{"brokerAddrs":{"0":"a\\u0000b:1"}}}',
        b'{"brokerMemberGroup":{"brokerAddrs":{"0":"' + b"x" * 300 + b':1"}}}',
    ],
    ids=["empty", "no-json", "deep", "wrong-types", "idna", "nul", "long"],
)
async def test_a_malformed_member_group_does_not_end_a_broker(
    body: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    network = MemoryNetwork()
    async with scripted(network) as (nameserver,):
        nameserver.answer(MEMBERS, Reply(body=(body,)), members(OURS))
        async with registered(nameserver, network) as logs:
            await trio.sleep(5)
            assert nameserver.count(REGISTER) == 1
    place = f"nameserver {nameserver.address}"
    *refused, last = [entry["event"] for entry in logs]
    assert [event.partition(",")[0] for event in refused] in (
        [],
        [f"{place} is unavailable", f"{place} is available again after 2 s"],
    )
    assert last == "registered"


@pytest.mark.parametrize(
    "answer",
    [Reply(code=ResponseCode.SYSTEM_ERROR, remark="x" * 10_000), Reply(body=(b"nonsense",))],
    ids=["refused", "foreign-body"],
)
async def test_no_answer_to_a_registration_ends_a_broker(
    answer: Reply, autojump_clock: trio.testing.MockClock
) -> None:
    network = MemoryNetwork()
    async with scripted(network) as (nameserver,):
        nameserver.answer(MEMBERS, members(OURS))
        nameserver.answer(REGISTER, answer, Reply())
        async with registered(nameserver, network) as logs:
            await trio.sleep(65)
            assert nameserver.count(REGISTER) > 1
        assert logs[-1]["event"] == "registered"


async def test_a_taken_name_ends_a_start(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    async with scripted(network, 2) as (nameserver, other):
        nameserver.answer(MEMBERS, members(other.address))
        with pytest.RaisesGroup(
            pytest.RaisesExc(IdentityTaken, match=f"already runs at {other.address}"),
            flatten_subgroups=True,
        ):
            async with trio.open_nursery() as nursery:
                peers = Peers(network.connect, lambda: 3000)
                nursery.start_soon(peers.run)
                await registration(peers, nameserver.address).run()
        assert nameserver.count(REGISTER) == 0


async def test_a_taken_name_does_not_end_a_running_broker(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    async with scripted(network, 2) as (nameserver, other):
        nameserver.answer(
            MEMBERS,
            members(OURS),
            members(other.address),
            members(other.address),
            members(OURS),
        )
        async with registered(nameserver, network) as logs:
            nameserver.last(REGISTER).channel.close("")
            await trio.sleep(10)
            assert nameserver.count(MEMBERS) == 4
            assert nameserver.count(REGISTER) == 2
    refused, again = [event for entry in logs if (event := entry["event"]).startswith("the name")]
    assert f"already runs at {other.address}" in refused
    assert again.endswith("is available again after 4 s")
    assert logs[-1]["event"] == "registered"


async def test_a_name_is_taken_over_when_the_connection_that_holds_it_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        nameserver = NameServer(NameServerConfig(listen_port=0), network)
        address = await nursery.start(nameserver.run)
        stream = await network.connect(address)
        header = register_header(name="broker-a", address="127.0.0.9:1")
        await stream.send(frame(REGISTER, header))
        await stream.receive()
        # Nobody answers at that address, so it starts; the nameserver waits for the connection.
        with structlog.testing.capture_logs() as logs:
            peers = Peers(network.connect, lambda: 3000)
            nursery.start_soon(peers.run)
            await nursery.start(registration(peers, address).run)
            await trio.sleep(10)
            assert "registered" not in [entry["event"] for entry in logs]
            await stream.aclose()
            await trio.sleep(3)
            assert "registered" in [entry["event"] for entry in logs]
        nursery.cancel_scope.cancel()
    refused = [entry for entry in logs if entry["event"] == "broker not registered"]
    assert "127.0.0.9:1" in refused[0]["reason"]
    assert OURS in refused[0]["reason"]
