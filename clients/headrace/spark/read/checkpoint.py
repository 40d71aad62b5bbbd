"""Offsets of a stream as they stand in Spark's checkpoints.

``{"version": 1, "topics": {topic: {broker: {"incarnation": id or null, "queues": {id: at}}}}}``

Where queues appear for the first time there is also ``"new": {id: at}``, where they began, so
that a batch that is run again reads the same. Equal offsets have equal texts: Spark compares those.
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
    """Where a stream is in each queue: the queue offset that it reads next.

    begins: where queues began that the offset before did not have.
    """

    offsets: Offsets
    incarnations: Incarnations = field(default_factory=dict)
    begins: Offsets = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For Spark, which writes it down."""
        topics: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for queue, offset in sorted(self.offsets.items()):
            place = queue.topic, queue.broker_name
            entry = topics[queue.topic].setdefault(
                queue.broker_name, {"incarnation": self.incarnations.get(place), "queues": {}}
            )
            entry["queues"][str(queue.queue_id)] = offset
            if queue in self.begins:
                entry.setdefault("new", {})[str(queue.queue_id)] = self.begins[queue]
        return {"version": _VERSION, "topics": dict(topics)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], topics: Topics) -> StreamOffset:
        """What Spark read in a checkpoint of a query that reads ``topics``.

        Raises CheckpointMismatch.
        """
        try:
            version, places = found["version"], found["topics"]
        except (KeyError, TypeError):
            raise CheckpointMismatch(
                f"the checkpoint is of another source than headrace: {found}. {_WAY_OUT}"
            ) from None
        if version != _VERSION:
            raise CheckpointMismatch(
                f"the checkpoint has version {version}, this headrace knows {_VERSION}. {_WAY_OUT}"
            )
        others = [topic for topic in places if not topics.have(topic)]
        if others:
            raise CheckpointMismatch(
                f"the checkpoint is of topic {','.join(places)}, and the query reads "
                f"{topics}. {_WAY_OUT}"
            )
        return cls(_numbers(places, "queues"), _incarnations(places), _numbers(places, "new"))


_WAY_OUT = "Give the query another checkpointLocation"


def _numbers(places: Mapping[str, Any], name: str) -> Offsets:
    return {
        MessageQueue(topic, broker, int(queue_id)): offset
        for topic, brokers in places.items()
        for broker, entry in brokers.items()
        for queue_id, offset in entry.get(name, {}).items()
    }


def _incarnations(places: Mapping[str, Any]) -> Incarnations:
    return {
        (topic, broker): entry.get("incarnation")
        for topic, brokers in places.items()
        for broker, entry in brokers.items()
    }
