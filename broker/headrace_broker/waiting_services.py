"""The services for messages that wait, put together: what they share is made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_broker.inner.marks import MARKS_FILE, Marks
from headrace_broker.inner.undelivered import Delivery, Undelivered
from headrace_broker.inner.writer import InnerWriter
from headrace_broker.schedule.offsets import DELAY_OFFSETS_FILE, DelayOffsets
from headrace_broker.schedule.service import Schedule
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.transaction.metrics import METRICS_FILE, TransactionMetrics
from headrace_broker.transaction.service import Transactions

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.groups import ProducerManager
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.serving import Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingServices:
    """Delayed messages and transactions, and where messages go that can't be delivered."""

    delivery: Delivery
    undelivered: Undelivered
    schedule: Schedule
    transactions: Transactions


def waiting_services(
    config: BrokerConfig,
    store: MessageStore,
    topics: TopicTable,
    directory: QueueDirectory,
    offsets: ConsumerOffsets,
    producers: ProducerManager,
    statistics: BrokerStatistics,
) -> WaitingServices:
    """All of them, ready to load. Raises StoreFormatError if a progress file can't be read."""
    now_ms = store.clock.now_ms

    def file(name: str) -> ConfigFile:
        return ConfigFile(config.store_path_root_dir / "config" / name, store.fs)

    def channels(group: str) -> list[Channel]:
        return [member.channel for member in producers.members(group)]

    writer, marks = InnerWriter(store, statistics.put), Marks(file(MARKS_FILE))
    delivery, undelivered = Delivery(topics, directory), Undelivered(topics)
    delays = DelayOffsets(file(DELAY_OFFSETS_FILE), marks, now_ms)
    save_s = config.flush_delay_offset_interval / 1000
    metrics = TransactionMetrics(file(METRICS_FILE), now_ms)
    return WaitingServices(
        delivery=delivery,
        undelivered=undelivered,
        schedule=Schedule(store, writer, delivery, undelivered, delays, save_s),
        transactions=Transactions(config, store, writer, topics, offsets, marks, metrics, channels),
    )
