"""Headers of requests to nameservers."""

from __future__ import annotations

import msgspec

from headrace_protocol.headers import Int32, Int64, RequestHeader, TopicHeader


class BrokerHeader(RequestHeader, kw_only=True, gc=False):
    """The broker that sends a request: the common fields of 103, 104 and 322.

    broker_id: 0 is the master.
    """

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


class RegisterBrokerHeader(BrokerHeader, kw_only=True, gc=False):
    """REGISTER_BROKER (103).

    heartbeat_timeout_millis: silence after which the broker is dropped; None leaves the limit to
        the nameserver.
    enable_acting_master: None if the broker does not support acting masters.
    body_crc32: CRC-32 of the body without the sign bit; 0 disables the check.
    """

    ha_server_addr: str
    heartbeat_timeout_millis: Int64 | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: Int32 = 0
    zone_name: str | None = msgspec.field(name="__ZONE_NAME", default=None)


class RegisterBrokerResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The master's addresses, for slaves only."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class UnregisterBrokerHeader(BrokerHeader, kw_only=True, gc=False):
    """UNREGISTER_BROKER (104)."""


class QueryDataVersionHeader(BrokerHeader, kw_only=True, gc=False):
    """QUERY_DATA_VERSION (322); the body holds the broker's DataVersion."""


class QueryDataVersionResponseHeader(RequestHeader, kw_only=True, gc=False):
    """True if the broker must register its topics again."""

    changed: bool


class BrokerHeartbeatHeader(RequestHeader, kw_only=True, gc=False):
    """BROKER_HEARTBEAT (904)."""

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: Int64 | None = None
    heartbeat_timeout_mills: Int64 | None = None


class GetRouteInfoHeader(TopicHeader, kw_only=True, gc=False):
    """GET_ROUTEINFO_BY_TOPIC (105). departed: headrace's, name the departed brokers, too."""

    accept_standard_json_only: bool | None = None
    departed: bool | None = None


# RocketMQ's default. A nameserver that has been up for longer knows every topic of running brokers.
REGISTRATION_PERIOD_MS = 30_000


class GetRouteInfoResponseHeader(RequestHeader, kw_only=True, gc=False):
    """route_age_millis: longest time that a broker of the route has been silent.

    awaits_broker: with TOPIC_NOT_EXIST, whether a broker may yet register the topic.
    """

    route_age_millis: Int64 | None = None
    awaits_broker: bool | None = None


class GetBrokerMemberGroupHeader(RequestHeader, kw_only=True, gc=False):
    """GET_BROKER_MEMBER_GROUP (901)."""

    cluster_name: str
    broker_name: str


class TopicInNamesrvHeader(RequestHeader, kw_only=True, gc=False):
    """DELETE_TOPIC_IN_NAMESRV (216) and REGISTER_TOPIC_IN_NAMESRV (217).

    cluster_name: cluster to delete the topic from; all clusters by default.
    """

    topic: str
    cluster_name: str | None = None


class GetTopicsByClusterHeader(RequestHeader, kw_only=True, gc=False):
    """GET_TOPICS_BY_CLUSTER (224)."""

    cluster: str


class WritePermOfBrokerHeader(RequestHeader, kw_only=True, gc=False):
    """WIPE_WRITE_PERM_OF_BROKER (205) and ADD_WRITE_PERM_OF_BROKER (327)."""

    broker_name: str


class WipeWritePermOfBrokerResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The number of topics whose write permission was removed."""

    wipe_topic_count: Int32


class AddWritePermOfBrokerResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The number of topics whose write permission was restored."""

    add_topic_count: Int32


class KVNamespaceHeader(RequestHeader, kw_only=True, gc=False):
    """GET_KVLIST_BY_NAMESPACE (219)."""

    namespace: str


class KVKeyHeader(KVNamespaceHeader, kw_only=True, gc=False):
    """GET_KV_CONFIG (101) and DELETE_KV_CONFIG (102)."""

    key: str


class PutKVConfigHeader(KVKeyHeader, kw_only=True, gc=False):
    """PUT_KV_CONFIG (100)."""

    value: str


class GetKVConfigResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The answer to 101."""

    value: str
