"""The streaming reader: start and end of each micro-batch, and the group's positions.

PySpark 4.0 and 4.1 ask for the end of a micro-batch without passing its start: see
``StreamReader``. PySpark 4.2 and later pass the start and the limits: see ``limited_stream``.
Everything but ``read`` runs on the driver.

Source: ``pyspark.sql.streaming.python_streaming_source_runner``; tests/spark/test_stream.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader

from headrace.errors import HeadraceError, NoQueue
from headrace.spark.brief import brief, brief_rows
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
from headrace.spark.plan.direct import tasks_for
from headrace.spark.plan.limits import limited
from headrace.spark.plan.ranges import Range, drop_lost, extent, resolve, shown
from headrace.spark.plan.tasks import ReadPlan, ReadTask
from headrace.spark.read.batch import read_task
from headrace.spark.read.checkpoint import StreamOffset
from headrace.spark.read.columns import arrow_schema
from headrace.spark.retry import AT_ONCE, OUTAGES, retry_transient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

    from headrace.spark.body.format import BodyFormat
    from headrace.spark.chains import Queues
    from headrace.spark.cluster import Incarnations
    from headrace.spark.options import Limits, ReadOptions
    from headrace.spark.plan.ranges import Offsets, Ranges
    from headrace_protocol.bodies import MessageQueue

Result = TypeVar("Result")

_log = logging.getLogger("headrace.spark")
_LATEST = Point("latest")


class Available(NamedTuple):
    """The queues that exist now, with their ends and their topics' incarnations."""

    queues: Queues
    latest: Offsets
    incarnations: Incarnations


class StreamReader(DataSourceStreamReader):
    """The reader for PySpark 4.0 and 4.1, which remembers where the last micro-batch ended."""

    def __init__(self, options: ReadOptions, body: BodyFormat | None, schema: StructType) -> None:
        """Raises OptionError, SchemaError."""
        if options.ending is not None:
            raise OptionError(
                "ending", None, "applies to batch reads only: a stream ends with its trigger"
            )
        if options.tier is not None and options.tier.manifest is not None:
            raise OptionError(
                "manifest", None, "applies to batch reads only: a stream needs the topic's brokers"
            )
        self._options = options
        self._plan = ReadPlan.of(options, body)
        self._schema: pa.Schema = arrow_schema(schema, body, table=options.table)
        self._cluster = Cluster(options.nameservers, options.dial)
        self._returned: StreamOffset | None = None
        # Queues that existed at some time: retries wait only for the brokers of these.
        self._seen: set[MessageQueue] = set()
        # Their last known max offsets.
        self._latest: Offsets = {}
        # Queues that no longer exist and whose loss has been reported.
        self._vanished: set[MessageQueue] = set()
        self._committed: Offsets = {}
        # Topics of the checkpoint that the query no longer reads, and whose loss has been reported.
        self._dropped: set[str] = set()
        # Addresses of the brokers that know the group.
        self._registered_at: set[str] = set()

    # -- called by Spark ---------------------------------------------------------------------------

    @brief
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The start of a new query."""
        options = self._options
        queues, incarnations = self._present()
        has = extent(self._cluster, queues)
        starts = resolve("starting", options.starting or _LATEST, self._cluster, queues, has)
        if self._returned:
            # Before 4.2 Spark asks for the end first; the start must not lie after it.
            starts = {q: min(at, self._returned.offsets.get(q, at)) for q, at in starts.items()}
        self.remember(starts)
        return StreamOffset(starts, incarnations).to_json()

    @brief
    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802
        """The end of the next micro-batch."""
        known, available = self._returned, self.available()
        if known is None:
            # The start is not known yet: it is option `starting`, or with trigger availableNow
            # the checkpoint's offset. That trigger asks for the end only once.
            self._returned = StreamOffset(available.latest, available.incarnations)
        else:
            # Spark asks again only after the micro-batch that ended there is done.
            self.commit_positions(known.offsets)
            ranges = self.new_ranges(known, available)
            ranges = self.within(self._options.limits, ranges, available)
            self._returned = next_offset(known, ranges, available)
        return self._returned.to_json()

    @brief
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch, with the same ranges whenever it is repeated."""
        first, last = self.known(start), self.known(end)
        self._returned = last
        self.commit_positions(first.offsets)
        return self._with_retries(lambda: self._tasks(first, last))

    @brief_rows
    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a task, as Arrow batches."""
        assert isinstance(partition, ReadTask)
        return read_task(self._plan, partition, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the group's positions. Spark calls this a micro-batch late, never for the last."""
        self.commit_positions(self.known(end).offsets)

    def stop(self) -> None:
        """Close the connections."""
        self._cluster.close()

    # -- shared by both readers --------------------------------------------------------------------

    def known(self, offset: dict[str, Any]) -> StreamOffset:
        """Parse an offset that Spark passes back. Raises CheckpointMismatch."""
        options = self._options
        known = StreamOffset.from_json(
            offset, options.topics, may_drop=not options.fail_on_data_loss
        )
        dropped = offset["topics"].keys() - {queue.topic for queue in known.offsets}
        if dropped - self._dropped:
            self._dropped |= dropped
            _log.warning(
                "the query no longer reads %s, which its checkpoint has", ",".join(sorted(dropped))
            )
        self.remember(known.offsets)
        return known

    def remember(self, queues: Iterable[MessageQueue]) -> None:
        """From now on, wait for the brokers of these queues when they are unreachable."""
        self._seen.update(queues)

    def available(self) -> Available:
        """The queues available now, retrying until the topics' brokers can be reached."""

        def look() -> Available:
            queues, incarnations = self._present()
            return Available(queues, self._cluster.max_offsets(queues), incarnations)

        available = self._with_retries(look)
        self.remember(available.queues)
        self._latest |= available.latest
        return available

    def _present(self) -> tuple[Queues, Incarnations]:
        """The existing queues, and the incarnations of their topics.

        Raises TopicNotFound, and OptionError if their brokers reject the filter.
        """
        listed = self._cluster.queues(self._options.topics)
        incarnations = self._cluster.incarnations(listed)
        queues = {q: at for q, at in listed.items() if (q.topic, q.broker_name) in incarnations}
        if listed and not queues:
            raise TopicNotFound(
                f"topic {self._options.topics} is no longer on {_brokers(listed)}, although the "
                "nameserver still lists it: was it deleted?"
            )
        self._cluster.check_sql(self._options.sql, queues)
        return queues, incarnations

    def _with_retries(self, work: Callable[[], Result]) -> Result:
        """The result of ``work``, retried while brokers or nameservers are briefly unreachable.

        Fails at once if no queue was ever seen.
        """
        try:
            return retry_transient(
                lambda: self._or_topic_deleted(work),
                self._options.patience if self._seen else AT_ONCE,
            )
        except TopicNotFound as error:
            if not self._seen:
                raise
            raise BrokerMissing(
                f"no broker of topic {self._options.topics} came back within "
                f"{self._options.patience.retry_s:g} s ({_brokers(self._seen)}); restart the "
                f"broker, then the query. The nameserver reports: {error}"
            ) from error

    def _or_topic_deleted(self, work: Callable[[], Result]) -> Result:
        """The result of ``work``. Raises TopicDeleted if a topic it needs was deleted for good."""
        try:
            return work()
        except TopicNotFound as error:
            gone = self._cluster.vanished_queues(self._seen)
            kept = {queue.topic for queue in self._seen if gone.get(queue) != 0}
            deleted = {queue.topic for queue in gone} - kept
            names = self._options.topics.names
            # A pattern is satisfiable as long as some matching topic may come back.
            missed = deleted.intersection(names) if names or kept else deleted
            if not missed:
                raise
            brokers = _brokers(queue for queue in gone if queue.topic in missed)
            raise TopicDeleted(",".join(sorted(missed)), brokers) from error

    def new_ranges(self, known: StreamOffset, available: Available) -> Ranges:
        """The messages beyond ``known``, by queue; all messages of new queues.

        Raises TopicRecreated and DataLoss, unless losses are only logged.
        """
        self._vanished -= available.latest.keys()
        missing = known.offsets.keys() - available.latest.keys() - self._vanished
        starts_of_missing = {queue: known.offsets[queue] for queue in missing}
        self._vanished |= self._report_vanished(starts_of_missing, self._latest)
        known_starts = self._known_starts(known, available.latest, available.incarnations)
        fresh = {q: at for q, at in available.queues.items() if q not in known_starts}
        starts = {**self._cluster.min_offsets(fresh), **known_starts}
        return {queue: Range(starts[queue], end) for queue, end in available.latest.items()}

    def _report_vanished(self, starts: Offsets, ends: Offsets) -> set[MessageQueue]:
        """The deleted queues among unreadable ones; the brokers of the others are unreachable.

        starts: the offsets to resume from. ends: the last known max offsets.
        Raises DataLoss if a deleted queue had unread messages, unless losses are only logged.
        """
        gone = self._cluster.vanished_queues(starts) if starts else {}
        cut = [queue for queue, count in gone.items() if count]
        ends = {**ends, **(self._cluster.leftover_max_offsets(cut) if cut else {})}
        for queue in sorted(gone.keys() & ends.keys()):
            unread_count = ends[queue] - starts[queue]
            if unread_count > 0:
                loss = _vanished_loss(queue, starts[queue], unread_count, gone[queue])
                if self._options.fail_on_data_loss:
                    raise loss
                _log.warning("skipped %d messages: %s", unread_count, loss)
        if unknown := sorted(gone.keys() - ends.keys()):
            _log.warning(
                "deleted after the checkpoint was written, possibly with unread messages: %s",
                ", ".join(f"{shown(queue)} (at {starts[queue]})" for queue in unknown),
            )
        return set(gone)

    def within(self, limits: Limits, ranges: Ranges, available: Available) -> Ranges:
        """The leading parts of ``ranges`` within the limits of a trigger."""
        if not limits:
            return ranges
        nothing = {queue: Range(start, start) for queue, (start, _) in ranges.items()}
        return nothing | limited(self._cluster, available.queues, ranges, limits)

    def _known_starts(
        self, known: StreamOffset, ends: Offsets, incarnations: Incarnations
    ) -> Offsets:
        """Offsets to resume queues at that end at ``ends``; leaves out new and recreated ones."""
        starts = {}
        for queue in known.offsets.keys() & ends.keys():
            try:
                starts[queue] = _known_start(queue, known, ends[queue], incarnations)
            except (TopicRecreated, DataLoss) as error:
                if self._options.fail_on_data_loss:
                    raise
                _log.warning("cannot resume %s at its last offset: %s", shown(queue), error)
                if isinstance(error, DataLoss):
                    starts[queue] = ends[queue]
        return starts

    def commit_positions(self, offsets: Offsets) -> None:
        """Commit the processed offsets for the consumer group, if the query has one.

        They are informational, so errors are logged and the next micro-batch tries again.
        """
        changed = {queue: at for queue, at in offsets.items() if self._committed.get(queue) != at}
        if self._options.group is None or not changed:
            return
        try:
            queues = self._cluster.queues(self._options.topics)
            # Brokers may have joined the topics since the last time.
            fresh = self._cluster.position_addresses(queues) - self._registered_at
            self._cluster.register_group(self._options.group, queues, fresh)
            self._registered_at |= fresh
            reachable = {queue: at for queue, at in changed.items() if queue in queues}
            self._cluster.commit(self._options.group, reachable, queues)
            self._committed |= reachable
        except HeadraceError as error:
            OUTAGES.failed(f"the positions of group {self._options.group}", error)
        else:
            OUTAGES.worked(f"the positions of group {self._options.group}")

    def _tasks(self, first: StreamOffset, last: StreamOffset) -> list[ReadTask]:
        moved = [queue for queue, end in last.offsets.items() if first.offsets.get(queue) != end]
        if not moved:
            return []
        queues, _ = self._present()
        known = {**first.offsets, **last.begins}
        missing = {queue: known.get(queue, 0) for queue in moved if queue not in queues}
        gone = self._report_vanished(missing, last.offsets)
        for queue in missing.keys() - gone:
            raise NoQueue(queue.topic, f"read on broker {queue.broker_name}")
        moved = [queue for queue in moved if queue not in gone]
        asked = {queue: queues[queue] for queue in moved}
        oldest = self._cluster.min_offsets(asked)
        known_starts = self._known_starts(first, without_begins(last), last.incarnations)
        starts = {**oldest, **known_starts, **last.begins}
        ranges = {queue: Range(starts[queue], last.offsets[queue]) for queue in moved}
        if not self._options.table:
            ranges = drop_lost(ranges, oldest, fail=self._options.fail_on_data_loss)
        return tasks_for(self._cluster, asked, ranges, self._options)


def next_offset(known: StreamOffset, ranges: Ranges, available: Available) -> StreamOffset:
    """The end of a micro-batch of ``ranges``; ``known`` itself if nothing has changed.

    Queues of unreachable brokers keep their offsets.
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


def _vanished_loss(
    queue: MessageQueue, start: int, unread_count: int, queue_count: int
) -> DataLoss:
    """queue_count: number of read queues that the topic still has on the broker."""
    unread = f"{unread_count} unread message{'s' * (unread_count > 1)}"
    found = f"its topic was deleted with {unread} in this queue"
    if queue_count:
        found = (
            f"its topic now has {queue_count} read queue{'s' * (queue_count > 1)} there, which "
            f"leaves out {unread} in this one; the previous readQueueNums brings them back"
        )
    return DataLoss(queue.topic, queue.broker_name, queue.queue_id, start, found)


def without_begins(offset: StreamOffset) -> Offsets:
    """The queues whose start in the micro-batch is not recorded in ``offset`` itself."""
    return {queue: at for queue, at in offset.offsets.items() if queue not in offset.begins}


def _known_start(
    queue: MessageQueue, known: StreamOffset, end: int, incarnations: Incarnations
) -> int:
    """The offset at which to resume a queue that ends at ``end``.

    Raises TopicRecreated, or DataLoss if its newest messages were lost.
    """
    offset = known.offsets[queue]
    where = queue.topic, queue.broker_name
    before, now = known.incarnations.get(where), incarnations.get(where)
    if before and now and before != now:
        raise TopicRecreated(*where, f"it is incarnation {now}, but the checkpoint is of {before}")
    if end >= offset:
        return offset
    reason = f"queue {queue.queue_id} ends at {end}, but the checkpoint is at {offset}"
    if before and now:
        raise DataLoss(
            *where, queue.queue_id, end, f"{reason}: its broker lost the newest messages"
        )
    raise TopicRecreated(*where, reason)
