"""Delay levels as a feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.consumer.unconsumed import InnerConsumer
from headrace_broker.feature import Feature
from headrace_broker.message_demands import Demand
from headrace_broker.schedule.offsets import DELAY_OFFSETS_FILE, DelayOffsets, DeliveredLevels
from headrace_broker.schedule.processor import ScheduleProcessor
from headrace_broker.schedule.schedule import Schedule
from headrace_daemon.services import Service
from headrace_protocol.message import DELAY
from headrace_protocol.system_topics import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from headrace_broker.core import Core


def build(core: Core) -> Feature:
    """See ``Feature``. Raises StoreFormatError if the checkpoint can't be read."""
    store, messages = core.store, core.messages
    position = core.position("schedule", DeliveredLevels)
    offsets = DelayOffsets(core.file(DELAY_OFFSETS_FILE), position, store.clock.now_ms)
    schedule = Schedule(
        store,
        messages.writer,
        messages.delivery,
        offsets,
        lambda: core.config.flush_delay_offset_interval / 1000,
    )
    return Feature(
        inner_consumers=(
            InnerConsumer(
                SCHEDULE_TOPIC, "delayed messages", schedule.next_offset, due_ms=schedule.due_ms
            ),
        ),
        demands=(Demand("delayed messages", (DELAY,), apply=schedule.demand.serve, is_delay=True),),
        scans=(schedule.scan,),
        processors=(ScheduleProcessor(schedule),),
        services=(
            Service(schedule.run, schedule.load, finish=schedule.finish),
            Service(schedule.run_saving),
        ),
        runtime_info=(schedule.runtime_info,),
    )
