"""Request and response headers: one struct per request, with the spelling on the wire.

Every value is text on the wire; the structs hold the parsed values. Ranges are those of RocketMQ's
Java types, so that an accepted number fits every record and index it is stored in.
Source: docs/protocol.md "Requests"; tests/protocol/test_golden_frames.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class RequestHeader(msgspec.Struct, rename="camel", kw_only=True, gc=False):
    """Base of all request and response headers: sets Java's spelling of names."""


class TopicHeader(RequestHeader, kw_only=True, gc=False):
    """A request about a topic.

    logical: "lo"; False asks for the physical queue of a static topic.
    bname: broker that is asked, where a static topic's queue names none.
    """

    topic: str
    logical: bool | None = msgspec.field(name="lo", default=None)
    bname: str | None = None


class QueueHeader(TopicHeader, kw_only=True, gc=False):
    """A request about one queue of a topic.

    forwarded: headrace's own; a broker passed the request on to a static queue's leader, which
        does not pass it on again. Answers to sends and pulls then name the ``leader``.
    """

    queue_id: Int32
    forwarded: bool | None = None


# -- producer -> broker ----------------------------------------------------------------------------


class SendMessageHeader(RequestHeader, kw_only=True, gc=False):
    """SEND_MESSAGE (10): the fields of V2 under their long names; see QueueHeader."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    properties: str | None = None
    reconsume_times: Int32 | None = None
    unit_mode: bool | None = None
    batch: bool | None = None
    max_reconsume_times: Int32 | None = None
    logical: bool | None = msgspec.field(name="lo", default=None)
    bname: str | None = None
    forwarded: bool | None = None


class SendMessageHeaderV2(RequestHeader, kw_only=True, gc=False):
    """SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320); see QueueHeader."""

    producer_group: str = msgspec.field(name="a")
    topic: str = msgspec.field(name="b")
    default_topic: str = msgspec.field(name="c")
    default_topic_queue_nums: Int32 = msgspec.field(name="d")
    queue_id: Int32 = msgspec.field(name="e")
    sys_flag: Int32 = msgspec.field(name="f")
    born_timestamp: Int64 = msgspec.field(name="g")
    flag: Int32 = msgspec.field(name="h")
    properties: str | None = msgspec.field(name="i", default=None)
    reconsume_times: Int32 | None = msgspec.field(name="j", default=None)
    unit_mode: bool | None = msgspec.field(name="k", default=None)
    max_reconsume_times: Int32 | None = msgspec.field(name="l", default=None)
    batch: bool | None = msgspec.field(name="m", default=None)
    bname: str | None = msgspec.field(name="n", default=None)
    logical: bool | None = msgspec.field(name="lo", default=None)
    forwarded: bool | None = None


class SendMessageResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The queue and offset at which a message was stored.

    msg_id: offset message id; for a batch, all ids joined by commas.
    batch_uniq_id: the UNIQ_KEY of a batch that was stored as one record.
    recall_handle: of a timer, what recalls it; see ``recall_handle``.
    leader: see QueueHeader.
    """

    msg_id: str
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    leader: str | None = None
    # The Java client reads both without checking for their presence.
    region: str = msgspec.field(name="MSG_REGION", default="DefaultRegion")
    trace_on: bool = msgspec.field(name="TRACE_ON", default=True)


class PushReplyHeader(RequestHeader, kw_only=True, gc=False):
    """PUSH_REPLY_MESSAGE_TO_CLIENT (326): a reply, for the client that waits for it.

    born_host, store_host: of the replier and of the broker, "host:port". properties: the reply's,
    with the time of this request added. The other fields are those of SEND_MESSAGE.
    """

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    properties: str | None = None
    reconsume_times: Int32 | None = None
    unit_mode: bool | None = None
    born_host: str
    store_host: str
    store_timestamp: Int64


class BulkSendHeader(RequestHeader, kw_only=True, gc=False):
    """BULK_SEND (7680002); the body holds ``count`` sizes, then the records.

    default_topic, default_topic_queue_nums: as in SEND_MESSAGE. body_crc32: of the whole body.
    logical, bname, forwarded: see QueueHeader.
    """

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    count: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    body_crc32: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] | None = None
    logical: bool | None = msgspec.field(name="lo", default=None)
    bname: str | None = None
    forwarded: bool | None = None


# -- staged writes ---------------------------------------------------------------------------------

# Used as names of folders and files.
StagedName = Annotated[str, msgspec.Meta(pattern=r"\A[a-zA-Z0-9_-]{1,64}\Z")]
BatchId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class StageSendHeader(BulkSendHeader, kw_only=True, gc=False):
    """STAGE_SEND (7680010): a block as in BULK_SEND, to be staged.

    attempt: name of the writing attempt, unique within the query.
    block_number: index among the attempt's blocks at this broker, from 0.
    """

    query_id: StagedName
    batch_id: BatchId
    attempt: StagedName
    block_number: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class StageSealHeader(RequestHeader, kw_only=True, gc=False):
    """STAGE_SEAL (7680011): all blocks of an attempt have been sent."""

    query_id: StagedName
    batch_id: BatchId
    attempt: StagedName
    block_count: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class StageSealResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The sealed data on disk."""

    file_bytes: Int64
    record_count: Int64


class StageQueryHeader(RequestHeader, kw_only=True, gc=False):
    """STAGE_STATE (7680012) and STAGE_FORGET (7680016)."""

    query_id: StagedName


class StageStateResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The state of a query at this broker.

    applied_batch_id: the last micro-batch with its records in the log, -1 before the first.
    """

    broker_name: str
    applied_batch_id: Int64


class StageDecideHeader(StageQueryHeader, kw_only=True, gc=False):
    """STAGE_DECIDE (7680013).

    replaces: id of a decision for the same micro-batch that cannot have been applied.
    """

    replaces: str | None = None


class StageCommitHeader(StageQueryHeader, kw_only=True, gc=False):
    """STAGE_COMMIT (7680014): apply the decision with this id."""

    batch_id: BatchId
    decision_id: str


class StageCommitResponseHeader(RequestHeader, kw_only=True, gc=False):
    """already_done: the micro-batch was already in the log."""

    already_done: bool


class StageAbortHeader(StageQueryHeader, kw_only=True, gc=False):
    """STAGE_ABORT (7680015); the body names the attempts."""

    batch_id: BatchId


# -- consumer <-> broker ---------------------------------------------------------------------------


class PullMessageHeader(QueueHeader, kw_only=True, gc=False):
    """PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361)."""

    consumer_group: str
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32
    commit_offset: Int64
    suspend_timeout_millis: Int64
    sub_version: Int64
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: Int32 | None = None


class PullMessageResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The result of a pull; the body holds the records. leader: see QueueHeader."""

    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    offset_delta: Int64 | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
    leader: str | None = None


class BulkPullHeader(QueueHeader, kw_only=True, gc=False):
    """BULK_PULL (7680003).

    max_msg_nums, max_msg_bytes: maximum number of records, and of their bytes.
    subscription: always part of the request itself.
    """

    consumer_group: str
    queue_offset: Int64
    max_msg_nums: Int32
    max_msg_bytes: Int32
    sys_flag: Int32
    commit_offset: Int64
    suspend_timeout_millis: Int64
    subscription: str = "*"
    expression_type: str | None = None


class BulkPullResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The layout of a bulk pull's body; see ``columns.RecordColumns``.

    layout: "log" for the log's bytes from ``first_physical_offset`` on, "gathered" for the
    records back to back.
    has_queue_offsets: whether the body has them; if not, they are contiguous and end at
        ``next_begin_offset``.
    offset_delta: to add to the body's queue offsets for those of a static topic's queue, which
        the header has.
    leader: see QueueHeader.
    """

    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    count: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    layout: Literal["log", "gathered"] = "log"
    first_physical_offset: Int64 = 0
    has_queue_offsets: bool = False
    offset_delta: Int64 | None = None
    leader: str | None = None


class GetByKeyHeader(TopicHeader, kw_only=True, gc=False):
    """GET_BY_KEY (7680004); the body holds the keys, see ``key_lookup``.

    count: number of keys. max_msg_bytes: maximum bytes of the records in the answer.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    max_msg_bytes: Int32


class GetByKeyResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The results of the first ``count`` keys, at least one; see ``key_lookup``."""

    count: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class CompactTopicHeader(TopicHeader, kw_only=True, gc=False):
    """COMPACT_TOPIC (7680005).

    start: compact the topic's queues now. rebuild_from: HOST:PORT of a broker from which to rebuild
    them. Without both the answer only describes them.
    """

    start: bool = False
    rebuild_from: str | None = None


class QueryConsumerOffsetHeader(QueueHeader, kw_only=True, gc=False):
    """QUERY_CONSUMER_OFFSET (14)."""

    consumer_group: str
    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffsetHeader(QueueHeader, kw_only=True, gc=False):
    """UPDATE_CONSUMER_OFFSET (15)."""

    consumer_group: str
    commit_offset: Int64


class SearchOffsetHeader(QueueHeader, kw_only=True, gc=False):
    """SEARCH_OFFSET_BY_TIMESTAMP (29)."""

    timestamp: Int64
    boundary_type: str | None = None


class GetMaxOffsetHeader(QueueHeader, kw_only=True, gc=False):
    """GET_MAX_OFFSET (30)."""

    committed: bool | None = None


class GetMinOffsetHeader(QueueHeader, kw_only=True, gc=False):
    """GET_MIN_OFFSET (31)."""


class GetEarliestMsgStoretimeHeader(QueueHeader, kw_only=True, gc=False):
    """GET_EARLIEST_MSG_STORETIME (32)."""


class OffsetResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The answer to 14, 29, 30 and 31."""

    offset: Int64


class TimestampResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The answer to 32, in milliseconds since 1970."""

    timestamp: Int64


class ViewMessageHeader(RequestHeader, kw_only=True, gc=False):
    """VIEW_MESSAGE_BY_ID (33); offset is the physical one."""

    offset: Int64
    topic: str | None = None


class QueryMessageHeader(TopicHeader, kw_only=True, gc=False):
    """QUERY_MESSAGE (12).

    last_key: where an index that the peer keeps in RocksDB resumes; file indexes ignore it.
    before_offset: only records that begin below this physical offset. waiting: only messages to
    the topic that wait to be delivered. Both are read by our brokers only.
    """

    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    index_type: str | None = None
    unique_key_query: bool | None = msgspec.field(name="_UNIQUE_KEY_QUERY", default=None)
    last_key: str | None = None
    before_offset: Int64 | None = None
    waiting: bool | None = None


class QueryMessageResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The extent of the index.

    waits_until: times at which messages that wait are delivered, 0 if undecided, joined by commas.
    """

    index_last_update_timestamp: Int64
    index_last_update_phyoffset: Int64
    waits_until: str | None = None


class UnregisterClientHeader(RequestHeader, kw_only=True, gc=False):
    """UNREGISTER_CLIENT (35)."""

    client_id: str = msgspec.field(name="clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class ConsumerGroupHeader(RequestHeader, kw_only=True, gc=False):
    """GET_CONSUMER_LIST_BY_GROUP (38), NOTIFY_CONSUMER_IDS_CHANGED (40), 203, DESCRIBE_GROUP."""

    consumer_group: str


class LockBatchHeader(RequestHeader, kw_only=True, gc=False):
    """LOCK_BATCH_MQ (41) and UNLOCK_BATCH_MQ (42); forwarded: see QueueHeader."""

    bname: str | None = None
    forwarded: bool | None = None


class GetConsumerRunningInfoHeader(RequestHeader, kw_only=True, gc=False):
    """GET_CONSUMER_RUNNING_INFO (307). jstack_enable: with the stacks of a Java member."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ConsumerSendMsgBackHeader(RequestHeader, kw_only=True, gc=False):
    """CONSUMER_SEND_MSG_BACK (36); offset is the physical one."""

    offset: Int64
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool | None = None
    max_reconsume_times: Int32 | None = None


class RecallMessageHeader(RequestHeader, kw_only=True, gc=False):
    """RECALL_MESSAGE (370)."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


class ListTimersHeader(RequestHeader, kw_only=True, gc=False):
    """LIST_TIMERS. topic: None for all. until_timestamp: latest due time, in ms since 1970."""

    topic: str | None = None
    until_timestamp: Int64 | None = None
    max_num: Int32


class ListTransactionsHeader(RequestHeader, kw_only=True, gc=False):
    """LIST_TRANSACTIONS. producer_group: None for all."""

    producer_group: str | None = None
    max_num: Int32


class RecallMessageResponseHeader(RequestHeader, kw_only=True, gc=False):
    """The message that is recalled; msg_id is its UNIQ_KEY."""

    msg_id: str
    region: str = msgspec.field(name="MSG_REGION", default="DefaultRegion")


class EndTransactionHeader(RequestHeader, kw_only=True, gc=False):
    """END_TRANSACTION (37).

    tran_state_table_offset, commit_log_offset: queue offset and physical offset of the half.
    commit_or_rollback: 8, 12, or 0 for unknown. transaction_id: the UNIQ_KEY, as msg_id.
    """

    producer_group: str
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    commit_or_rollback: Int32
    msg_id: str
    topic: str | None = None
    from_transaction_check: bool | None = None
    transaction_id: str | None = None
    bname: str | None = None


class CheckTransactionStateHeader(RequestHeader, kw_only=True, gc=False):
    """CHECK_TRANSACTION_STATE (39); offsets as in END_TRANSACTION, the body is a record."""

    tran_state_table_offset: Int64
    commit_log_offset: Int64
    topic: str | None = None
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    bname: str | None = None
