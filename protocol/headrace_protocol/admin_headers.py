"""Headers of administrators' requests to brokers."""

from __future__ import annotations

import msgspec

from headrace_protocol.headers import Int32, Int64, QueueHeader, RequestHeader, TopicHeader


class CreateTopicHeader(TopicHeader, kw_only=True, gc=False):
    """UPDATE_AND_CREATE_TOPIC (17)."""

    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str
    default_topic: str | None = None
    topic_sys_flag: Int32 | None = None
    order: bool | None = None
    attributes: str | None = None
    force: bool | None = None


class CreateStaticTopicHeader(CreateTopicHeader, kw_only=True, gc=False):
    """UPDATE_AND_CREATE_STATIC_TOPIC (513); the body is the broker's TopicQueueMappingDetail.

    read_epoch: headrace's own; epoch of the mapping that the change is based on, 0 without one.
    """

    read_epoch: Int64 | None = None


class DeleteTopicHeader(RequestHeader, kw_only=True, gc=False):
    """DELETE_TOPIC_IN_BROKER (215)."""

    topic: str


class GetTopicConfigHeader(TopicHeader, kw_only=True, gc=False):
    """GET_TOPIC_CONFIG (351); with ``logical`` the answer has a static topic's mapping."""


class GetTopicStatsHeader(TopicHeader, kw_only=True, gc=False):
    """GET_TOPIC_STATS_INFO (202).

    with_bytes: also the bytes of each queue's records; headrace's own, which other brokers ignore.
    """

    with_bytes: bool | None = None


class TopicConfigResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The answer to 351; incarnation is headrace's own, see docs/protocol.md "Topics"."""

    incarnation: str | None = None


class GetAllTopicConfigHeader(RequestHeader, kw_only=True, gc=False):
    """GET_ALL_TOPIC_CONFIG (21); without fields it requests all topics."""

    topic_seq: Int32 | None = None
    max_topic_num: Int32 | None = None


class GetAllTopicConfigResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The total number of topics."""

    total_topic_num: Int32


class GetAllSubscriptionGroupHeader(RequestHeader, kw_only=True, gc=False):
    """GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201); without fields it requests all groups."""

    group_seq: Int32 | None = None
    max_group_num: Int32 | None = None


class GetAllSubscriptionGroupResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The total number of groups."""

    total_group_num: Int32


class DeleteSubscriptionGroupHeader(RequestHeader, kw_only=True, gc=False):
    """DELETE_SUBSCRIPTIONGROUP (207)."""

    group_name: str
    clean_offset: bool | None = None


class GetConsumeStatsHeader(RequestHeader, kw_only=True, gc=False):
    """GET_CONSUME_STATS (208)."""

    consumer_group: str
    topic: str | None = None


class GetProducerConnectionListHeader(RequestHeader, kw_only=True, gc=False):
    """GET_PRODUCER_CONNECTION_LIST (204)."""

    producer_group: str


class QueryTopicConsumeByWhoHeader(RequestHeader, kw_only=True, gc=False):
    """QUERY_TOPIC_CONSUME_BY_WHO (300); logical=False: groups whose progress the broker keeps."""

    topic: str
    logical: bool | None = msgspec.field(name="lo", default=None)


class ResetOffsetHeader(RequestHeader, kw_only=True, gc=False):
    """INVOKE_BROKER_TO_RESET_OFFSET (222), RESET_CONSUMER_CLIENT_OFFSET (220)."""

    topic: str
    group: str
    timestamp: Int64
    is_force: bool = False
    queue_id: Int32 = -1
    offset: Int64 | None = None


class ResumeCheckHalfMessageHeader(RequestHeader, kw_only=True, gc=False):
    """RESUME_CHECK_HALF_MESSAGE (323). msg_id: offset message id of a discarded half."""

    topic: str | None = None
    msg_id: str | None = None


class GetBrokerConfigResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The version of the settings, a DataVersion as JSON text."""

    version: str


class HeartbeatResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The answer to HEART_BEAT (34): heartbeats may leave out unchanged subscriptions."""

    is_support_heart_beat_v2: bool = msgspec.field(name="IS_SUPPORT_HEART_BEAT_V2")
    is_sub_change: bool = msgspec.field(name="IS_SUB_CHANGE")


class QueryConsumeTimeSpanHeader(RequestHeader, kw_only=True, gc=False):
    """QUERY_CONSUME_TIME_SPAN (303); logical=False: of physical queues, also in a static topic."""

    topic: str
    group: str
    logical: bool | None = msgspec.field(name="lo", default=None)


class CloneGroupOffsetHeader(RequestHeader, kw_only=True, gc=False):
    """CLONE_GROUP_OFFSET (314); without a topic it copies all topics of the source group."""

    src_group: str
    dest_group: str
    topic: str | None = None


class QueryConsumeQueueHeader(QueueHeader, kw_only=True, gc=False):
    """QUERY_CONSUME_QUEUE (321); index is the first queue offset wanted."""

    index: Int64
    count: Int32
    consumer_group: str | None = None


class GetConsumerStatusHeader(RequestHeader, kw_only=True, gc=False):
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223), GET_CONSUMER_STATUS_FROM_CLIENT (221).

    client_addr: client id of the member to ask; all of them without one.
    """

    topic: str
    group: str
    client_addr: str | None = None


class ConsumeDirectlyHeader(RequestHeader, kw_only=True, gc=False):
    """CONSUME_MESSAGE_DIRECTLY (309): a member is to process a message again.

    msg_id: offset message id. Of Java's clients: the member's client id may be missing.
    """

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None


class QueryCorrectionOffsetHeader(RequestHeader, kw_only=True, gc=False):
    """QUERY_CORRECTION_OFFSET (308). filter_groups: groups that don't count, joined by commas."""

    topic: str
    compare_group: str
    filter_groups: str | None = None


class ViewBrokerStatsHeader(RequestHeader, kw_only=True, gc=False):
    """VIEW_BROKER_STATS_DATA (315)."""

    stats_name: str
    stats_key: str


class GetBrokerConsumeStatsHeader(RequestHeader, kw_only=True, gc=False):
    """GET_BROKER_CONSUME_STATS (317)."""

    is_order: bool = False


class GroupHeader(RequestHeader, kw_only=True, gc=False):
    """QUERY_TOPICS_BY_CONSUMER (343), GET_SUBSCRIPTIONGROUP_CONFIG (352)."""

    group: str


class GroupOfTopicHeader(RequestHeader, kw_only=True, gc=False):
    """QUERY_SUBSCRIPTION_BY_CONSUMER (345), UPDATE_AND_GET_GROUP_FORBIDDEN (353).

    readable: of 353, whether the group may read the topic from now on; unchanged without one.
    """

    group: str
    topic: str
    readable: bool | None = None


class SetReadModeHeader(RequestHeader, kw_only=True, gc=False):
    """SET_COMMITLOG_READ_MODE (2004): 0 normal, 1 random."""

    mode: str | None = msgspec.field(name="READ_AHEAD_MODE", default=None)
