"""Timers as a feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.consumer.unconsumed import InnerConsumer
from headrace_broker.feature import Feature
from headrace_broker.inner.topic_counts import TIMERS, TopicCounts
from headrace_broker.message_demands import Demand
from headrace_broker.timer.arrivals import Topics
from headrace_broker.timer.checkpoint import TIMER_CHECK_FILE, TimerCheckFile, TimerCheckpoint
from headrace_broker.timer.demand import TIMES, TimerDemand
from headrace_broker.timer.files import TimerFiles
from headrace_broker.timer.messages import TimerMessages
from headrace_broker.timer.processor import TimerProcessor
from headrace_broker.timer.timers import Timers
from headrace_broker.timer.waiting_timers import RollWindow, WaitingTimers
from headrace_broker.timer.wheel import TimerWheel
from headrace_daemon.services import Service
from headrace_protocol.system_topics import TIMER_TOPIC

if TYPE_CHECKING:
    from headrace_broker.core import Core


def build(core: Core) -> Feature:
    """See ``Feature``. Raises StoreFormatError if a checkpoint can't be read."""
    config, store = core.config, core.store
    timers = _timers(core)
    demand = TimerDemand(config, lambda: store.commit_log.now_ms, timers.wake)
    topics, sends = core.tables.topics, core.messages.sends
    return Feature(
        inner_consumers=(
            InnerConsumer(
                TIMER_TOPIC, "timers", timers.next_offset, timers.carry_over, timers.due_ms
            ),
        ),
        demands=(
            Demand("messages with a delivery time", TIMES, apply=demand.serve, is_delay=True),
        ),
        scans=(timers.scan,),
        processors=(TimerProcessor(store, topics, timers, config, sends),),
        services=(
            Service(timers.run, timers.load, finish=timers.finish),
            Service(timers.run_saving),
        ),
        runtime_info=(timers.runtime_info,),
    )


def _timers(core: Core) -> Timers:
    config, store, messages, topics = core.config, core.store, core.messages, Topics()
    waiting = WaitingTimers(topics, RollWindow(config.timer_roll_window_slot))
    files = TimerFiles(
        store.clock,
        waiting,
        TimerCheckFile(
            core.file(TIMER_CHECK_FILE).path, store.fs, core.position("timer", TimerCheckpoint)
        ),
        TimerWheel(config.store_path_root_dir, store.fs, config.mapped_file_size_timer_log, topics),
        TopicCounts(core.file(TIMERS[0]), TIMERS[1], store.clock.now_ms, core.tables.topics.get),
    )
    return Timers(
        store,
        messages.writer,
        TimerMessages(messages.delivery, store.clock),
        waiting,
        files,
        config,
    )
