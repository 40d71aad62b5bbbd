"""A stream's lag, in the form in which Spark's progress reports it.

``{"lagMessages": n, "lagSeconds": s, "topics": {topic: {broker: {queue: {...}}}}}``

Each queue has the ``start`` and ``end`` of the micro-batch, ``latest`` (one past the newest
message), and its lag when the micro-batch begins: ``lagMessages`` (``latest - start``, less the
offsets that a static topic leaves out) and ``lagSeconds`` (since the oldest unprocessed message was
stored). The top level has the sum of the messages and the maximum of the seconds.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.spark.plan.limits import message_count
from headrace.spark.plan.ranges import Range

if TYPE_CHECKING:
    from headrace.spark.chains import Queues
    from headrace.spark.cluster import Cluster
    from headrace.spark.plan.ranges import Offsets, Ranges


class MicroBatch(NamedTuple):
    """The plan of a micro-batch, and the messages available to it.

    waiting: from the start of the micro-batch to the latest message.
    read: the part of ``waiting`` that the micro-batch reads.
    """

    queues: Queues
    latest: Offsets
    waiting: Ranges
    read: Ranges

    def lag(self, cluster: Cluster, now_ms: int) -> dict[str, Any]:
        """The report, see the module. Queries store times of the oldest messages."""
        starts = {queue: each.start for queue, each in self.waiting.items()}
        behind = {
            queue: Range(at, self.latest[queue])
            for queue, at in starts.items()
            if at < self.latest[queue]
        }
        parts = cluster.parts(behind, self.queues)
        firsts = {queue: some[0].start for queue, some in parts.items()}
        times = cluster.store_times(firsts, self.queues)
        topics: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
        lags: list[dict[str, Any]] = []
        for queue, start in starts.items():
            lag = {
                "start": start,
                "end": self.read.get(queue, Range(start, start)).end,
                "latest": self.latest[queue],
                "lagMessages": message_count(parts.get(queue, ())),
                "lagSeconds": max(0, now_ms - times.get(queue, now_ms)) / 1000,
            }
            topics[queue.topic][queue.broker_name][str(queue.queue_id)] = lag
            lags.append(lag)
        return {
            "lagMessages": sum(lag["lagMessages"] for lag in lags),
            "lagSeconds": max((lag["lagSeconds"] for lag in lags), default=0),
            "topics": topics,
        }
