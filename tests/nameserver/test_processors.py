"""Requests to a nameserver, frame by frame; first those that the peer's nameserver answered."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_nameserver.config import ConfigError
from headrace_protocol import fastjson
from headrace_protocol.bodies import (
    ClusterInfo,
    DataVersion,
    GetBrokerMemberGroupResponseBody,
    KVTable,
    QueueData,
    TopicConfig,
    TopicList,
    TopicRouteData,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command
from headrace_protocol.frame import FrameReader
from headrace_protocol.nameserver_headers import (
    AddWritePermOfBrokerResponseHeader,
    BrokerHeartbeatHeader,
    GetBrokerMemberGroupHeader,
    GetKVConfigResponseHeader,
    GetRouteInfoHeader,
    GetRouteInfoResponseHeader,
    GetTopicsByClusterHeader,
    KVKeyHeader,
    KVNamespaceHeader,
    PutKVConfigHeader,
    QueryDataVersionHeader,
    QueryDataVersionResponseHeader,
    RegisterBrokerResponseHeader,
    TopicInNamesrvHeader,
    UnregisterBrokerHeader,
    WipeWritePermOfBrokerResponseHeader,
    WritePermOfBrokerHeader,
)
from headrace_protocol.statictopic.mapping import MappingInfo
from tests.support.channel import MemoryChannel
from tests.support.golden_frames import GoldenFrame, golden_frames
from tests.support.nameserver import NameServerUnderTest, register_body, register_header
from tests.support.registrations import compressed
from tests.support.rights import client_of, rights_of, users_of


def registered(*topics: TopicConfig | str, **fields: Any) -> NameServerUnderTest:
    """A nameserver with a broker b0."""
    server = NameServerUnderTest(**fields)
    register(server, *(topics or ("T", "U")))
    return server


def register(server: NameServerUnderTest, *topics: TopicConfig | str, **header: Any) -> Command:
    body = register_body(*topics).encode()
    command, _ = server.ask(RequestCode.REGISTER_BROKER, register_header(**header), body)
    assert command.code == ResponseCode.SUCCESS
    return command


def get_route(
    server: NameServerUnderTest, topic: str, *, version: int = 513, **header: Any
) -> tuple[Command, bytes]:
    return server.ask(
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        GetRouteInfoHeader(topic=topic, **header),
        version=version,
    )


# -- what the peer answered ------------------------------------------------------------------------


def nameserver_frames() -> list[GoldenFrame]:
    return [recorded for recorded in golden_frames() if recorded.peer == "namesrv"]


def test_answers_as_the_peer_did() -> None:
    server = NameServerUnderTest()
    channels: dict[int, MemoryChannel] = {}
    ours: dict[tuple[int, int], tuple[Command, bytes]] = {}
    compared = 0
    for recorded in nameserver_frames():
        key = (recorded.conn, recorded.opaque)
        if recorded.response:
            check_reply(ours.pop(key), recorded)
            compared += 1
        else:
            channel = channels.setdefault(recorded.conn, MemoryChannel())
            (ours[key],) = server.take(recorded.data, channel)
    assert compared > 150
    assert server.unexpected == []
    assert list(server.table.topics()) == []  # the broker unregistered at the end


def check_reply(reply: tuple[Command, bytes], recorded: GoldenFrame) -> None:
    command, body = reply
    assert (command.code, command.flag, command.opaque) == (
        recorded.code,
        1,
        recorded.opaque,
    ), recorded.seq
    assert comparable(body) == comparable(recorded.body), recorded.seq
    fields = command.ext()
    fields.pop("routeAgeMillis", None)
    fields.pop("awaitsBroker", None)
    assert fields == (recorded.ext or {}), recorded.seq
    if recorded.code == ResponseCode.TOPIC_NOT_EXIST:
        assert command.remark is not None
        topic = (recorded.remark or "").splitlines()[0].rpartition(": ")[2]
        assert f"topic {topic}:" in command.remark


def comparable(body: bytes) -> object:
    """A body without the order of Java's hash maps."""
    value = fastjson.loads(body) if body else None
    if isinstance(value, dict) and "topicList" in value:
        value["topicList"].sort()
    return value


def test_answers_in_the_codec_of_the_request() -> None:
    asked = set()
    for recorded in nameserver_frames():
        if not recorded.response:
            server = NameServerUnderTest()
            server.registry.handle(server.channel, FrameReader().feed(recorded.data))
            assert server.channel.written[4] == recorded.data[4]
            asked.add(recorded.data[4])
    assert asked == {0, 1}


# -- registering -----------------------------------------------------------------------------------


def test_a_compressed_registration_is_as_good_as_a_plain_one() -> None:
    topic = TopicConfig(topic_name="T", write_queue_nums=3, attributes={"a": "b"})
    body = register_body(topic, "U")
    info = MappingInfo(topic="T", bname="b0", curr_id_map={0: 0})
    body.topic_config_serialize_wrapper.topic_queue_mapping_info_map = {"T": info}
    data = compressed(body)
    header = register_header(compressed=True, body_crc32=zlib.crc32(data) & 0x7FFFFFFF)
    for version, mapping in ((513, {"b0": info}), (412, None)):
        server = NameServerUnderTest()
        command, _ = server.ask(RequestCode.REGISTER_BROKER, header, data, version=version)
        assert command.code == ResponseCode.SUCCESS
        route = TopicRouteData.decode(get_route(server, "T")[1])
        assert route.queue_datas[0].write_queue_nums == 3
        assert route.topic_queue_mapping_by_broker == mapping


def test_a_registration_without_body_has_no_topics() -> None:
    server = NameServerUnderTest()
    command, _ = server.ask(RequestCode.REGISTER_BROKER, register_header())
    assert command.code == ResponseCode.SUCCESS
    assert server.table.holder("b0", 0) == "127.0.0.1:10911"


REGISTERED = register_body("T", "U").encode()


@pytest.mark.slow
@given(st.binary(max_size=8), st.integers(0, len(REGISTERED)), st.integers(0, len(REGISTERED)))
def test_any_body_is_taken_or_refused(data: bytes, start: int, end: int) -> None:
    server = NameServerUnderTest()
    body = REGISTERED[:start] + data + REGISTERED[end:]
    command, _ = server.ask(RequestCode.REGISTER_BROKER, register_header(), body)
    assert command.code in {0, 1, 29}
    assert server.unexpected == []
    for topic in server.table.topics():
        assert get_route(server, topic)[0].code == ResponseCode.SUCCESS
    assert server.unexpected == []


def test_slaves_are_told_their_master() -> None:
    server = registered()
    master = server.ask(RequestCode.REGISTER_BROKER, register_header())[0]
    assert master.ext() == {}
    slave = register(server, broker_id=1, address="s:1").header(RegisterBrokerResponseHeader)
    assert (slave.master_addr, slave.ha_server_addr) == ("127.0.0.1:10911", "127.0.0.1:10912")


def test_a_broker_asks_whether_its_version_is_known() -> None:
    server = registered()

    def ask(address: str, version: DataVersion) -> tuple[bool, bytes]:
        header = QueryDataVersionHeader(
            broker_name="b0", broker_addr=address, cluster_name="c0", broker_id=0
        )
        command, body = server.ask(RequestCode.QUERY_DATA_VERSION, header, version.encode())
        return command.header(QueryDataVersionResponseHeader).changed, body

    known = register_body().topic_config_serialize_wrapper.data_version
    server.now_ms += 100_000
    assert ask("127.0.0.1:10911", DataVersion(counter=9)) == (True, known.encode())
    assert server.table.next_expiry_ms() == server.now_ms + 20_000
    assert ask("127.0.0.1:10911", known) == (False, known.encode())
    assert server.table.next_expiry_ms() == server.now_ms + 120_000
    assert ask("nobody:1", known) == (True, b"")


def test_a_heartbeat_keeps_a_broker() -> None:
    server = registered()
    server.now_ms += 100_000
    header = BrokerHeartbeatHeader(
        cluster_name="c0", broker_addr="127.0.0.1:10911", broker_name="b0"
    )
    server.ask(RequestCode.BROKER_HEARTBEAT, header)
    assert server.table.next_expiry_ms() == server.now_ms + 120_000


# -- routes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "header", "strict"),
    [(400, {}, False), (0, {"accept_standard_json_only": True}, True), (401, {}, True)],
)
def test_a_route_comes_in_the_dialect_that_its_client_reads(
    version: int, header: dict[str, Any], strict: bool
) -> None:
    server = registered()
    _, body = get_route(server, "T", version=version, **header)
    assert (b'{"0":"127.0.0.1:10911"}' in body) == strict
    assert (b'{0:"127.0.0.1:10911"}' in body) == (not strict)


def test_a_route_tells_its_age() -> None:
    server = registered()
    server.now_ms += 5_000
    register(server, "T", "U", name="b1", address="b:1")
    server.now_ms += 400
    command, body = get_route(server, "T")
    assert command.header(GetRouteInfoResponseHeader).route_age_millis == 5_400
    assert len(TopicRouteData.decode(body).broker_datas) == 2


def test_a_missing_route_tells_who_is_gone_and_since_when() -> None:
    server = registered()

    def remark(topic: str) -> str | None:
        command, body = get_route(server, topic)
        assert (command.code, body) == (ResponseCode.TOPIC_NOT_EXIST, b"")
        return command.remark

    server.now_ms += 130_000
    server.wall_ms += 130_000
    server.table.expire(server.now_ms)
    silent = (
        "broker b0 (127.0.0.1:10911) is silent, last heard 130 s ago (since 2023-11-14T22:13:20Z)"
    )
    assert remark("T") == f"no route for topic T: {silent}"
    for number in range(1, 5):
        register(server, "T", "U", name=f"b{number}", address=f"b:{number}")
        header = UnregisterBrokerHeader(
            broker_name=f"b{number}", broker_addr=f"b:{number}", cluster_name="c0", broker_id=0
        )
        server.ask(RequestCode.UNREGISTER_BROKER, header)
    assert remark("T") == (
        "no route for topic T: "
        "broker b4 (b:4) was shut down 0 s ago (since 2023-11-14T22:15:30Z); "
        "broker b3 (b:3) was shut down 0 s ago (since 2023-11-14T22:15:30Z); "
        "broker b2 (b:2) was shut down 0 s ago (since 2023-11-14T22:15:30Z); "
        "and 2 more"
    )


def test_a_young_nameserver_expects_its_brokers() -> None:
    server = registered()

    def awaited(topic: str) -> tuple[bool | None, str | None]:
        command, _ = get_route(server, topic)
        assert command.code == ResponseCode.TOPIC_NOT_EXIST
        return command.header(GetRouteInfoResponseHeader).awaits_broker, command.remark

    server.now_ms += 29_999
    assert awaited("V") == (
        True,
        (
            "no route for topic V: no broker has registered it in the 29 s since this nameserver "
            "started; brokers register every 30 s"
        ),
    )
    server.now_ms += 1
    assert awaited("V") == (False, "no route for topic V: no broker has registered it")
    server.now_ms += 120_000
    server.table.expire(server.now_ms)
    assert awaited("T")[0] is True, "its broker is known and away"


def test_order_settings_go_to_brokers_and_if_wanted_into_routes() -> None:
    for enabled, expected in ((True, "b0:4"), (False, None)):
        server = registered(order_message_enable=enabled)
        put(server, "ORDER_TOPIC_CONFIG", "T", "b0:4")
        assert TopicRouteData.decode(get_route(server, "T")[1]).order_topic_conf == expected
        assert TopicRouteData.decode(get_route(server, "U")[1]).order_topic_conf is None
        _, body = server.ask(RequestCode.REGISTER_BROKER, register_header())
        assert KVTable.decode(body).table == {"T": "b0:4"}


# -- lists and permissions -------------------------------------------------------------------------


def test_cluster_info_has_integer_keys() -> None:
    server = registered()
    _, body = server.ask(RequestCode.GET_BROKER_CLUSTER_INFO)
    assert b'"brokerAddrs":{0:"127.0.0.1:10911"}' in body
    assert ClusterInfo.decode(body).cluster_addr_table == {"c0": ["b0"]}


def test_topic_lists() -> None:
    server = registered("T", TopicConfig(topic_name="U", topic_sys_flag=1))
    register(
        server,
        "V",
        TopicConfig(topic_name="W", topic_sys_flag=2),
        name="b1",
        address="b:1",
        cluster_name="c1",
    )

    def topics(code: RequestCode, header: Any = None) -> TopicList:
        return TopicList.decode(server.ask(code, header)[1])

    by_cluster = GetTopicsByClusterHeader(cluster="c1")
    assert topics(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).topic_list == ["T", "U", "V", "W"]
    assert topics(RequestCode.GET_TOPICS_BY_CLUSTER, by_cluster).topic_list == ["V", "W"]
    assert topics(RequestCode.GET_UNIT_TOPIC_LIST).topic_list == ["U"]
    assert topics(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST).topic_list == ["W"]
    assert topics(RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST).topic_list == ["W"]
    assert topics(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS) == TopicList(
        topic_list=["c0", "c1", "b0", "b1"], broker_addr="127.0.0.1:10911"
    )


def test_members_of_a_broker() -> None:
    server = registered()
    header = GetBrokerMemberGroupHeader(cluster_name="c0", broker_name="b0")
    _, body = server.ask(RequestCode.GET_BROKER_MEMBER_GROUP, header)
    group = GetBrokerMemberGroupResponseBody.decode(body).broker_member_group
    assert group is not None
    assert group.broker_addrs == {0: "127.0.0.1:10911"}


def test_write_permission() -> None:
    server = registered()
    header = WritePermOfBrokerHeader(broker_name="b0")
    wiped, _ = server.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, header)
    assert wiped.header(WipeWritePermOfBrokerResponseHeader).wipe_topic_count == 2
    assert TopicRouteData.decode(get_route(server, "T")[1]).queue_datas[0].perm == 4
    added, _ = server.ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, header)
    assert added.header(AddWritePermOfBrokerResponseHeader).add_topic_count == 2
    assert TopicRouteData.decode(get_route(server, "T")[1]).queue_datas[0].perm == 6


@pytest.mark.parametrize(
    ("user", "topics"),
    [("root", {"T", "U", "%RETRY%g", "%RETRY%h"}), ("alice", {"T", "%RETRY%g"}), ("bob", set())],
)
def test_lists_name_only_what_one_may_see(user: str, topics: set[str]) -> None:
    rights = rights_of(users_of(alice=["Topic:T Pub", "Group:g Sub"], bob=[]))
    server = NameServerUnderTest(access=rights)
    names = ("T", "U", "%RETRY%g", "%RETRY%h")
    configs = [TopicConfig(topic_name=name, topic_sys_flag=3) for name in names]
    root, client = client_of("root"), client_of(user)
    body = register_body(*configs).encode()
    server.ask(RequestCode.REGISTER_BROKER, register_header(), body, channel=root)
    for code, header in (
        (RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, None),
        (RequestCode.GET_TOPICS_BY_CLUSTER, GetTopicsByClusterHeader(cluster="c0")),
        (RequestCode.GET_UNIT_TOPIC_LIST, None),
        (RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST, None),
    ):
        answer, found = server.ask(code, header, channel=client)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert set(TopicList.decode(found).topic_list) == topics
    # The route of a topic that one may not see is no route.
    for topic in ("T", "U"):
        route = GetRouteInfoHeader(topic=topic)
        answer, _ = server.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, route, channel=client)
        assert (answer.code == ResponseCode.SUCCESS) == (topic in topics)


def test_topics_are_added_and_deleted() -> None:
    server = registered()
    route = TopicRouteData(queue_datas=[QueueData(broker_name="b0", perm=6)])
    header = TopicInNamesrvHeader(topic="N")
    server.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, header, route.encode())
    assert get_route(server, "N")[0].code == ResponseCode.SUCCESS
    server.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, header)
    assert get_route(server, "N")[0].code == ResponseCode.TOPIC_NOT_EXIST
    route.queue_datas[0].broker_name = "b9"
    command, _ = server.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, header, route.encode())
    assert (command.code, command.remark) == (1, "topic N: broker b9 is not registered here")


# -- key-value table -------------------------------------------------------------------------------


def put(server: NameServerUnderTest, namespace: str, key: str, value: str) -> Command:
    header = PutKVConfigHeader(namespace=namespace, key=key, value=value)
    return server.ask(RequestCode.PUT_KV_CONFIG, header)[0]


def get(server: NameServerUnderTest, namespace: str, key: str) -> Command:
    return server.ask(RequestCode.GET_KV_CONFIG, KVKeyHeader(namespace=namespace, key=key))[0]


def test_values_are_kept_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "namesrv" / "kvConfig.json"
    server = NameServerUnderTest(kv_config_path=path)
    put(server, "n", "k", "ü")
    put(server, "n", "gone", "v")
    server.ask(RequestCode.DELETE_KV_CONFIG, KVKeyHeader(namespace="n", key="gone"))
    assert json.loads(path.read_bytes()) == {"configTable": {"n": {"k": "ü"}}}
    again = NameServerUnderTest(kv_config_path=path)
    assert get(again, "n", "k").header(GetKVConfigResponseHeader).value == "ü"
    _, body = again.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespaceHeader(namespace="n"))
    assert KVTable.decode(body).table == {"k": "ü"}


def test_a_spoilt_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kvConfig.json"
    path.write_bytes(b"{oops")
    with pytest.raises(ConfigError, match=r"kvConfig.json: cannot read .* character 5; repair it"):
        NameServerUnderTest(kv_config_path=path)


def test_a_value_that_cannot_be_kept_is_an_error_to_its_sender(tmp_path: Path) -> None:
    server = NameServerUnderTest(kv_config_path=tmp_path / "file" / "kvConfig.json")
    (tmp_path / "file").write_bytes(b"")
    command = put(server, "n", "k", "v")
    assert command.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert str(tmp_path / "file") in (command.remark or "")
    assert not server.unexpected
    assert get(server, "n", "k").code == ResponseCode.QUERY_NOT_FOUND
