"""``df.write`` and ``df.writeStream`` to topics.

A task encodes its rows as whole records and lets brokers of ours keep them aside; the driver's
commit makes a batch readable at once and exactly once. Brokers of Apache's store what they get as
it comes, so theirs come at least once. Source: docs/spark.md "Writing"; ``pyspark.sql.datasource``.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from headrace.errors import HeadraceError, InvalidMessage, NoQueue
from headrace.instance import local_ip
from headrace.producer.chunks import check_batch_topic
from headrace.spark.cluster import Cluster
from headrace.spark.errors import OptionError
from headrace.spark.options import Options, nameservers
from headrace.spark.patience import patiently
from headrace.spark.write.commits import Committer, new_attempt
from headrace.spark.write.lanes import (
    PATIENCE_S,
    AttemptName,
    Lane,
    StagedBlocks,
    send_block,
    send_outgoing,
)
from headrace.spark.write.rows import Slicer, arrow_schema, check_schema
from headrace_protocol.message import UniqKeyGenerator, encode_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import Row
    from pyspark.sql.types import StructType

    from headrace.route import TopicRoute
    from headrace.spark.write.commits import Parts
    from headrace.spark.write.rows import Slice
    from headrace_protocol.staging import StagedAttempt

_log = logging.getLogger("headrace.spark")

_WRITE_OPTIONS = ("nameserver", "topic", "exactlyOnce")
# Spark hands on its own.
_SPARKS_OPTIONS = ("checkpointLocation", "path", "queryName")
_KNOWN_OPTIONS = (*_WRITE_OPTIONS, *_SPARKS_OPTIONS)
_ROWS_AT_ONCE = 8192
# Spark 4.0 does not have it.
_ARROW_BASE: Any = getattr(datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter)


@dataclass(frozen=True)
class WriteOptions:
    """What was asked for.

    topic: of all rows; None: a column says it. exactly_once: False to have rows readable as soon
    as they are sent, and those of failed attempts too.
    """

    nameservers: tuple[str, ...]
    topic: str | None
    exactly_once: bool


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """The options of a write, checked. Raises OptionError."""
    options = Options(given, _KNOWN_OPTIONS)
    topic = options.text("topic")
    try:
        if topic is not None:
            check_batch_topic(topic)
    except InvalidMessage as error:
        raise OptionError("topic", topic, str(error)) from error
    return WriteOptions(nameservers(options), topic, options.flag("exactlyOnce", default=True))


def batch_writer(
    given: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceWriter:
    """What ``df.write`` asks for. Raises OptionError, SchemaError, TopicNotFound, NoQueue."""
    if overwrite:
        raise OptionError(
            "mode", "overwrite", "a topic only grows: append, or delete and make it before"
        )
    return BatchWriter(_checked(given, schema), f"write-{uuid4().hex}")


def stream_writer(
    given: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceStreamWriter:
    """What ``df.writeStream`` asks for. Raises as ``batch_writer``."""
    if overwrite:
        raise OptionError("outputMode", "complete", "a topic only grows: use append")
    # Spark asks anew for each batch, and a broker may be away between two.
    patience_s = 0.0 if _is_new(given) else PATIENCE_S
    options = _checked(given, schema, patience_s)
    if _ARROW_BASE is not DataSourceStreamWriter:
        return ArrowStreamWriter(options)
    return RowStreamWriter(options, arrow_schema(schema))


def _checked(given: Mapping[str, str], schema: StructType, patience_s: float = 0.0) -> WriteOptions:
    options = write_options(given)
    check_schema(schema, options.topic)
    if options.topic is not None:
        with Cluster(options.nameservers) as cluster:
            _route(cluster, options.topic, patience_s)
    return options


def _is_new(given: Mapping[str, str]) -> bool:
    """Whether it can be seen that the stream has no batch yet, so that its topic may be a typo."""
    checkpoint = Options(given, _KNOWN_OPTIONS).text("checkpointLocation")
    if checkpoint is None:
        return False
    place = urlsplit(checkpoint)
    commits = Path(unquote(place.path), "commits")
    return place.scheme in {"", "file"} and not any(
        path.name.isdigit() for path in commits.glob("*")
    )


def _route(cluster: Cluster, topic: str, patience_s: float) -> TopicRoute:
    """Where rows go. Raises TopicNotFound, NoQueue, NameserverUnavailable."""

    def look() -> TopicRoute:
        route = cluster.route(topic)
        if not route.write_queues:
            raise NoQueue(topic, "write to")
        return route

    return patiently(look, patience_s)


# -- tasks -----------------------------------------------------------------------------------------


@dataclass
class Written(WriterCommitMessage):
    """What a task tells the driver: what it staged, by name of broker."""

    query_id: str
    staged: dict[str, StagedAttempt] = field(default_factory=dict)


def write_rows(
    options: WriteOptions, query_id: str, batch_id: int, batches: Iterable[pa.RecordBatch]
) -> Written:
    """Write what one task has; all of it is stored or staged when this returns.

    Raises HeadraceError.
    """
    name = AttemptName(query_id, batch_id, new_attempt(options.topic))
    with TaskWriter(options, name) as writer:
        for batch in batches:
            writer.write(batch)
        return Written(query_id, writer.finish())


class TaskWriter:
    """Sends the rows of a task to their queues; use it in a ``with`` block."""

    def __init__(self, options: WriteOptions, name: AttemptName) -> None:
        self._name = name
        self._exactly_once = options.exactly_once
        self._stack = ExitStack()
        self._cluster = self._stack.enter_context(Cluster(options.nameservers))
        self._routes: dict[str, TopicRoute] = {}
        self._lanes: dict[str, Lane] = {}
        self._staged: dict[str, StagedBlocks] = {}
        self._ours: dict[str, bool] = {}
        self._slicer = Slicer(options.topic, lambda topic: len(self._route(topic).write_queues))
        self._turns: dict[str, Iterator[int]] = defaultdict(lambda: count(_partition_id()))
        ip = local_ip()
        self._born_host = encode_host(ip, 0)
        self._message_ids = UniqKeyGenerator(
            _now_ms, os.getpid(), socket.inet_aton(ip), time.time_ns()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows; they leave when there are enough for a request."""
        for each in self._slicer.add(batch):
            self._send(each)

    def finish(self) -> dict[str, StagedAttempt]:
        """Send the rest; returns what was staged, by name of broker."""
        for each in self._slicer.rest():
            self._send(each)
        for lane in self._lanes.values():
            lane.finish()
        return {name: blocks.seal() for name, blocks in self._staged.items()}

    def _send(self, some: Slice) -> None:
        queues = self._route(some.topic).write_queues
        number = next(self._turns[some.topic]) if some.number is None else some.number
        queue = queues[number % len(queues)]
        lane = self._lane(queue.broker_name, some.topic)
        if not self._ours[queue.broker_name]:
            block = some.rows.for_any_broker(some.topic)
            outgoing = block.for_any_broker(_now_ms(), self._message_ids.next)
            send_outgoing(lane, some.topic, queue.queue_id, outgoing)
            return
        encoded = some.rows.for_headrace(some.topic, _now_ms(), self._born_host)
        staged = self._staged.get(queue.broker_name)
        if staged:
            staged.send(some.topic, queue.queue_id, encoded)
        else:
            send_block(lane, some.topic, queue.queue_id, encoded)

    def _route(self, topic: str) -> TopicRoute:
        route = self._routes.get(topic)
        if route is None:
            route = self._routes[topic] = _route(self._cluster, topic, PATIENCE_S)
        return route

    def _lane(self, broker_name: str, topic: str) -> Lane:
        lane = self._lanes.get(broker_name)
        if lane is None:
            address = self._route(topic).master(broker_name)
            assert address, "queues to write are on brokers with a master"
            lane = self._lanes[broker_name] = self._stack.enter_context(Lane(address))
            is_ours = self._ours[broker_name] = lane.is_headrace()
            if is_ours and self._exactly_once:
                self._staged[broker_name] = StagedBlocks(lane, self._name)
            elif self._exactly_once:
                _say_at_least_once(broker_name, address)
        return lane


@cache
def _say_at_least_once(broker_name: str, address: str) -> None:
    # Workers are used again, so it is said about once, not once for each batch.
    _log.warning(
        "broker %s at %s is Apache RocketMQ: rows are written to it at least once, so those of "
        "attempts that fail or are repeated come again",
        broker_name,
        address,
    )


def _partition_id() -> int:
    context = TaskContext.get()
    return context.partitionId() if context else 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# -- writers ---------------------------------------------------------------------------------------


class BatchWriter(DataSourceArrowWriter):
    """Makes all rows of a job readable at its end, or none."""

    def __init__(self, options: WriteOptions, job_id: str) -> None:
        self._options = options
        self._job_id = job_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """In a task."""
        return write_rows(self._options, self._job_id, 0, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver, when all tasks are done."""
        if parts := _parts(messages):
            with Cluster(self._options.nameservers) as cluster:
                committer = Committer(cluster, self._job_id)
                committer.commit(0, parts)
                try:
                    committer.forget()
                except HeadraceError as error:  # a small file too many, and the rows are there
                    _log.warning("%s is not forgotten: %s", self._job_id, error)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver, when a task or the commit failed."""
        _abort(self._options, messages, 0)


class _StreamCommits:
    """The driver's part of both stream writers."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver, when all tasks of a batch are done; again for a batch that comes again."""
        written = _written(messages)
        if self._options.exactly_once and written:
            with Cluster(self._options.nameservers) as cluster:
                Committer(cluster, written[0].query_id).commit(batchId, _parts(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver, when a task or the commit failed; what was decided stays."""
        _abort(self._options, messages, batchId)

    def _write(self, batches: Iterable[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        assert context, "Spark calls it in a task"
        query_id = context.getLocalProperty("sql.streaming.queryId")
        batch_id = context.getLocalProperty("streaming.sql.batchId")
        if query_id is None or batch_id is None:
            raise HeadraceError(
                "Spark does not tell which query and batch this is: write with writeStream"
            )
        return write_rows(self._options, query_id, int(batch_id), batches)


class RowStreamWriter(_StreamCommits, DataSourceStreamWriter):
    """For Spark 4.0, which gives rows."""

    def __init__(self, options: WriteOptions, schema: pa.Schema) -> None:
        super().__init__(options)
        self._schema = schema

    def write(self, iterator: Iterator[Row]) -> Written:
        """In a task."""
        return self._write(_batches_of(iterator, self._schema))


class ArrowStreamWriter(_StreamCommits, _ARROW_BASE):  # type: ignore[misc]
    """For Spark from 4.1 on."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """In a task."""
        return self._write(iterator)


def _batches_of(rows: Iterator[Row], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        columns = zip(*some, strict=True)
        yield pa.record_batch(
            [_array(values, kind) for values, kind in zip(columns, schema.types, strict=True)],
            schema=schema,
        )


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_map(kind):
        values = [value and list(value.items()) for value in values]
    return pa.array(values, kind)


def _written(messages: Iterable[WriterCommitMessage | None]) -> list[Written]:
    """What tasks told; those that failed told nothing."""
    return [message for message in messages if isinstance(message, Written)]


def _parts(messages: Iterable[WriterCommitMessage | None]) -> Parts:
    parts: Parts = defaultdict(list)
    for written in _written(messages):
        for broker_name, staged in written.staged.items():
            parts[broker_name].append(staged)
    return dict(parts)


def _abort(
    options: WriteOptions, messages: list[WriterCommitMessage | None], batch_id: int
) -> None:
    if parts := _parts(messages):
        with Cluster(options.nameservers) as cluster:
            Committer(cluster, _written(messages)[0].query_id).abort(batch_id, parts)
