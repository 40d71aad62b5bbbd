"""Brokers that left: what is remembered of them, for how long, and what answers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_nameserver.config import ConfigError, NameServerConfig
from headrace_nameserver.departed import LIMITS, Departed, DepartedBrokers, Limits
from headrace_nameserver.departed_file import DepartedFile
from headrace_nameserver.routes import RouteTable
from headrace_nameserver.server import NameServer
from headrace_protocol.bodies import ClusterInfo, QueueData, TopicConfig, TopicRouteData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.departed import (
    ClusterInfoHeader,
    DepartedBroker,
    Departure,
    ForgetBrokerHeader,
)
from headrace_protocol.nameserver_headers import GetRouteInfoHeader, TopicInNamesrvHeader
from tests.support.channel import MemoryChannel
from tests.support.nameserver import (
    NameServerUnderTest,
    broker_topics,
    register_body,
    register_header,
)

HOUR_MS = 3_600_000
USERS = TopicConfig(
    topic_name="users",
    read_queue_nums=4,
    write_queue_nums=2,
    attributes={"cleanup.policy": "COMPACTION"},
)
ORDERS = TopicConfig(topic_name="orders", read_queue_nums=3, write_queue_nums=3)


def register(
    table: RouteTable,
    name: str,
    *topics: TopicConfig | str,
    host: str = "127.0.0.1",
    now_ms: int = 0,
    version: int = 1,
) -> MemoryChannel:
    """A broker's connection, on which it has registered its topics."""
    channel = MemoryChannel()
    channel.address = f"{host}:1"
    at = register_header(name, address=f"{name}:1")
    body = register_body(name, *(topics or (ORDERS, USERS)), version=version)
    table.register(at, broker_topics(at, body), channel, now_ms)
    return channel


@pytest.fixture
def server() -> NameServerUnderTest:
    """The brokers a and b, of which b has closed its connection a second ago."""
    server = NameServerUnderTest()
    register(server.table, "a", now_ms=server.now_ms)
    channel = register(server.table, "b", now_ms=server.now_ms)
    server.table.close_channel(channel, server.now_ms)
    server.now_ms += 1000
    return server


def route(server: NameServerUnderTest, topic: str) -> TopicRouteData:
    return TopicRouteData.decode(route_bytes(server, topic, departed=True))


def route_bytes(server: NameServerUnderTest, topic: str, *, departed: bool | None) -> bytes:
    header = GetRouteInfoHeader(topic=topic, accept_standard_json_only=True, departed=departed)
    command, data = server.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
    assert command.code == ResponseCode.SUCCESS, command.remark
    return bytes(data)


def missing(server: NameServerUnderTest, topic: str = "orders") -> list[str]:
    return [each.broker_name for each in route(server, topic).departed_brokers or ()]


def forget(server: NameServerUnderTest, name: str) -> tuple[int, str | None]:
    command, _ = server.ask(RequestCode.FORGET_BROKER, ForgetBrokerHeader(broker_name=name))
    return command.code, command.remark


def test_the_queues_of_a_broker_are_counted_once() -> None:
    counted: list[str] = []

    class Counted(Departed):
        @property
        def size(self) -> int:
            counted.append(self.name)
            return 1

    brokers = DepartedBrokers(HOUR_MS)
    for number in range(300):
        how = Departure.DISCONNECTED
        brokers.add(Counted(f"b{number}", "c", f"b{number}:1", "h", how, 0, {"t": QueueData()}))
    assert (len(counted), len(brokers)) == (300, LIMITS.departed_of_host)


# -- what answers say ------------------------------------------------------------------------------


def test_topics_without_queues_on_a_broker_do_not_miss_it(server: NameServerUnderTest) -> None:
    static = TopicConfig(topic_name="static", read_queue_nums=0, write_queue_nums=0)
    channel = register(server.table, "d", static, ORDERS, now_ms=server.now_ms)
    server.table.close_channel(channel, server.now_ms)
    command, data = server.ask(
        RequestCode.GET_BROKER_CLUSTER_INFO, ClusterInfoHeader(departed=True)
    )
    assert command.code == ResponseCode.SUCCESS
    left = {each.broker_name: each for each in ClusterInfo.decode(data).departed_brokers or ()}
    assert left["d"].topics == ["orders"]


def test_a_route_names_a_departed_broker_with_its_queues(server: NameServerUnderTest) -> None:
    gone = DepartedBroker(
        broker_name="b",
        broker_addr="b:1",
        cluster="c0",
        how="DISCONNECTED",
        since=server.wall_ms,
        read_queue_nums=3,
        write_queue_nums=3,
        perm=6,
    )
    found = route(server, "orders")
    assert found.departed_brokers == [gone]
    assert [queues.broker_name for queues in found.queue_datas] == ["a"]
    (users,) = route(server, "users").departed_brokers or []
    assert users.compacted
    assert (users.read_queue_nums, users.write_queue_nums) == (4, 2)


def test_a_route_does_not_change_while_a_broker_is_away(server: NameServerUnderTest) -> None:
    before = route(server, "orders")
    server.now_ms += 60_000
    assert route(server, "orders") == before


def test_only_those_who_ask_are_told(server: NameServerUnderTest) -> None:
    assert b"departed" not in route_bytes(server, "orders", departed=None)
    _, data = server.ask(RequestCode.GET_BROKER_CLUSTER_INFO)
    assert b"departed" not in bytes(data)


def test_the_list_of_brokers_names_those_that_left(server: NameServerUnderTest) -> None:
    _, data = server.ask(RequestCode.GET_BROKER_CLUSTER_INFO, ClusterInfoHeader(departed=True))
    info = ClusterInfo.decode(bytes(data))
    assert list(info.broker_addr_table) == ["a"]
    (gone,) = info.departed_brokers or []
    assert (gone.broker_name, gone.how, gone.since) == ("b", "DISCONNECTED", server.wall_ms)


def leave_unregistered(table: RouteTable, channel: MemoryChannel) -> None:
    table.unregister("b", "b:1", channel, 7)


def leave_closed(table: RouteTable, channel: MemoryChannel) -> None:
    table.close_channel(channel, 7)


def leave_silent(table: RouteTable, channel: MemoryChannel) -> None:
    table.heartbeat("b:1", 7)
    table.expire(10_000_000)


def leave_renamed(table: RouteTable, channel: MemoryChannel) -> None:
    header = register_header("c", address="b:1")
    table.register(header, broker_topics(header, register_body("c", "T")), channel, 7)


@pytest.mark.parametrize(
    ("leave", "how"),
    [
        (leave_unregistered, Departure.UNREGISTERED),
        (leave_closed, Departure.DISCONNECTED),
        (leave_silent, Departure.SILENT),
        (leave_renamed, Departure.RENAMED),
    ],
)
def test_how_and_when_a_broker_left(leave: Any, how: Departure) -> None:
    table = RouteTable()
    leave(table, register(table, "b"))
    (gone,) = table.departed.with_topic("orders")
    assert (gone.name, gone.how, gone.since_ms) == ("b", how, 7)


def test_a_broker_with_another_address_has_not_left() -> None:
    table = RouteTable()
    channel = register(table, "b")
    slave = register_header("b", 1, "slave:1")
    table.register(slave, broker_topics(slave, register_body()), MemoryChannel(), 0)
    table.close_channel(channel, 7)
    assert list(table.departed) == []


# -- when a broker is forgotten --------------------------------------------------------------------


def test_a_broker_that_registers_again_is_not_missing(server: NameServerUnderTest) -> None:
    assert missing(server) == ["b"]
    register(server.table, "b", now_ms=server.now_ms)
    assert missing(server) == []


def test_a_slave_that_registers_first_does_not_bring_the_queues_back() -> None:
    server = NameServerUnderTest()
    register(server.table, "a")
    server.table.close_channel(register(server.table, "b"), 0)
    slave = register_header("b", 1, "slave:1")
    server.table.register(slave, broker_topics(slave, register_body()), MemoryChannel(), 0)
    assert missing(server) == ["b"]


def test_a_departed_broker_is_forgotten_in_its_time(server: NameServerUnderTest) -> None:
    server.now_ms += 24 * HOUR_MS - 1001
    server.table.heartbeat("a:1", server.now_ms)
    server.table.expire(server.now_ms)
    assert missing(server) == ["b"]
    server.table.expire(server.now_ms + 1)
    assert missing(server) == []


def test_a_person_may_forget_a_departed_broker(server: NameServerUnderTest) -> None:
    assert forget(server, "b") == (ResponseCode.SUCCESS, None)
    assert missing(server) == []
    code, remark = forget(server, "b")
    assert (code, remark) == (
        ResponseCode.BROKER_NOT_EXIST,
        "no departed broker b is remembered here",
    )


def test_a_registered_broker_is_not_forgotten(server: NameServerUnderTest) -> None:
    code, remark = forget(server, "a")
    assert code == ResponseCode.SYSTEM_ERROR
    assert remark == "broker a is registered: stop it first"
    assert forget(server, "x" * 300)[0] == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize(("cluster", "kept"), [(None, []), ("c0", []), ("c1", ["b"])])
def test_a_deleted_topic_is_not_missing(
    server: NameServerUnderTest, cluster: str | None, kept: list[str]
) -> None:
    header = TopicInNamesrvHeader(topic="orders", cluster_name=cluster)
    assert server.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, header)[0].code == 0
    register(server.table, "a", "orders", "users", version=2, now_ms=server.now_ms)
    assert missing(server) == kept
    assert missing(server, "users") == ["b"]


# -- bounds ----------------------------------------------------------------------------------------


def depart(brokers: DepartedBrokers, name: str, host: str, topics: int = 1) -> None:
    table = RouteTable()
    table.departed = brokers
    names = [f"t{number}" for number in range(topics - 1)]
    channel = register(table, name, *names or ("t",), host=host)
    table.close_channel(channel, 0)


def test_one_host_does_not_evict_another_s_brokers() -> None:
    brokers = DepartedBrokers(HOUR_MS, Limits(departed_of_host=3, departed=5))
    for name in ("x", "y"):
        depart(brokers, name, "1.1.1.1")
    for number in range(10):
        depart(brokers, f"evil{number}", "6.6.6.6")
    assert [each.name for each in brokers] == ["x", "y", "evil7", "evil8", "evil9"]
    depart(brokers, "z", "2.2.2.2")
    assert [each.name for each in brokers] == ["y", "evil7", "evil8", "evil9", "z"]


def test_topics_count_not_only_brokers() -> None:
    brokers = DepartedBrokers(HOUR_MS, Limits(departed_size_of_host=10))
    depart(brokers, "x", "1.1.1.1", 8)
    for number in range(10):
        depart(brokers, f"evil{number}", "6.6.6.6", 6)
    assert [each.name for each in brokers] == ["x", "evil9"]


# -- the file --------------------------------------------------------------------------------------


def test_a_restart_keeps_what_is_missing(tmp_path: Path, server: NameServerUnderTest) -> None:
    file = DepartedFile(tmp_path / "departed.json")
    file.save(server.table.known(), server.wall_ms - 1_000_000)
    again = {each.name: each for each in file.load(5000, server.wall_ms + 60_000)}
    assert again["b"].how is Departure.DISCONNECTED
    assert again["b"].since_ms == 5000 - 60_000
    assert again["b"].compacted == {"users"}
    assert again["b"].queues["orders"].read_queue_nums == 3
    # It was live: it counts as away from the start on, until it registers.
    assert (again["a"].how, again["a"].since_ms) == (Departure.NOT_BACK, 5000)


def test_a_broker_that_does_not_come_back_after_a_restart_is_missing(
    tmp_path: Path, server: NameServerUnderTest
) -> None:
    file = DepartedFile(tmp_path / "departed.json")
    register(server.table, "b", now_ms=server.now_ms)
    file.save(server.table.known(), 0)
    again = NameServerUnderTest()
    for each in file.load(again.now_ms, again.wall_ms):
        again.table.departed.add(each)
    register(again.table, "a", now_ms=again.now_ms)
    (gone,) = route(again, "orders").departed_brokers or []
    assert (gone.broker_name, gone.how, gone.since) == ("b", "NOT_BACK", again.wall_ms)


def test_no_file_is_no_error_and_a_damaged_one_is(tmp_path: Path) -> None:
    assert DepartedFile(tmp_path / "none.json").load(0, 0) == []
    path = tmp_path / "departedBrokers.json"
    config = NameServerConfig(kv_config_path=str(tmp_path / "kvConfig.json"))
    NameServer(config)
    for text in (b"{", b'{"name":"b"}\n', b"\0\0", b'{"name":"\xff"}\n'):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=r"departedBrokers\.json: cannot read which brokers"):
            NameServer(config)


def test_changes_are_counted(server: NameServerUnderTest) -> None:
    table = server.table

    def changes(act: Any) -> bool:
        before = table.change_count
        act()
        return table.change_count != before

    again = register(table, "a", now_ms=server.now_ms)
    assert not changes(lambda: register(table, "a", now_ms=server.now_ms))
    assert changes(lambda: register(table, "a", "more", version=2, now_ms=server.now_ms))
    assert changes(lambda: table.close_channel(again, 0) or table.forget("b"))
    assert changes(lambda: table.delete_topic("orders"))
