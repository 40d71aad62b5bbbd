"""Plan the read of tables: one task per queue, which reads the queue from its start."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from headrace.spark.cluster import Topics
from headrace.spark.errors import SparkConnectorError
from headrace.spark.plan.ranges import Range, not_empty
from headrace.spark.plan.tasks import QueueRange, TableTask
from headrace.spark.retry import Patience, retry_transient

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.spark.chains import Item, Queues
    from headrace.spark.cluster import Cluster
    from headrace_protocol.bodies import MessageQueue

# The attribute of a compacted topic by which its broker checks the queues of keys.
_KEY_QUEUE = "key.queue"


def table_tasks(cluster: Cluster, queues: Queues) -> list[TableTask]:
    """The tasks that read ``queues``, which are all queues of some topics in order."""
    ends = cluster.max_offsets(queues)
    # From 0: Apache RocketMQ reports the minimum offset of what is not compacted.
    ranges = not_empty({queue: Range(0, end) for queue, end in ends.items()})
    of_queue = {
        queue: tuple(_range(queue, item) for item in items if item.message_count)
        for queue, items in cluster.parts(ranges, queues).items()
    }
    java_topics = {
        topic
        for (topic, _), attributes in cluster.attributes(queues).items()
        if attributes.get(_KEY_QUEUE) == "java"
    }
    of_topic: defaultdict[str, list[MessageQueue]] = defaultdict(list)
    for queue in queues:
        of_topic[queue.topic].append(queue)
    return [
        TableTask(
            queue,
            of_queue.get(queue, ()),
            number,
            len(siblings),
            tuple(each for other in siblings if other != queue for each in of_queue.get(other, ())),
            by_java_hash=queue.topic in java_topics,
        )
        for siblings in of_topic.values()
        for number, queue in enumerate(siblings)
    ]


def current(task: TableTask, open_cluster: Callable[[], Cluster], patience: Patience) -> TableTask:
    """The task with the messages that its queue has now; Spark runs a task again without a plan.

    open_cluster: connects to where the table is.

    Raises SparkConnectorError if the topic has another number of queues by now.
    """
    topic = task.queue.topic

    def look() -> list[TableTask]:
        with open_cluster() as cluster:
            return table_tasks(cluster, cluster.queues(Topics((topic,))))

    tasks = retry_transient(look, patience)
    if len(tasks) != task.queue_count:
        raise SparkConnectorError(
            f"table {topic} had {task.queue_count} queues when this read was planned, and has "
            f"{len(tasks)} now: call load() again, and restart the query that uses it"
        )
    return tasks[task.number]


def _range(queue: MessageQueue, item: Item) -> QueueRange:
    return QueueRange(
        queue.topic,
        queue.broker_name,
        item.address,
        queue.queue_id,
        item.start,
        item.end,
        item.physical if item.physical != queue else None,
        item.delta,
    )
