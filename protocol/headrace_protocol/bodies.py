"""JSON bodies of requests and responses: one struct each, with the spelling on the wire.

Every field has RocketMQ's default, because RocketMQ leaves out null fields; unknown fields are
ignored. Source: docs/protocol.md "JSON bodies"; tests/protocol/test_bodies.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec

from headrace_protocol import fastjson, java_values
from headrace_protocol.departed import DepartedBroker  # noqa: TC001 - as below
from headrace_protocol.fastjson import MalformedJson
from headrace_protocol.headers import Int32, Int64  # noqa: TC001 - msgspec reads annotations
from headrace_protocol.statictopic.mapping import MappingInfo, TopicMapping  # noqa: TC001

if TYPE_CHECKING:
    from headrace_protocol.fastjson import Buffer

MASTER_ID = 0

PERM_INHERIT = 1
PERM_WRITE = 2
PERM_READ = 4


class Body(msgspec.Struct, rename="camel", kw_only=True):
    """Base of all bodies."""

    @classmethod
    def decode(cls, data: Buffer) -> Self:
        """Decode a body. Raises MalformedJson with the position or the field."""
        if not data:
            raise MalformedJson(f"an empty body instead of {cls.__name__}")
        return fastjson.decode(data, cls)

    def encode(self, *, strict: bool = False) -> bytes:
        """Encode as RocketMQ does. strict: as JSON that any reader accepts."""
        return fastjson.dumps(self, strict=strict)


# -- parts -----------------------------------------------------------------------------------------


class DataVersion(Body):
    """The version of a table; equal versions mean equal tables.

    timestamp: ms since 1970 of the last change.
    """

    state_version: Int64 = 0
    timestamp: Int64 = 0
    counter: Int64 = 0


class MessageQueue(msgspec.Struct, rename="camel", frozen=True, order=True):
    """One queue of a topic on one broker; a key of maps."""

    topic: str
    broker_name: str
    queue_id: Int32


class TopicConfig(Body):
    """A topic on one broker.

    perm: PERM_READ | PERM_WRITE | PERM_INHERIT. topic_filter_type: SINGLE_TAG or MULTI_TAG.
    """

    # Alphabetical, which is the order in which fastjson writes them.
    attributes: dict[str, str] = {}
    order: bool = False
    perm: Int32 = PERM_READ | PERM_WRITE
    read_queue_nums: Int32 = 16
    topic_filter_type: java_values.TopicFilterType = "SINGLE_TAG"
    topic_name: str = ""
    topic_sys_flag: Int32 = 0
    write_queue_nums: Int32 = 16


class SubscriptionGroupConfig(Body):
    """A consumer group on one broker: the body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP (200)."""

    group_name: str = ""
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: Int32 = 1
    retry_max_times: Int32 = 16
    group_retry_policy: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"type": "CUSTOMIZED"}
    )
    broker_id: Int64 = MASTER_ID
    which_broker_when_consume_slowly: Int64 = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: Int32 = 0
    consume_timeout_minute: Int32 = 15
    subscription_data_set: list[dict[str, Any]] | None = None
    attributes: dict[str, str] = {}


class SubscriptionData(Body):
    """A group's subscription to a topic.

    sub_string: the expression. code_set: Java hashes of ``tags_set``; both empty means all.
    sub_version: ms since 1970; the newest wins.
    """

    topic: str = ""
    sub_string: str = ""
    expression_type: str = "TAG"
    tags_set: list[str] = []
    code_set: list[Int32] = []
    sub_version: Int64 = 0
    class_filter_mode: bool = False


class ConsumerFilterData(Body):
    """A group's filter on a topic, as Apache's broker saves it in config/consumerFilter.json.

    client_version: the version of the subscription. born_time, dead_time: ms since 1970; dead_time
    is 0 while the group has members.
    """

    topic: str = ""
    consumer_group: str = ""
    expression: str = ""
    expression_type: str = ""
    client_version: Int64 = 0
    born_time: Int64 = 0
    dead_time: Int64 = 0
    dead: bool = False
    bloom_filter_data: dict[str, Any] | None = None


class TopicFilters(Body):
    """The filters on a topic, by group; with fields that only another broker knows."""

    topic: str = ""
    group_filter_data: dict[str, dict[str, Any]] = {}


class ConsumerFilterWrapper(Body):
    """The table of SQL92 filters, by topic, as the file has it."""

    filter_data_by_topic: dict[str, TopicFilters] = {}


# -- nameserver ------------------------------------------------------------------------------------


class QueueData(Body, gc=False):
    """The queues of a topic on one broker."""

    broker_name: str = ""
    read_queue_nums: Int32 = 0
    write_queue_nums: Int32 = 0
    perm: Int32 = 0
    topic_sys_flag: Int32 = 0


class BrokerData(Body):
    """A broker name and its addresses.

    broker_addrs: broker id -> "host:port"; id 0 is the master.
    """

    cluster: str = ""
    broker_name: str = ""
    broker_addrs: dict[Int64, str] = {}
    enable_acting_master: bool = False
    zone_name: str | None = None


class TopicRouteData(Body):
    """A topic's route: the answer to GET_ROUTEINFO_BY_TOPIC (105).

    order_topic_conf: "broker:queues;..." for strictly ordered topics. departed_brokers: headrace's.
    """

    order_topic_conf: str | None = None
    queue_datas: list[QueueData] = []
    broker_datas: list[BrokerData] = []
    filter_server_table: dict[str, list[str]] = {}
    topic_queue_mapping_by_broker: dict[str, MappingInfo] | None = None
    departed_brokers: list[DepartedBroker] | None = None


class ClusterInfo(Body):
    """All brokers: the answer to GET_BROKER_CLUSTER_INFO (106)."""

    broker_addr_table: dict[str, BrokerData] = {}
    cluster_addr_table: dict[str, list[str]] = {}
    departed_brokers: list[DepartedBroker] | None = None


class TopicList(Body):
    """Names of topics: the answer to 206, 224, 304 and 311 to 313."""

    topic_list: list[str] = []
    broker_addr: str | None = None


class KVTable(Body):
    """Text by name: the answer to 28, 103 and 219."""

    table: dict[str, str] = {}


class BrokerMemberGroup(Body):
    """The addresses of one broker name."""

    cluster: str = ""
    broker_name: str = ""
    broker_addrs: dict[Int64, str] = {}


class GetBrokerMemberGroupResponseBody(Body):
    """The answer to GET_BROKER_MEMBER_GROUP (901)."""

    broker_member_group: BrokerMemberGroup | None = None


class KVConfigSerializeWrapper(Body):
    """The file kvConfig.json: namespace -> key -> value."""

    config_table: dict[str, dict[str, str]] = {}


_NO_ENTRIES = fastjson.Written((b"{}",))


class TopicConfigSerializeWrapper(Body):
    """A broker's topics and their version: part of request 103, and the answer to 21."""

    topic_config_table: dict[str, TopicConfig] = {}
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    mapping_data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    topic_queue_mapping_detail_map: dict[str, TopicMapping] = {}
    topic_queue_mapping_info_map: dict[str, MappingInfo] = {}

    def with_table(
        self,
        table: fastjson.Written,
        details: fastjson.Written = _NO_ENTRIES,
        infos: fastjson.Written = _NO_ENTRIES,
    ) -> fastjson.Written:
        """The body with already encoded tables: topics, details and infos of mappings.

        Mappings have quoted keys: RocketMQ's client rejects bare ones here, although its broker
        writes them.
        """
        body = {
            "dataVersion": self.data_version,
            "mappingDataVersion": self.mapping_data_version,
            "topicConfigTable": table,
            "topicQueueMappingDetailMap": details,
            "topicQueueMappingInfoMap": infos,
        }
        return fastjson.Written(fastjson.dumps_parts(body))


# -- clients ---------------------------------------------------------------------------------------


class ProducerData(Body):
    """A producer group in a heartbeat."""

    group_name: str = ""


class ConsumerData(Body):
    """A consumer group in a heartbeat.

    consume_type: CONSUME_ACTIVELY, CONSUME_PASSIVELY or CONSUME_POP. message_model: CLUSTERING or
    BROADCASTING. consume_from_where: CONSUME_FROM_LAST_OFFSET, _FIRST_OFFSET or _TIMESTAMP.
    """

    group_name: str = ""
    consume_type: java_values.ConsumeType = "CONSUME_PASSIVELY"
    message_model: java_values.MessageModel = "CLUSTERING"
    consume_from_where: java_values.ConsumeFromWhere = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionData] = []
    unit_mode: bool = False


class HeartbeatData(Body):
    """A client's groups and subscriptions: the body of HEART_BEAT (34).

    heartbeat_fingerprint: 0, or in version 2 of heartbeats a hash of the subscriptions.
    without_sub: in version 2, whether unchanged subscriptions are left out.
    """

    client_id: str = msgspec.field(name="clientID", default="")
    producer_data_set: list[ProducerData] = []
    consumer_data_set: list[ConsumerData] = []
    heartbeat_fingerprint: Int32 = 0
    without_sub: bool = False


class CheckClientRequestBody(Body):
    """The body of CHECK_CLIENT_CONFIG (46)."""

    client_id: str = ""
    group: str = ""
    namespace: str | None = None
    subscription_data: SubscriptionData = msgspec.field(default_factory=SubscriptionData)


class GetConsumerListByGroupResponseBody(Body):
    """The members of a group: the answer to 38."""

    consumer_id_list: list[str] = []


class LockBatchRequestBody(Body):
    """Queues that a client requests to lock or unlock: the body of 41 and 42."""

    consumer_group: str = ""
    client_id: str = ""
    only_this_broker: bool = False
    mq_set: list[MessageQueue] = []


class LockBatchResponseBody(Body):
    """The queues that were locked: the answer to 41."""

    lock_ok_mq_set: list[MessageQueue] = msgspec.field(name="lockOKMQSet", default=[])


class QueryAssignmentRequestBody(Body):
    """The body of QUERY_ASSIGNMENT (400)."""

    topic: str = ""
    consumer_group: str = ""
    client_id: str = ""
    strategy_name: str = ""
    message_model: java_values.MessageModel = "CLUSTERING"


class MessageQueueAssignment(Body):
    """A queue and the mode of reading it, "PULL" or "POP"."""

    message_queue: MessageQueue
    mode: java_values.MessageRequestMode = "PULL"
    attachments: dict[str, str] | None = None


class QueryAssignmentResponseBody(Body):
    """The answer to 400. message_queue_assignments: without a list, members keep their queues."""

    message_queue_assignments: list[MessageQueueAssignment] | None = None


class SetMessageRequestModeRequestBody(Body):
    """A group's mode of reading a topic: the body of SET_MESSAGE_REQUEST_MODE (401)."""

    topic: str = ""
    consumer_group: str = ""
    mode: java_values.MessageRequestMode = "PULL"
    pop_share_queue_num: Int32 = 0


# -- admin -----------------------------------------------------------------------------------------


class TopicConfigAndQueueMapping(TopicConfig):
    """The answer to GET_TOPIC_CONFIG (351). mapping_detail: of a static topic."""

    mapping_detail: TopicMapping | None = None

    @classmethod
    def decode(cls, data: Buffer) -> Self:
        """Decode in linear time, however long the chains; the fields must match exactly."""
        return fastjson.decode_strict(data, cls)


class CreateTopicListRequestBody(Body):
    """The body of UPDATE_AND_CREATE_TOPIC_LIST (18)."""

    topic_config_list: list[TopicConfig] = []


class SubscriptionGroupList(Body):
    """The groups of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST (225)."""

    group_config_list: list[SubscriptionGroupConfig] = []


class SubscriptionGroupWrapper(Body):
    """A broker's groups and their version: the answer to 201, and subscriptionGroup.json."""

    subscription_group_table: dict[str, SubscriptionGroupConfig] = {}
    forbidden_table: dict[str, dict[str, Int32]] = {}
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)


class TopicOffset(Body):
    """The extent of a queue.

    last_update_timestamp: store time of its last message, in ms.
    missing_count: offsets without a message between these two, if a compaction left such.
    record_bytes: bytes of its records, if requested with ``with_bytes``.
    """

    last_update_timestamp: Int64 = 0
    max_offset: Int64 = 0
    min_offset: Int64 = 0
    missing_count: Int64 | None = None
    record_bytes: Int64 | None = None

    @property
    def message_count(self) -> int:
        """Number of messages."""
        return self.max_offset - self.min_offset - (self.missing_count or 0)


class CompactedQueueState(Body):
    """A queue of a compacted topic, and what its last compaction did.

    messages, bytes: in the compaction log. dirty_bytes: those that no compaction has read yet.
    last_run_ms: when the last one ended, 0 without one; run_ms: how long it took. bytes_before,
    bytes_after: of what it read, and of what it left. kept, dropped: messages.
    """

    queue_id: Int32 = 0
    messages: Int64 = 0
    bytes: Int64 = 0
    dirty_bytes: Int64 = 0
    last_run_ms: Int64 = 0
    run_ms: Int64 = 0
    bytes_before: Int64 = 0
    bytes_after: Int64 = 0
    kept: Int64 = 0
    dropped: Int64 = 0


class CompactedTopicState(Body):
    """The answer to COMPACT_TOPIC (7680005).

    is_running, is_rebuilding: whether a compaction or a rebuild was requested that has not ended.
    rebuild_problem: why the last rebuild has failed, "" if it has not.
    """

    is_running: bool = False
    is_rebuilding: bool = False
    rebuild_problem: str = ""
    queues: list[CompactedQueueState] = []


class TopicStatsTable(Body):
    """The answer to GET_TOPIC_STATS_INFO (202)."""

    offset_table: dict[MessageQueue, TopicOffset] = {}
    topic_put_tps: float = 0.0


class OffsetWrapper(Body):
    """A group's progress in a queue.

    broker_offset: max offset of the queue.
    last_timestamp: store time of the last consumed message, in ms.
    missing_count: offsets without a message from the consumed one on, if a compaction left such.
    out_count: messages that are out, if the group pops the queue.
    """

    broker_offset: Int64 = 0
    consumer_offset: Int64 = 0
    last_timestamp: Int64 = 0
    missing_count: Int64 | None = None
    out_count: Int64 | None = None
    pull_offset: Int64 = 0


class ConsumeStats(Body):
    """The answer to GET_CONSUME_STATS (208)."""

    offset_table: dict[MessageQueue, OffsetWrapper] = {}
    consume_tps: float = 0.0


class ResetOffsetBody(Body):
    """The offset that each queue was reset to: the answer to 222, and the body of 220."""

    offset_table: dict[MessageQueue, Int64] = {}


class DirectResult(Body):
    """The outcome of a message that a member processed again: the answer to 309.

    consume_result: CR_SUCCESS, CR_LATER, CR_ROLLBACK, CR_COMMIT, CR_THROW_EXCEPTION or
    CR_RETURN_NULL.
    """

    auto_commit: bool = True
    consume_result: str = ""
    order: bool = False
    remark: str | None = None
    spent_time_mills: Int64 = 0


class ConsumerStatusBody(Body):
    """Offsets that a member has come to: the answer to 221."""

    message_queue_table: dict[MessageQueue, Int64] = {}


class LocalOffsets(Body):
    """A broadcasting consumer's progress: its file offsets.json."""

    offset_table: dict[MessageQueue, Int64] = {}


class GroupList(Body):
    """Groups that consume a topic: the answer to 300."""

    group_list: list[str] = []


class ClientConnection(Body):
    """A connected client, with its language by name and the version from its frames."""

    client_id: str = ""
    client_addr: str = ""
    language: str = ""
    version: Int32 = 0


class ProducerInfo(Body):
    """A producer as GET_ALL_PRODUCER_INFO (328) lists it; Apache's spelling of remoteIP."""

    client_id: str = ""
    remote_ip: str = msgspec.field(name="remoteIP", default="")
    language: str = ""
    version: Int32 = 0
    last_update_timestamp: Int64 = 0


class ProducerConnection(Body):
    """The answer to GET_PRODUCER_CONNECTION_LIST (204)."""

    connection_set: list[ClientConnection] = []


class ConsumerConnection(Body):
    """The answer to GET_CONSUMER_CONNECTION_LIST (203)."""

    connection_set: list[ClientConnection] = []
    subscription_table: dict[str, SubscriptionData] = {}
    consume_type: str = ""
    message_model: str = ""
    consume_from_where: str = ""


class ConsumerRunningInfo(Body):
    """A member's report about itself: the answer to 307.

    properties: its settings. mq_table: the queues that it has now. status_table: by topic. Clients
    differ in the fields of these.
    """

    properties: dict[str, str] = {}
    subscription_set: list[Any] = []
    mq_table: dict[MessageQueue, Any] = {}
    status_table: dict[str, Any] = {}


class GroupQueue(Body):
    """A queue of a group, as its broker sees it.

    owner: client id of the last pull, or the client's address if it is not a member. pulled_ms_ago:
    in steps of 10 s; -1 if nothing was pulled. lock_owner: client id; empty without a lock.
    is_idle: whether it should be pulled, and was not for 30 s.
    """

    topic: str = ""
    queue_id: Int32 = 0
    owner: str = ""
    pulled_ms_ago: Int64 = -1
    lock_owner: str = ""
    lock_ms_left: Int64 = 0
    is_idle: bool = False


class GroupDescription(Body):
    """The answer to DESCRIBE_GROUP.

    conflict: two members with different subscriptions; empty if all agree.
    """

    queues: list[GroupQueue] = []
    conflict: str = ""


class WaitingMessage(Body):
    """A record that waits for the broker.

    physical_offset: of the record. due_ms: of a timer, in ms since 1970; of a half message, when
    its producer may be asked.
    """

    physical_offset: Int64 = 0
    due_ms: Int64 = 0


class WaitingList(Body):
    """The answer to LIST_TIMERS and LIST_TRANSACTIONS: the first messages, and how many wait."""

    messages: list[WaitingMessage] = []
    count: Int64 = 0


class TimingCount(Body):
    """The number of timers that wait for a topic."""

    count: Int64 = 0


class TimerMetrics(Body):
    """The answer to GET_TIMER_METRICS (61)."""

    timing_count: dict[str, TimingCount] = {}


class ConsumerOffsetSerializeWrapper(Body):
    """Progress of all groups: the answer to 43, and consumerOffset.json.

    offset_table, pull_offset_table: "topic@group" -> queue id -> offset.
    """

    offset_table: dict[str, dict[Int32, Int64]] = {}
    pull_offset_table: dict[str, dict[Int32, Int64]] = {}
    group_topic_map: dict[str, list[str]] = {}
    data_version: DataVersion = msgspec.field(default_factory=DataVersion)


# -- queue inspection ------------------------------------------------------------------------------


class QueueTimeSpan(Body):
    """A group's position in a queue as store times, in ms."""

    message_queue: MessageQueue
    min_time_stamp: Int64 = 0
    max_time_stamp: Int64 = 0
    consume_time_stamp: Int64 = 0
    delay_time: Int64 = 0


class QueryConsumeTimeSpanBody(Body):
    """The answer to QUERY_CONSUME_TIME_SPAN (303)."""

    consume_time_span_set: list[QueueTimeSpan] = []


class ConsumeQueueData(Body):
    """A unit of a ConsumeQueue. eval: whether its message passes the filter of the group."""

    physic_offset: Int64 = 0
    physic_size: Int32 = 0
    tags_code: Int64 = 0
    eval: bool = False


class QueryConsumeQueueResponseBody(Body):
    """The answer to QUERY_CONSUME_QUEUE (321).

    filter_data: the registered filter of the group as JSON, or why it has none.
    """

    subscription_data: SubscriptionData | None = None
    filter_data: str | None = None
    queue_data: list[ConsumeQueueData] = []
    min_queue_index: Int64 = 0
    max_queue_index: Int64 = 0
