"""The services for messages that wait, put together: what they share is made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_broker.inner.delivery import Delivery
from headrace_broker.inner.marks import MARKS_FILE, Marks
from headrace_broker.inner.writer import InnerWriter
from headrace_broker.schedule.offsets import DELAY_OFFSETS_FILE, DelayOffsets
from headrace_broker.schedule.service import Schedule
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.timer.arrivals import Topics
from headrace_broker.timer.checkpoint import TIMER_CHECK_FILE, TimerCheckFile
from headrace_broker.timer.demand import TimerDemand
from headrace_broker.timer.metrics import TIMER_METRICS_FILE, TimerMetrics
from headrace_broker.timer.service import Timers, TimerSwitches
from headrace_broker.timer.waiting_timers import RollWindow, WaitingTimers
from headrace_broker.timer.wheel import TimerWheel
from headrace_broker.transaction.metrics import METRICS_FILE, TransactionMetrics
from headrace_broker.transaction.service import Transactions

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.groups import ProducerManager
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.host_budget import HostBudget
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.statictopic.deliver import Deliveries
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.serving import Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingServices:
    """Delayed messages, timers and transactions, and their way into the log."""

    writer: InnerWriter
    delivery: Delivery
    schedule: Schedule
    timers: Timers
    timer_demand: TimerDemand
    transactions: Transactions


def waiting_services(
    config: BrokerConfig,
    store: MessageStore,
    topics: TopicTable,
    directory: QueueDirectory,
    offsets: ConsumerOffsets,
    producers: ProducerManager,
    statistics: BrokerStatistics,
    budget: HostBudget,
    host_log: HostLog,
    deliveries: Deliveries,
) -> WaitingServices:
    """All of them, ready to load. Raises StoreFormatError if a progress file can't be read.

    deliveries: finds where a message goes that is due.
    """
    now_ms = store.clock.now_ms

    def file(name: str) -> ConfigFile:
        return ConfigFile(config.store_path_root_dir / "config" / name, store.fs)

    def channels(group: str) -> list[Channel]:
        return [member.channel for member in producers.members(group)]

    delivery, marks = Delivery(topics, directory, host_log), Marks(file(MARKS_FILE))
    writer = InnerWriter(store, statistics.put, host_log, deliveries.find_target, delivery.redirect)
    delays = DelayOffsets(file(DELAY_OFFSETS_FILE), marks, now_ms)
    save_s = config.flush_delay_offset_interval / 1000
    metrics = TransactionMetrics(file(METRICS_FILE), now_ms)
    waits = Topics()
    timers = Timers(
        store,
        writer,
        delivery,
        WaitingTimers(waits, RollWindow(config.timer_roll_window_slot)),
        TimerWheel(config.store_path_root_dir, store.fs, config.mapped_file_size_timer_log, waits),
        TimerMetrics(file(TIMER_METRICS_FILE), now_ms),
        TimerCheckFile(file(TIMER_CHECK_FILE).path, store.fs, marks),
        _timer_switches(config),
    )
    return WaitingServices(
        writer=writer,
        delivery=delivery,
        schedule=Schedule(store, writer, delivery, delays, save_s),
        timers=timers,
        timer_demand=_timer_demand(config, store, timers),
        transactions=Transactions(
            config,
            store,
            writer,
            topics,
            offsets,
            marks,
            metrics,
            channels,
            budget,
            host_log,
        ),
    )


def _timer_switches(config: BrokerConfig) -> TimerSwitches:
    return TimerSwitches(
        lambda: config.timer_stop_enqueue,
        lambda: config.timer_stop_dequeue,
        lambda: config.timer_flush_interval_ms / 1000,
    )


def _timer_demand(config: BrokerConfig, store: MessageStore, timers: Timers) -> TimerDemand:
    return TimerDemand(
        lambda: config.timer_max_delay_sec,
        lambda: config.timer_wheel_enable,
        lambda: store.commit_log.now_ms,
        timers.wake,
    )
