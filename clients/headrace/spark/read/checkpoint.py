"""Stream offsets in the form stored in Spark's checkpoints.

``{"version": 1, "topics": {topic: {broker: {"incarnation": id or null, "queues": {id: at}}}}}``

Entries in which queues appear for the first time also have ``"new": {id: at}``, the queues' first
offsets, so that a repeated micro-batch reads the same messages. Equal offsets must have equal
texts, because Spark compares the texts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.spark.errors import CheckpointMismatch
from headrace_protocol.bodies import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.spark.cluster import Incarnations, Topics
    from headrace.spark.plan.ranges import Offsets

_VERSION = 1


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The position of a stream: the next queue offset to read, by queue.

    begins: the first offsets of queues that the previous offset did not have.
    """

    offsets: Offsets
    incarnations: Incarnations = field(default_factory=dict)
    begins: Offsets = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The form that Spark stores."""
        topics: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for queue, offset in sorted(self.offsets.items()):
            where = queue.topic, queue.broker_name
            entry = topics[queue.topic].setdefault(
                queue.broker_name, {"incarnation": self.incarnations.get(where), "queues": {}}
            )
            entry["queues"][str(queue.queue_id)] = offset
            if queue in self.begins:
                entry.setdefault("new", {})[str(queue.queue_id)] = self.begins[queue]
        return {"version": _VERSION, "topics": dict(topics)}

    @classmethod
    def from_json(
        cls, found: Mapping[str, Any], topics: Topics, *, may_drop: bool = False
    ) -> StreamOffset:
        """Parse an offset from the checkpoint of a query that reads ``topics``.

        may_drop: leave out topics that the query no longer reads, unless there are no others.
        Raises CheckpointMismatch.
        """
        try:
            version, stored = found["version"], found["topics"]
        except (KeyError, TypeError):
            raise CheckpointMismatch(
                f"the checkpoint belongs to another source than headrace: {found}. {_REMEDY}"
            ) from None
        if version != _VERSION:
            raise CheckpointMismatch(
                f"the checkpoint has version {version}, but only version {_VERSION} is supported. "
                f"{_REMEDY}"
            )
        kept = {topic: brokers for topic, brokers in stored.items() if topics.match(topic)}
        if len(kept) < len(stored) and not (kept and may_drop):
            others = ",".join(topic for topic in stored if topic not in kept)
            drop = f", or stop reading {others} with option failOnDataLoss=false" if kept else ""
            raise CheckpointMismatch(
                f"the checkpoint belongs to topic {','.join(stored)}, but the query reads "
                f"{topics}. {_REMEDY}{drop}"
            )
        stored = kept
        return cls(_numbers(stored, "queues"), _incarnations(stored), _numbers(stored, "new"))


_REMEDY = "Give the query another checkpointLocation"


def _numbers(stored: Mapping[str, Any], name: str) -> Offsets:
    return {
        MessageQueue(topic, broker, int(queue_id)): offset
        for topic, brokers in stored.items()
        for broker, entry in brokers.items()
        for queue_id, offset in entry.get(name, {}).items()
    }


def _incarnations(stored: Mapping[str, Any]) -> Incarnations:
    return {
        (topic, broker): entry.get("incarnation")
        for topic, brokers in stored.items()
        for broker, entry in brokers.items()
    }
