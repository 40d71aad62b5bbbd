"""How far a stream is from the end of its queues, as Spark's progress shows it.

``{"lagMessages": n, "lagSeconds": s, "topics": {topic: {broker: {queue: {...}}}}}``

Each queue has ``start`` and ``end`` of the batch, ``latest`` (the offset after the newest message),
and what is not processed yet as the batch begins: ``lagMessages`` (``latest - start``) and
``lagSeconds`` (since the oldest of them was stored). Above them are the sum of the messages and the
most of the seconds.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.spark.plan.ranges import Range

if TYPE_CHECKING:
    from headrace.spark.cluster import Cluster, Queues
    from headrace.spark.plan.ranges import Offsets, Ranges


class Batch(NamedTuple):
    """What a batch reads of what there is.

    waiting: from where the batch begins to the latest message. read: what of it the batch takes.
    """

    queues: Queues
    latest: Offsets
    waiting: Ranges
    read: Ranges

    def progress(self, cluster: Cluster, now_ms: int) -> dict[str, Any]:
        """See above. Asks for the times of the oldest messages that are waiting."""
        starts = {queue: each.start for queue, each in self.waiting.items()}
        behind = {queue: at for queue, at in starts.items() if at < self.latest[queue]}
        times = cluster.store_times(behind, self.queues)
        topics: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
        lags: list[dict[str, Any]] = []
        for queue, start in starts.items():
            lag = {
                "start": start,
                "end": self.read.get(queue, Range(start, start)).end,
                "latest": self.latest[queue],
                "lagMessages": self.latest[queue] - start,
                "lagSeconds": max(0, now_ms - times.get(queue, now_ms)) / 1000,
            }
            topics[queue.topic][queue.broker_name][str(queue.queue_id)] = lag
            lags.append(lag)
        return {
            "lagMessages": sum(lag["lagMessages"] for lag in lags),
            "lagSeconds": max((lag["lagSeconds"] for lag in lags), default=0),
            "topics": topics,
        }
