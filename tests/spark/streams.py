"""Stream offsets and planned ranges, as tests compare them."""

from __future__ import annotations

import json
from typing import Any

from headrace.spark.cluster import Topics
from headrace.spark.read.checkpoint import StreamOffset
from headrace.spark.read.stream import StreamReader
from headrace_protocol.bodies import MessageQueue


def q(topic: str, queue_id: int, broker_name: str = "broker-a") -> MessageQueue:
    return MessageQueue(topic, broker_name, queue_id)


def restored(text: dict[str, Any]) -> dict[str, Any]:
    """An offset as it comes back from Spark's checkpoint."""
    found: dict[str, Any] = json.loads(json.dumps(text))
    return found


def offsets(text: dict[str, Any], topic: str) -> dict[tuple[str, int], int]:
    """By broker and queue id."""
    found = StreamOffset.from_json(text, Topics((topic,))).offsets
    return {(queue.broker_name, queue.queue_id): offset for queue, offset in found.items()}


def ranges(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
    """Broker, queue id, first offset and the one after the last of what a batch reads."""
    tasks = reader.partitions(restored(start), restored(end))
    return sorted(
        (each.broker, each.queue_id, each.start_offset, each.end_offset)
        for task in tasks
        for each in task.ranges  # type: ignore[attr-defined]
    )


def row_count(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> int:
    """Messages of a batch."""
    return sum(last - first for *_, first, last in ranges(reader, start, end))
