"""The broker's metrics, besides those of both daemons.

Those named rocketmq_ have the names, labels and units of Apache RocketMQ 5's exporter; its labels
message_type, language and version are left out: clients choose their values.
"""

from __future__ import annotations

from headrace_daemon.metrics.samples import Metric

_TOPIC = ("topic", "is_system")
_GROUP = ("consumer_group", "topic", "is_retry", "is_system")
_STORAGE = ("storage_type", "storage_medium")

MESSAGES_IN = Metric("rocketmq_messages_in_total", "counter", "Messages stored", _TOPIC)
BYTES_IN = Metric("rocketmq_throughput_in_total", "counter", "Bytes of bodies stored", _TOPIC)
MESSAGES_OUT = Metric("rocketmq_messages_out_total", "counter", "Messages delivered", _GROUP)
BYTES_OUT = Metric("rocketmq_throughput_out_total", "counter", "Bytes of records delivered", _GROUP)
LAG_MESSAGES = Metric(
    "rocketmq_consumer_lag_messages", "gauge", "Messages that the group has yet to consume", _GROUP
)
LAG_LATENCY = Metric(
    "rocketmq_consumer_lag_latency",
    "gauge",
    "Age in ms of the oldest message that the group has yet to consume",
    _GROUP,
)
INFLIGHT = Metric(
    "rocketmq_consumer_inflight_messages",
    "gauge",
    "Messages that the group has popped and not acknowledged",
    _GROUP,
)
CONSUMERS = Metric(
    "rocketmq_consumer_connections", "gauge", "Connected members", ("consumer_group",)
)
PRODUCERS = Metric("rocketmq_producer_connections", "gauge", "Connected producers")
TOPICS = Metric("rocketmq_topic_number", "gauge", "Topics")
GROUPS = Metric("rocketmq_consumer_group_number", "gauge", "Consumer groups")
PERMISSION = Metric("rocketmq_broker_permission", "gauge", "2 write, 4 read, 6 both")
STORAGE_SIZE = Metric(
    "rocketmq_storage_size",
    "gauge",
    "Bytes used of the store's disk, or by tiered storage",
    _STORAGE,
)
FLUSH_BEHIND = Metric(
    "rocketmq_storage_flush_behind_bytes",
    "gauge",
    "Bytes of the log that are not flushed",
    _STORAGE,
)
DISPATCH_BEHIND = Metric(
    "rocketmq_storage_dispatch_behind_bytes",
    "gauge",
    "Bytes of the log that are not in the queues",
    _STORAGE,
)
RESERVE_TIME = Metric(
    "rocketmq_storage_message_reserve_time", "gauge", "Age in ms of the oldest message", _STORAGE
)

STORED_MESSAGES = Metric("headrace_stored_messages_total", "counter", "Messages of all topics")
STORED_BYTES = Metric("headrace_stored_bytes_total", "counter", "Bytes of bodies of all topics")
DELIVERED_MESSAGES = Metric(
    "headrace_delivered_messages_total", "counter", "Messages delivered to all groups"
)
DELIVERED_BYTES = Metric(
    "headrace_delivered_bytes_total", "counter", "Bytes of records delivered to all groups"
)
SEND_SECONDS = Metric(
    "headrace_send_seconds",
    "histogram",
    "Time from reading the sends of a turn to their replies, counted once a message",
)
FLUSH_SECONDS = Metric("headrace_flush_seconds", "histogram", "Time of a flush of the log")
WRITABLE = Metric("headrace_writable", "gauge", "1 while messages are accepted, else 0")
DISK_RATIO = Metric("headrace_disk_used_ratio", "gauge", "Used part of the store's disk, 0 to 1")
DISK_FULL = Metric(
    "headrace_disk_full_seconds",
    "gauge",
    "Time until the disk is full if what cannot be removed grows as before; +Inf if it does not",
)
LOG_BYTES = Metric("headrace_log_bytes", "gauge", "Bytes of the log that are kept")
QUEUES = Metric("headrace_queues", "gauge", "Queues of all topics")
RING_FILL = Metric(
    "headrace_ring_fill_ratio", "gauge", "Used part of the dispatch ring; from 0.8 on sends wait"
)
TAKER_BEHIND = Metric(
    "headrace_taker_behind_messages", "gauge", "Messages that a taker has yet to take", ("taker",)
)
REMOVED_FILES = Metric("headrace_removed_files_total", "counter", "Files removed by the clean-up")
HELD_PULLS = Metric("headrace_held_pulls", "gauge", "Pulls that wait for a message")
OMITTED = Metric(
    "headrace_omitted",
    "gauge",
    "Topics, groups and ages of lag that this page leaves out: it is bounded",
    ("kind",),
)

_TIER_QUEUE = ("topic", "queue_id", "file_type")

TIER_LATENCY = Metric(
    "rocketmq_tiered_store_provider_rpc_latency",
    "histogram",
    "Time in ms of an operation of the place of tiered storage",
    ("operation", "success"),
)
TIER_UPLOAD_BYTES = Metric(
    "rocketmq_tiered_store_provider_upload_bytes", "histogram", "Bytes of an upload"
)
TIER_DOWNLOAD_BYTES = Metric(
    "rocketmq_tiered_store_provider_download_bytes", "histogram", "Bytes of a read"
)
TIER_BEHIND = Metric(
    "rocketmq_tiered_store_dispatch_behind", "gauge", "Messages still to be uploaded", _TIER_QUEUE
)
TIER_BEHIND_MS = Metric(
    "rocketmq_tiered_store_dispatch_latency",
    "gauge",
    "Age in ms of the oldest message still to be uploaded",
    _TIER_QUEUE,
)
TIER_MESSAGES_UPLOADED = Metric(
    "rocketmq_tiered_store_messages_dispatch_total", "counter", "Messages uploaded", ("topic",)
)
TIER_MESSAGES_OUT = Metric(
    "rocketmq_tiered_store_messages_out_total",
    "counter",
    "Messages delivered from tiered storage",
    ("topic",),
)
TIER_CACHE_COUNT = Metric(
    "rocketmq_tiered_store_read_ahead_cache_count", "gauge", "Messages of the tier in memory"
)
TIER_CACHE_BYTES = Metric(
    "rocketmq_tiered_store_read_ahead_cache_bytes", "gauge", "Bytes of these messages"
)
TIER_CACHE_ACCESS = Metric(
    "rocketmq_tiered_store_read_ahead_cache_access_total", "counter", "Reads of the tier"
)
TIER_CACHE_HIT = Metric(
    "rocketmq_tiered_store_read_ahead_cache_hit_total",
    "counter",
    "Reads of the tier that were served from memory",
)

TIER_GIVEN_UP = Metric(
    "headrace_tier_given_up_queues",
    "gauge",
    "Queues that are not uploaded until somebody acts; the log keeps their messages",
)
TIER_FAILING = Metric(
    "headrace_tier_failing_seconds", "gauge", "Time for which uploads have failed; 0 if they work"
)

# Of brokers with tiered storage.
TIER_METRICS = (
    TIER_GIVEN_UP,
    TIER_FAILING,
    TIER_LATENCY,
    TIER_UPLOAD_BYTES,
    TIER_DOWNLOAD_BYTES,
    TIER_BEHIND,
    TIER_BEHIND_MS,
    TIER_MESSAGES_UPLOADED,
    TIER_MESSAGES_OUT,
    TIER_CACHE_COUNT,
    TIER_CACHE_BYTES,
    TIER_CACHE_ACCESS,
    TIER_CACHE_HIT,
)

FOLLOWER_BEHIND = Metric(
    "headrace_follower_behind_messages",
    "gauge",
    "Messages that compaction, the tier and others have yet to copy from the log",
    ("follower",),
)
FOLLOWER_BEHIND_SECONDS = Metric(
    "headrace_follower_behind_seconds",
    "gauge",
    "Time for which a follower has not caught up with the log",
    ("follower",),
)
FOLLOWER_FAILING = Metric(
    "headrace_follower_failing_seconds",
    "gauge",
    "Time for which a follower has failed; 0 if it works",
    ("follower",),
)
COMPACTION_RUNS = Metric(
    "headrace_compaction_runs_total", "counter", "Runs of compaction that have ended"
)
COMPACTION_FAILURES = Metric(
    "headrace_compaction_failures_total", "counter", "Runs of compaction that have failed"
)
COMPACTION_SECONDS = Metric("headrace_compaction_seconds_total", "counter", "Time of all runs")
COMPACTION_DROPPED = Metric(
    "headrace_compaction_dropped_messages_total", "counter", "Messages that runs have removed"
)
COMPACTION_WRITTEN = Metric(
    "headrace_compaction_written_bytes_total", "counter", "Bytes that runs have written"
)
REPLIES = Metric(
    "headrace_replies_total", "counter", "Replies to requests between clients", ("outcome",)
)
POPS_OUT = Metric(
    "headrace_popped_messages", "gauge", "Messages that are popped and not acknowledged"
)
POPS_ACKED = Metric(
    "headrace_pop_acked_messages_total", "counter", "Messages that were popped and acknowledged"
)
POPS_EXPIRED = Metric(
    "headrace_pop_expired_messages_total",
    "counter",
    "Messages that were not acknowledged in time, by what became of them: retry, dead or given_up",
    ("outcome",),
)
HELD_POPS = Metric("headrace_held_pops", "gauge", "POPs and NOTIFICATIONs among the held pulls")
STATIC_LED = Metric(
    "headrace_static_queues_led", "gauge", "Queues of static topics that this broker leads"
)
STATIC_READS = Metric(
    "headrace_static_remote_reads_total",
    "counter",
    "Reads of queues of static topics that another broker answered for this one",
)
STATIC_BYTES = Metric(
    "headrace_static_remote_bytes_total", "counter", "Bytes of items fetched from other brokers"
)
STATIC_FORWARDED = Metric(
    "headrace_static_forwarded_requests_total",
    "counter",
    "Requests passed on to the leader of a queue",
)

BROKER_METRICS = (
    MESSAGES_IN,
    BYTES_IN,
    MESSAGES_OUT,
    BYTES_OUT,
    LAG_MESSAGES,
    LAG_LATENCY,
    INFLIGHT,
    CONSUMERS,
    PRODUCERS,
    TOPICS,
    GROUPS,
    PERMISSION,
    STORAGE_SIZE,
    FLUSH_BEHIND,
    DISPATCH_BEHIND,
    RESERVE_TIME,
    STORED_MESSAGES,
    STORED_BYTES,
    DELIVERED_MESSAGES,
    DELIVERED_BYTES,
    SEND_SECONDS,
    FLUSH_SECONDS,
    WRITABLE,
    DISK_RATIO,
    DISK_FULL,
    LOG_BYTES,
    QUEUES,
    RING_FILL,
    TAKER_BEHIND,
    REMOVED_FILES,
    HELD_PULLS,
    FOLLOWER_BEHIND,
    FOLLOWER_BEHIND_SECONDS,
    FOLLOWER_FAILING,
    COMPACTION_RUNS,
    COMPACTION_FAILURES,
    COMPACTION_SECONDS,
    COMPACTION_DROPPED,
    COMPACTION_WRITTEN,
    REPLIES,
    POPS_OUT,
    POPS_ACKED,
    POPS_EXPIRED,
    HELD_POPS,
    STATIC_LED,
    STATIC_READS,
    STATIC_BYTES,
    STATIC_FORWARDED,
    OMITTED,
)

# Clients create topics and groups, so a page has the first of them: the oldest in the table, or
# since the start the first with traffic.
TOPICS_MAX = 1000
PAIRS_MAX = 1000
