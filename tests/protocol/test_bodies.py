"""JSON bodies: every one that the peer wrote is read, and written back as it was."""

from __future__ import annotations

import json
import zlib

import pytest
from msgspec import Struct

from headrace_protocol import bodies, fastjson
from headrace_protocol.bodies import (
    BrokerData,
    DataVersion,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicRouteData,
)
from headrace_protocol.fastjson import MalformedJson
from headrace_protocol.registration import RegisterBrokerBody
from headrace_protocol.statictopic.mapping import MappingInfo, TopicMapping
from tests.support.golden_frames import GoldenFrame, golden_frames
from tests.support.registrations import compressed

# (request, whether its response) -> body
BODIES: dict[tuple[str, bool], type[Struct]] = {
    ("CHECK_CLIENT_CONFIG", False): bodies.CheckClientRequestBody,
    ("GET_ALL_SUBSCRIPTIONGROUP_CONFIG", True): bodies.SubscriptionGroupWrapper,
    ("GET_ALL_TOPIC_LIST_FROM_NAMESERVER", True): bodies.TopicList,
    ("GET_BROKER_CLUSTER_INFO", True): bodies.ClusterInfo,
    ("GET_CONSUMER_LIST_BY_GROUP", True): bodies.GetConsumerListByGroupResponseBody,
    ("GET_CONSUME_STATS", True): bodies.ConsumeStats,
    ("GET_ROUTEINFO_BY_TOPIC", True): bodies.TopicRouteData,
    ("GET_TOPIC_CONFIG", True): bodies.TopicConfigAndQueueMapping,
    ("GET_TOPIC_STATS_INFO", True): bodies.TopicStatsTable,
    ("HEART_BEAT", False): bodies.HeartbeatData,
    ("INVOKE_BROKER_TO_RESET_OFFSET", True): bodies.ResetOffsetBody,
    ("LOCK_BATCH_MQ", False): bodies.LockBatchRequestBody,
    ("LOCK_BATCH_MQ", True): bodies.LockBatchResponseBody,
    ("QUERY_ASSIGNMENT", False): bodies.QueryAssignmentRequestBody,
    ("QUERY_ASSIGNMENT", True): bodies.QueryAssignmentResponseBody,
    ("QUERY_TOPIC_CONSUME_BY_WHO", True): bodies.GroupList,
    ("REGISTER_BROKER", False): RegisterBrokerBody,
    ("SET_MESSAGE_REQUEST_MODE", False): bodies.SetMessageRequestModeRequestBody,
    ("UNLOCK_BATCH_MQ", False): bodies.LockBatchRequestBody,
    ("UPDATE_AND_CREATE_STATIC_TOPIC", False): TopicMapping,
    ("UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", False): bodies.SubscriptionGroupConfig,
}


def json_frames() -> list[GoldenFrame]:
    return [frame for frame in golden_frames() if frame.body[:1] == b"{"]


def body_type(frame: GoldenFrame) -> type[Struct]:
    return BODIES[frame.request_name, frame.response]


def test_every_body_has_been_seen() -> None:
    assert {(frame.request_name, frame.response) for frame in json_frames()} == set(BODIES)


def test_bodies_of_the_peer_keep_every_byte() -> None:
    for frame in json_frames():
        # Routes are asked for in strict JSON by clients of this version.
        strict = frame.request_name == "GET_ROUTEINFO_BY_TOPIC"
        body = fastjson.decode(frame.body, body_type(frame))
        assert fastjson.dumps(body, strict=strict) == frame.body, frame.seq
        assert fastjson.dumps(fastjson.loads(frame.body), strict=strict) == frame.body, frame.seq


def test_values_arrive_in_their_fields() -> None:
    stats = next(f for f in json_frames() if body_type(f) is bodies.ConsumeStats)
    queue = bodies.MessageQueue("W_TOPIC", "broker-a", 0)
    assert bodies.ConsumeStats.decode(stats.body).offset_table[queue] == bodies.OffsetWrapper(
        broker_offset=8, consumer_offset=7, pull_offset=8, last_timestamp=1795235857818
    )
    route = next(f for f in json_frames() if body_type(f) is TopicRouteData)
    assert TopicRouteData.decode(route.body).broker_datas == [
        BrokerData(
            cluster="DefaultCluster", broker_name="broker-a", broker_addrs={0: "127.0.0.2:10911"}
        )
    ]


def test_route_has_two_dialects() -> None:
    route = TopicRouteData(
        broker_datas=[BrokerData(cluster="ü", broker_addrs={10: "a:1", 2: "b:2"})],
        topic_queue_mapping_by_broker={"b": MappingInfo(curr_id_map={1: 0})},
    )
    strict = route.encode(strict=True)
    assert strict.isascii()
    assert json.loads(strict)["brokerDatas"][0]["brokerAddrs"] == {"10": "a:1", "2": "b:2"}
    assert b'{10:"a:1",2:"b:2"}' in route.encode()
    assert b'"currIdMap":{1:0}' in route.encode()
    assert TopicRouteData.decode(strict) == TopicRouteData.decode(route.encode()) == route


def test_refuses_what_java_could_not_hold() -> None:
    with pytest.raises(MalformedJson, match=r"perm"):
        TopicConfig.decode(b'{"perm":2147483648}')
    with pytest.raises(MalformedJson, match="an empty body instead of DataVersion"):
        DataVersion.decode(b"")


# -- the compressed register body ------------------------------------------------------------------


def register_body(
    topics: list[TopicConfig], mappings: list[MappingInfo], version: DataVersion
) -> RegisterBrokerBody:
    return RegisterBrokerBody(
        filter_server_list=["10.0.0.1:1"],
        topic_config_serialize_wrapper=TopicConfigSerializeWrapper(
            data_version=version,
            topic_config_table={topic.topic_name: topic for topic in topics},
            topic_queue_mapping_info_map={info.topic: info for info in mappings},
        ),
    )


def test_an_old_brokers_registration_has_no_mappings() -> None:
    topics = [TopicConfig(topic_name="T", perm=4)]
    data = compressed(register_body(topics, [MappingInfo(topic="T")], DataVersion(7)))
    old = RegisterBrokerBody.decode_compressed(data, has_mappings=False)
    assert old == register_body(topics, [], DataVersion(7))


def test_compressed_register_body_has_the_documented_bytes() -> None:
    body = register_body([TopicConfig(topic_name="T", attributes={"a": "b c"})], [], DataVersion())
    version = b'{"counter":0,"stateVersion":0,"timestamp":0}'
    assert zlib.decompress(compressed(body)) == b"".join(
        (
            len(version).to_bytes(4) + version,
            (1).to_bytes(4),
            (32).to_bytes(4) + b'T 16 16 6 SINGLE_TAG {"a":"b c"}',
            (14).to_bytes(4) + b'["10.0.0.1:1"]',
            (0).to_bytes(4),
        )
    )


BLOCKS = zlib.decompress(
    compressed(register_body([TopicConfig(topic_name="T")], [], DataVersion()))
)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the end is missing"),
        (b"not zlib", "incorrect header"),
        (zlib.compress(BLOCKS)[:-5], "the end is missing"),
        (zlib.compress(BLOCKS[:-1]), "requires a buffer of 4 bytes"),
        (zlib.compress((9).to_bytes(4) + b"{}"), "a block of 9 bytes, found 2"),
        (zlib.compress((-1).to_bytes(4, signed=True)), "a block of -1 bytes"),
        (zlib.compress(BLOCKS.replace(b" 16 ", b" xx ")), r"topic 'T xx 16 6 .*readQueueNums"),
        (zlib.compress(BLOCKS.replace(b"T 16 16", b"T_16_16")), "expected topicName readQueueN"),
        (zlib.compress(BLOCKS.replace(b"SINGLE", b"\xff\xff\xff\xff\xff\xff")), "utf-8"),
        (zlib.compress(bytes(9 * 1024 * 1024)), "over 8388608 bytes inflated"),
        (
            zlib.compress((2**20 + 1).to_bytes(4)),
            "1048577 bytes in a block: the maximum is 1048576",
        ),
        (
            zlib.compress((2).to_bytes(4) + b"{}" + (65_537).to_bytes(4)),
            "65537 topics: the maximum is 65536",
        ),
    ],
)
def test_malformed_compressed_register_body_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedJson, match=reason):
        RegisterBrokerBody.decode_compressed(data, has_mappings=True)
