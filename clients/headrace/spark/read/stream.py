"""The streaming reader: where each micro-batch begins and ends, and how far that is from the end.

PySpark 4.0 and 4.1 ask where a batch ends and tell nothing: see ``StreamReader``. From 4.2 on they
say where the batch begins and pass limits: see ``admission``. All of it runs on the driver but
``read``.

Source: ``pyspark.sql.streaming.python_streaming_source_runner``; tests/spark/test_stream.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader

from headrace.errors import HeadraceError, NoQueue
from headrace.spark.cluster import Cluster
from headrace.spark.errors import (
    BrokerMissing,
    DataLoss,
    OptionError,
    TopicDeleted,
    TopicNotFound,
    TopicRecreated,
)
from headrace.spark.options import Point
from headrace.spark.patience import patiently
from headrace.spark.plan.limits import limited
from headrace.spark.plan.ranges import Range, extent, place, resolve, without_lost
from headrace.spark.plan.splits import read_tasks
from headrace.spark.plan.tasks import ReadPlan, ReadTask
from headrace.spark.read.batch import read_task
from headrace.spark.read.checkpoint import StreamOffset
from headrace.spark.read.columns import arrow_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from headrace.spark.body.format import BodyFormat
    from headrace.spark.cluster import Incarnations, Queues
    from headrace.spark.options import Limits, ReadOptions
    from headrace.spark.plan.ranges import Offsets, Ranges
    from headrace_protocol.bodies import MessageQueue

Result = TypeVar("Result")

_log = logging.getLogger("headrace.spark")
_LATEST = Point("latest")
# A broker that restarts, or moves, is waited for.
PATIENCE_S = 30.0


class Available(NamedTuple):
    """What there is now."""

    queues: Queues
    latest: Offsets
    incarnations: Incarnations


class StreamReader(DataSourceStreamReader):
    """For PySpark 4.0 and 4.1: the reader itself remembers where the last batch ended."""

    def __init__(self, options: ReadOptions, body: BodyFormat | None, schema: StructType) -> None:
        """Raises OptionError, SchemaError."""
        if options.ending is not None:
            raise OptionError("ending", None, "is of batches: a stream ends with its trigger")
        self._options = options
        self._plan = ReadPlan.of(options, body)
        self._schema: pa.Schema = arrow_schema(schema, body)
        self._cluster = Cluster(options.nameservers)
        self._returned: StreamOffset | None = None
        # Those that were there once; nobody else's broker is waited for.
        self._seen: set[MessageQueue] = set()
        # Where their messages ended when that was last asked.
        self._latest: Offsets = {}
        # Those of them that are no more, about which nothing is left to say.
        self._gone: set[MessageQueue] = set()
        self._shown: Offsets = {}

    # -- what Spark calls --------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a new query begins."""
        options = self._options
        queues, incarnations = self._present()
        has = extent(self._cluster, queues)
        starts = resolve("starting", options.starting or _LATEST, self._cluster, queues, has)
        if self._returned:
            # Before 4.2 Spark asks first where the batch ends; it must not begin behind that.
            starts = {q: min(at, self._returned.offsets.get(q, at)) for q, at in starts.items()}
        self.remember(starts)
        return StreamOffset(starts, incarnations).to_json()

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802
        """Where the next batch ends."""
        known, available = self._returned, self.available()
        if known is None:
            # Where the batch begins is not told yet: at `starting`, or, if the trigger is
            # availableNow, where the checkpoint says. That trigger asks only once, for all.
            self._returned = StreamOffset(available.latest, available.incarnations)
        else:
            # Spark asks again only when the batch that ended there is done.
            self.show_progress(known.offsets)
            ranges = self.new_ranges(known, available)
            ranges = self.within(self._options.limits, ranges, available)
            self._returned = next_offset(known, ranges, available)
        return self._returned.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch; the same ranges each time it is run."""
        first, last = self.known(start), self.known(end)
        self._returned = last
        self.show_progress(first.offsets)
        return self._patiently(lambda: self._tasks(first, last))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a task, as Arrow batches."""
        assert isinstance(partition, ReadTask)
        return read_task(self._plan, partition, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Show the progress of the group; Spark calls this a batch late, and not for the last."""
        self.show_progress(self.known(end).offsets)

    def stop(self) -> None:
        """Close the connections."""
        self._cluster.close()

    # -- what both readers need --------------------------------------------------------------------

    def known(self, offset: dict[str, Any]) -> StreamOffset:
        """An offset that Spark hands back. Raises CheckpointMismatch."""
        known = StreamOffset.from_json(offset, self._options.topics)
        self.remember(known.offsets)
        return known

    def remember(self, queues: Iterable[MessageQueue]) -> None:
        """The brokers of these queues are waited for from now on when they are away."""
        self._seen.update(queues)

    def available(self) -> Available:
        """What there is now, once the topics' brokers can be asked."""

        def look() -> Available:
            queues, incarnations = self._present()
            return Available(queues, self._cluster.max_offsets(queues), incarnations)

        available = self._patiently(look)
        self.remember(available.queues)
        self._latest |= available.latest
        return available

    def _present(self) -> tuple[Queues, Incarnations]:
        """The queues there are now, and of which topics.

        Raises TopicNotFound, and OptionError if their brokers can't filter as asked.
        """
        listed = self._cluster.queues(self._options.topics)
        incarnations = self._cluster.incarnations(listed)
        queues = {q: at for q, at in listed.items() if (q.topic, q.broker_name) in incarnations}
        if listed and not queues:
            raise TopicNotFound(
                f"topic {self._options.topics} is not on {_brokers(listed)} any more, where the "
                "nameserver says it is: was it deleted?"
            )
        self._cluster.check_sql(self._options.sql, queues)
        return queues, incarnations

    def _patiently(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns, tried again while brokers or nameservers are away for a moment.

        What was never there is an error at once.
        """
        try:
            return patiently(lambda: self._unless_deleted(work), PATIENCE_S if self._seen else 0.0)
        except TopicNotFound as error:
            if not self._seen:
                raise
            raise BrokerMissing(
                f"no broker that had topic {self._options.topics} is back within "
                f"{PATIENCE_S:g} s ({_brokers(self._seen)}); start it again, then "
                f"the query. The nameserver says: {error}"
            ) from error

    def _unless_deleted(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns. Raises TopicDeleted if nobody can bring back what it misses."""
        try:
            return work()
        except TopicNotFound as error:
            gone = self._cluster.gone(self._seen)
            kept = {queue.topic for queue in self._seen if gone.get(queue) != 0}
            deleted = {queue.topic for queue in gone} - kept
            names = self._options.topics.names
            # A pattern misses nothing as long as some topic that fits may come back.
            missed = deleted.intersection(names) if names or kept else deleted
            if not missed:
                raise
            brokers = _brokers(queue for queue in gone if queue.topic in missed)
            raise TopicDeleted(",".join(sorted(missed)), brokers) from error

    def new_ranges(self, known: StreamOffset, available: Available) -> Ranges:
        """What there is beyond ``known``, queue by queue; new queues from their oldest message on.

        Raises TopicRecreated and DataLoss, unless losses are to be reported only.
        """
        self._gone -= available.latest.keys()
        missing = known.offsets.keys() - available.latest.keys() - self._gone
        starts_of_missing = {queue: known.offsets[queue] for queue in missing}
        self._gone |= self._report_gone(starts_of_missing, self._latest)
        known_starts = self._known_starts(known, available.latest, available.incarnations)
        fresh = {q: at for q, at in available.queues.items() if q not in known_starts}
        starts = {**self._cluster.min_offsets(fresh), **known_starts}
        return {queue: Range(starts[queue], end) for queue, end in available.latest.items()}

    def _report_gone(self, starts: Offsets, ends: Offsets) -> set[MessageQueue]:
        """Those queues that are no more, of some that can't be read; the others' brokers are away.

        starts: where they were to be read on. ends: where their messages ended, as far as known.
        Raises DataLoss if there was something to read, unless losses are to be reported only.
        """
        gone = self._cluster.gone(starts) if starts else {}
        cut = [queue for queue, count in gone.items() if count]
        ends = {**ends, **(self._cluster.left_offsets(cut) if cut else {})}
        for queue in sorted(gone.keys() & ends.keys()):
            unread_count = ends[queue] - starts[queue]
            if unread_count > 0:
                loss = _gone_loss(queue, starts[queue], unread_count, gone[queue])
                if self._options.fail_on_data_loss:
                    raise loss
                _log.warning("skipped %d messages: %s", unread_count, loss)
        if unknown := sorted(gone.keys() - ends.keys()):
            _log.warning(
                "deleted since the checkpoint was written, and whether all was read can't be told: "
                "%s",
                ", ".join(f"{place(queue)} (at {starts[queue]})" for queue in unknown),
            )
        return set(gone)

    def within(self, limits: Limits, ranges: Ranges, available: Available) -> Ranges:
        """The beginnings of ``ranges`` that a trigger may take."""
        if not limits:
            return ranges
        nothing = {queue: Range(start, start) for queue, (start, _) in ranges.items()}
        return nothing | limited(self._cluster, available.queues, ranges, limits)

    def _known_starts(
        self, known: StreamOffset, ends: Offsets, incarnations: Incarnations
    ) -> Offsets:
        """Where queues that end at ``ends`` go on; without those that are new, or others now."""
        starts = {}
        for queue in known.offsets.keys() & ends.keys():
            try:
                starts[queue] = _known_start(queue, known, ends[queue], incarnations)
            except (TopicRecreated, DataLoss) as error:
                if self._options.fail_on_data_loss:
                    raise
                _log.warning("%s is not read where it was left: %s", place(queue), error)
                if isinstance(error, DataLoss):
                    starts[queue] = ends[queue]
        return starts

    def show_progress(self, offsets: Offsets) -> None:
        """Commit what is processed in the name of the group, if the query has one.

        Only people look at it, so what goes wrong is logged and tried again with the next batch.
        """
        changed = {queue: at for queue, at in offsets.items() if self._shown.get(queue) != at}
        if self._options.group is None or not changed:
            return
        try:
            queues = self._cluster.queues(self._options.topics)
            if not self._shown:
                self._cluster.make_group(self._options.group, queues)
            reachable = {queue: at for queue, at in changed.items() if queue in queues}
            self._cluster.commit(self._options.group, reachable, queues)
            self._shown |= reachable
        except HeadraceError as error:
            _log.warning("the progress of group %s is not shown: %s", self._options.group, error)

    def _tasks(self, first: StreamOffset, last: StreamOffset) -> list[ReadTask]:
        moved = [queue for queue, end in last.offsets.items() if first.offsets.get(queue) != end]
        if not moved:
            return []
        queues, _ = self._present()
        known = {**first.offsets, **last.begins}
        missing = {queue: known.get(queue, 0) for queue in moved if queue not in queues}
        gone = self._report_gone(missing, last.offsets)
        for queue in missing.keys() - gone:
            raise NoQueue(queue.topic, f"read on broker {queue.broker_name}")
        moved = [queue for queue in moved if queue not in gone]
        places = {queue: queues[queue] for queue in moved}
        oldest = self._cluster.min_offsets(places)
        known_starts = self._known_starts(first, unexplained(last), last.incarnations)
        starts = {**oldest, **known_starts, **last.begins}
        ranges = {queue: Range(starts[queue], last.offsets[queue]) for queue in moved}
        ranges = without_lost(ranges, oldest, fail=self._options.fail_on_data_loss)
        return read_tasks(self._cluster, places, ranges, self._options.split_bytes)


def next_offset(known: StreamOffset, ranges: Ranges, available: Available) -> StreamOffset:
    """Where a batch of ``ranges`` ends; ``known`` itself if nothing has changed.

    Queues of brokers that are away keep their places.
    """
    moved = {
        queue: each
        for queue, each in ranges.items()
        if each.start < each.end or known.offsets.get(queue, each.start) != each.start
    }
    if not moved:
        return known
    ends = {queue: each.end for queue, each in moved.items()}
    begins = {
        queue: each.start for queue, each in moved.items() if known.offsets.get(queue) != each.start
    }
    incarnations = {**known.incarnations, **available.incarnations}
    return StreamOffset({**known.offsets, **ends}, incarnations, begins)


def _brokers(queues: Iterable[MessageQueue]) -> str:
    return ", ".join(sorted({queue.broker_name for queue in queues}))


def _gone_loss(queue: MessageQueue, start: int, unread_count: int, queue_count: int) -> DataLoss:
    """queue_count: how many queues to read the topic still has on the broker."""
    unread = f"{unread_count} unread message{'s' * (unread_count > 1)}"
    found = f"its topic was deleted with {unread} in this queue"
    if queue_count:
        found = (
            f"its topic has {queue_count} queue{'s' * (queue_count > 1)} to read there now, which "
            f"leaves out {unread} in this one; readQueueNums of before brings them back"
        )
    return DataLoss(queue.topic, queue.broker_name, queue.queue_id, start, found)


def unexplained(offset: StreamOffset) -> Offsets:
    """The queues of which ``offset`` does not say itself where its batch begins."""
    return {queue: at for queue, at in offset.offsets.items() if queue not in offset.begins}


def _known_start(
    queue: MessageQueue, known: StreamOffset, end: int, incarnations: Incarnations
) -> int:
    """Where a queue that ends at ``end`` goes on.

    Raises TopicRecreated, or DataLoss when its newest messages are gone.
    """
    offset = known.offsets[queue]
    where = queue.topic, queue.broker_name
    before, now = known.incarnations.get(where), incarnations.get(where)
    if before and now and before != now:
        raise TopicRecreated(*where, f"it is incarnation {now}, and the checkpoint is of {before}")
    if end >= offset:
        return offset
    reason = f"queue {queue.queue_id} ends at {end}, and the checkpoint is at {offset}"
    if before and now:
        raise DataLoss(
            *where, queue.queue_id, end, f"{reason}: its broker lost the newest messages"
        )
    raise TopicRecreated(*where, reason)
