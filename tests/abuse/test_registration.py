"""Malicious registrations cannot harm a nameserver or the clients that use it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace_nameserver.departed import Limits
from headrace_nameserver.routes import RouteTable
from headrace_protocol.bodies import TopicConfig, TopicRouteData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command
from headrace_protocol.nameserver_headers import (
    GetRouteInfoHeader,
    UnregisterBrokerHeader,
)
from headrace_protocol.statictopic.mapping import MappingInfo
from tests.support.channel import MemoryChannel
from tests.support.nameserver import (
    NameServerUnderTest,
    frame,
    register_body,
    register_header,
)
from tests.support.registrations import compressed

REGISTER = RequestCode.REGISTER_BROKER
REAL = "10.0.0.1:10911"
EVIL = "6.6.6.6:666"


def client(host: str = "10.0.0.1", port: int = 50_000) -> MemoryChannel:
    channel = MemoryChannel()
    channel.address = f"{host}:{port}"
    return channel


def register(
    server: NameServerUnderTest,
    channel: MemoryChannel,
    *topics: TopicConfig | str,
    state: int = 0,
    **header: Any,
) -> Command:
    body = register_body(*(topics or ("T", "U")))
    body.topic_config_serialize_wrapper.data_version.state_version = state
    header.setdefault("address", REAL)
    return server.ask(REGISTER, register_header(**header), body.encode(), channel=channel)[0]


@pytest.fixture
def server() -> NameServerUnderTest:
    """A nameserver where broker b0 has registered the topics T and U."""
    server = NameServerUnderTest()
    server.channel = client()
    assert register(server, server.channel).code == ResponseCode.SUCCESS
    return server


def addresses(server: NameServerUnderTest, topic: str = "T") -> dict[str, dict[int, str]]:
    _, body = server.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoHeader(topic=topic))
    route = TopicRouteData.decode(body)
    return {broker.broker_name: broker.broker_addrs for broker in route.broker_datas}


# -- who holds a name ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["6.6.6.6", "10.0.0.1"])
def test_a_held_name_is_refused_to_another_address(server: NameServerUnderTest, host: str) -> None:
    refused = register(server, client(host, 1), address=EVIL, state=2**63 - 1)
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert REAL in (refused.remark or "")
    assert EVIL in (refused.remark or "")
    assert addresses(server) == {"b0": {0: REAL}}


def test_a_broker_that_restarts_takes_its_name_at_once(server: NameServerUnderTest) -> None:
    new = client(port=50_001)
    assert register(server, new, "T", "N").code == ResponseCode.SUCCESS
    server.table.close_channel(server.channel, 0)
    assert addresses(server) == {"b0": {0: REAL}}
    server.table.close_channel(new, 0)
    assert register(server, client("6.6.6.6"), address=EVIL).code == ResponseCode.SUCCESS


@pytest.mark.parametrize(
    "header",
    [
        {"name": "b0"},
        {"name": "b0", "broker_id": 1},
        {"name": "b9"},
        {"name": "b0", "broker_id": 5, "address": EVIL, "cluster_name": "c9"},
    ],
    ids=["same", "slave", "other-name", "other-cluster"],
)
def test_what_a_live_connection_holds_is_refused_to_another_host(
    server: NameServerUnderTest, header: dict[str, Any]
) -> None:
    refused = register(server, client("6.6.6.6"), state=2**63 - 1, **header)
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert "10.0.0.1" in (refused.remark or "")
    assert addresses(server) == {"b0": {0: REAL}}
    assert server.table.cluster_info().cluster_addr_table == {"c0": ["b0"]}


def test_a_negative_id_speaks_for_no_broker(server: NameServerUnderTest) -> None:
    wide = TopicConfig(topic_name="T", write_queue_nums=9)
    header: dict[str, Any] = {"address": EVIL, "broker_id": -1, "enable_acting_master": True}
    assert register(server, client("6.6.6.6"), wide, "U", **header).code == 29
    assert addresses(server) == {"b0": {0: REAL}}


def test_only_the_host_that_registered_a_broker_unregisters_it(server: NameServerUnderTest) -> None:
    header = UnregisterBrokerHeader(
        broker_name="b0", broker_addr=REAL, cluster_name="c0", broker_id=0
    )
    code = RequestCode.UNREGISTER_BROKER
    assert server.ask(code, header, channel=client("6.6.6.6"))[0].code == ResponseCode.SYSTEM_ERROR
    assert addresses(server) == {"b0": {0: REAL}}
    assert server.ask(code, header, channel=client(port=7))[0].code == ResponseCode.SUCCESS
    assert list(server.table.topics()) == []


def test_a_queue_mapping_of_another_broker_is_refused(server: NameServerUnderTest) -> None:
    body = register_body("T", "U")
    mapping = MappingInfo(topic="T", bname="b0", curr_id_map={0: 0})
    body.topic_config_serialize_wrapper.topic_queue_mapping_info_map = {"T": mapping}
    header = register_header(name="b1", address=EVIL)
    refused, _ = server.ask(REGISTER, header, body.encode(), channel=client("6.6.6.6"))
    assert (refused.code, "bname is 'b0', the sender is b1" in (refused.remark or "")) == (29, True)


# -- what a registration may hold ------------------------------------------------------------------


def test_a_broker_without_an_address_does_not_hide_the_others(server: NameServerUnderTest) -> None:
    stranger = client("6.6.6.6")
    assert register(server, stranger, name="ghost", address="").code == 29
    assert register(server, stranger, name="other", address=EVIL).code == ResponseCode.SUCCESS
    server.table.close_channel(stranger, 0)
    assert addresses(server) == {"b0": {0: REAL}}


def test_the_largest_registration_is_accepted(server: NameServerUnderTest) -> None:
    extreme = TopicConfig(topic_name="x" * 255, read_queue_nums=65_536, perm=15)
    taken = register(server, client(), extreme, "U", name="n" * 255, address="a" * 253 + ":1")
    assert taken.code == ResponseCode.SUCCESS, taken.remark


def topics_json(entries: str) -> bytes:
    return f'{{"topicConfigSerializeWrapper":{{"topicConfigTable":{{{entries}}}}}}}'.encode()


@pytest.mark.parametrize(
    "entries",
    [
        ",".join(f'"{number:x}":{{}}' for number in range(140_000)),
        ",".join(f'"{number:x}":1' for number in range(700_000)),
    ],
    ids=["objects", "numbers"],
)
def test_a_registration_of_too_many_topics_is_not_read(
    server: NameServerUnderTest, entries: str
) -> None:
    header = register_header(name="b1", address="10.0.0.1:2")
    refused, _ = server.ask(REGISTER, header, topics_json(entries))
    assert refused.code == ResponseCode.INVALID_PARAMETER, refused.remark
    assert "fields: the maximum is 65536 topics" in (refused.remark or "")
    assert server.unexpected == []


def test_a_compressed_registration_of_too_many_topics_is_not_read(
    server: NameServerUnderTest,
) -> None:
    version = b'{"counter":0}'
    topic = b"T 1 1 6 S"
    count = 2_100_000
    blocks = [len(version).to_bytes(4) + version, count.to_bytes(4)]
    data = zlib.compress(b"".join(blocks) + (len(topic).to_bytes(4) + topic) * count, 9)
    header = register_header(name="b1", address="10.0.0.1:2", compressed=True)
    refused, _ = server.ask(REGISTER, header, data)
    assert refused.code == ResponseCode.INVALID_PARAMETER, refused.remark
    assert server.unexpected == []


# -- what is kept ----------------------------------------------------------------------------------


def test_brokers_of_one_host_are_bounded(server: NameServerUnderTest) -> None:
    server.table.limits = Limits(brokers_of_host=3)
    stranger = client("6.6.6.6")
    codes = [
        register(server, stranger, name=f"e{number}", address=f"6.6.6.6:{number}").code
        for number in range(1, 6)
    ]
    assert codes == [0, 0, 0, 29, 29]
    assert register(server, client(), name="b1", address="10.0.0.1:2").code == 0
    assert register(server, stranger, name="e1", address="6.6.6.6:1").code == 0  # as before


def test_brokers_of_all_hosts_are_bounded(server: NameServerUnderTest) -> None:
    server.table.limits = Limits(brokers=2)
    codes = [
        register(server, client(f"6.6.6.{n}"), name=f"e{n}", address=f"6.6.6.{n}:1").code
        for n in range(1, 4)
    ]
    assert codes == [0, 29, 29]


@pytest.mark.parametrize(
    ("bound", "codes"),
    [
        ("size_of_host", [0, 0, 29, 0, 29]),
        ("size_of_all", [0, 29, 29, 0, 29]),
    ],
)
def test_topics_are_bounded(server: NameServerUnderTest, bound: str, codes: list[int]) -> None:
    server.table.limits = Limits(**{bound: 5})
    stranger = client("6.6.6.6")
    answers = [
        register(server, stranger, "A", "B", name="e1", address="6.6.6.6:1"),
        register(server, stranger, "C", "D", name="e2", address="6.6.6.6:2"),
        register(server, stranger, "E", "F", name="e3", address="6.6.6.6:3"),
        register(server, stranger, "A", "B", name="e1", address="6.6.6.6:1"),
        register(
            server, stranger, *(str(n) for n in range(6)), name="e1", address="6.6.6.6:1", state=1
        ),
    ]
    assert [answer.code for answer in answers] == codes
    assert addresses(server) == {"b0": {0: REAL}}


def test_old_topics_make_room_for_current_ones(server: NameServerUnderTest) -> None:
    server.table.limits = Limits(size=4)
    assert register(server, server.channel, "V", "W", state=1).code == ResponseCode.SUCCESS
    assert list(server.table.topics()) == ["T", "U", "V", "W"]
    # A change that comes alone is no list of all topics.
    assert register(server, server.channel, "X", state=2).code == 29
    assert register(server, server.channel, "W", "X", state=2).code == ResponseCode.SUCCESS
    assert list(server.table.topics()) == ["W", "X"]
    assert register(server, server.channel, "Y", state=3).code == ResponseCode.SUCCESS
    assert list(server.table.topics()) == ["W", "X", "Y"]


def test_queue_mappings_are_bounded_and_go_with_their_broker(server: NameServerUnderTest) -> None:
    server.table.limits = Limits(size=10)
    stranger = client("6.6.6.6")

    def add(topic: str, queue_count: int) -> int:
        queues = dict.fromkeys(range(queue_count), 0)
        mapping = MappingInfo(topic=topic, bname="e", curr_id_map=queues)
        body = register_body(topic, "other", version=queue_count)
        body.topic_config_serialize_wrapper.topic_queue_mapping_info_map = {topic: mapping}
        header = register_header(name="e", address=EVIL)
        return server.ask(REGISTER, header, body.encode(), channel=stranger)[0].code

    assert [add("T", 4), add("X", 3), add("X", 4), add("Y", 1)] == [0, 0, 0, 29]
    server.table.close_channel(stranger, 0)
    route = server.table.route("T")
    assert route is not None
    assert route.topic_queue_mapping_by_broker is None


def test_topics_of_departed_brokers_are_bounded() -> None:
    server = NameServerUnderTest(table=RouteTable(limits=Limits(departed_size_of_host=7)))
    for name, topics in (("a", "1234"), ("b", "12345"), ("c", "1234567"), ("d", "1")):
        channel = client()
        register(server, channel, "0", *topics, name=name)
        server.table.close_channel(channel, 0)
    assert [each.name for each in server.table.departed.with_topic("1")] == ["d"]
    assert server.table.departed.with_topic("7") == []


def test_a_registration_is_dropped_when_its_connection_ends_while_it_is_read() -> None:
    server = NameServerUnderTest()
    fetches: list[tuple[Callable[[], None], Callable[[None], None]]] = []
    server.registry.run_fetch = lambda _, wait, then: fetches.append((wait.fetch, then))
    body = compressed(register_body("T", "U"))
    channel = client()
    server.take(frame(REGISTER, register_header(compressed=True), body), channel)
    ((fetch, then),) = fetches
    channel.is_open = False
    server.table.close_channel(channel, 0)
    fetch()
    then(None)
    assert list(server.table.topics()) == []


def test_a_large_registration_is_read_and_checked_in_a_thread() -> None:
    server = NameServerUnderTest()
    fetches: list[tuple[Callable[[], None], Callable[[None], None]]] = []
    server.registry.run_fetch = lambda _, wait, then: fetches.append((wait.fetch, then))
    topics = [f"topic{number}" for number in range(700)]
    server.take(frame(REGISTER, register_header(), register_body(*topics).encode()), client())
    ((fetch, then),) = fetches
    assert list(server.table.topics()) == []
    fetch()
    then(None)
    assert list(server.table.topics()) == topics


# -- answers that grow with the tables -------------------------------------------------------------


def test_topic_lists_are_written_in_slices() -> None:
    server = NameServerUnderTest()
    topics = [f"T{number}" for number in range(5000)]
    register(server, server.channel, *topics)
    begun: list[Iterator[None]] = []
    server.registry.run_long = begun.append
    server.registry.slice_s = 0.0
    pipelined = frame(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER) * 34
    assert server.take(pipelined) == []
    (work,) = begun
    slices = sum(1 for _ in work)
    answers = server.channel.replies()
    assert len(answers) == 34
    assert slices >= 34 * 5
    assert all(json.loads(body)["topicList"] == topics for _, body in answers)


@pytest.mark.parametrize(
    "code",
    [
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_UNIT_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
        RequestCode.REGISTER_BROKER,
    ],
)
def test_one_long_answer_of_a_client_is_made_at_a_time(
    server: NameServerUnderTest, code: RequestCode
) -> None:
    begun: list[Iterator[None]] = []
    server.registry.run_long = begun.append
    server.registry.slice_s = 0.0
    pipelined = frame(code, register_header(address=REAL)) * 3
    assert server.take(pipelined) == []
    assert len(begun) == 1
    for count, _ in enumerate(begun[0]):
        assert len(server.channel.replies()) <= 1, count


def test_a_route_of_many_brokers_is_written_in_turn(server: NameServerUnderTest) -> None:
    for number in range(60):
        register(server, client(), name=f"e{number}", address=f"10.0.0.1:{number + 1}")
    begun: list[Iterator[None]] = []
    server.registry.run_long = begun.append
    server.registry.slice_s = 0.0
    asked = frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoHeader(topic="T"))
    assert server.take(asked * 2) == []
    assert sum(1 for _ in begun[0]) >= 2
    for _, body in server.channel.replies():
        assert len(TopicRouteData.decode(body).broker_datas) == 61


# -- the dialect -----------------------------------------------------------------------------------


def test_the_dialect_of_static_topics_is_read(server: NameServerUnderTest) -> None:
    body = b"""{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":{},"S":{"perm":null}},
    "topicQueueMappingInfoMap":{"S":{"bname":"b1","topic":"S","currIdMap":{0:0,1:1}}}}}"""
    header = register_header(name="b1", address="10.0.0.1:2")
    command, _ = server.ask(REGISTER, header, body)
    assert command.code == ResponseCode.SUCCESS, command.remark
    route = server.table.route("S")
    assert route is not None
    assert route.topic_queue_mapping_by_broker is not None
    assert route.topic_queue_mapping_by_broker["b1"].curr_id_map == {0: 0, 1: 1}
    assert route.queue_datas[0].perm == 6


def test_a_large_registration_in_the_dialect_is_refused(server: NameServerUnderTest) -> None:
    header = register_header(name="b1", address="10.0.0.1:2")
    refused, _ = server.ask(REGISTER, header, topics_json("'T':{}" + " " * (2 << 20)))
    assert refused.code == ResponseCode.INVALID_PARAMETER
    assert "is not plain JSON: the maximum is 2097152" in (refused.remark or "")
