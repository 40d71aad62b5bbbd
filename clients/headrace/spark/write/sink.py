"""``df.write`` and ``df.writeStream`` to topics.

A task encodes its rows as whole records and stages them at headrace brokers; the driver's commit
makes a micro-batch readable all at once and exactly once. Apache RocketMQ brokers store rows as
they arrive, so delivery there is at least once. Source: docs/spark.md "Writing";
``pyspark.sql.datasource``.
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
from headrace.producer.chunks import check_batch_topic
from headrace.spark.brief import brief
from headrace.spark.cluster import Cluster
from headrace.spark.connections import PLAIN, Dial
from headrace.spark.errors import OptionError
from headrace.spark.options import DIAL_OPTIONS, Options, body_option, dial, nameservers
from headrace.spark.retry import AT_ONCE, WRITING, Patience, retry_transient
from headrace.spark.write.broker_link import (
    AttemptName,
    BrokerLink,
    StagedBlocks,
    send_block,
    send_outgoing,
)
from headrace.spark.write.commits import Committer, new_attempt
from headrace.spark.write.row_encoding import RowBuffer, arrow_schema, check_schema
from headrace_protocol.drivers.address import local_ip
from headrace_protocol.message_ids import UniqKeyGenerator, encode_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import Row
    from pyspark.sql.types import StructType

    from headrace.route import TopicRoute
    from headrace.spark.body.encode import RowBodies
    from headrace.spark.write.commits import Parts
    from headrace.spark.write.row_encoding import QueueRows
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.staging import StagedAttempt

_log = logging.getLogger("headrace.spark")

_WRITE_OPTIONS = ("nameserver", *DIAL_OPTIONS, "topic", "exactlyOnce", "schema", "encoding")
# Spark passes its own options as well.
_SPARKS_OPTIONS = ("checkpointLocation", "queryName")
_KNOWN_OPTIONS = (*_WRITE_OPTIONS, *_SPARKS_OPTIONS)
_ROWS_AT_ONCE = 8192
# Spark 4.0 does not have DataSourceStreamArrowWriter.
_ARROW_BASE: Any = getattr(datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter)


@dataclass(frozen=True)
class WriteOptions:
    """The options of a write.

    topic: of all rows; None if a column has it.
    exactly_once: False makes rows readable as soon as they are sent, including those of failed
        attempts.
    bodies: makes the bodies; None if a column has them.
    """

    nameservers: tuple[str, ...]
    topic: str | None
    exactly_once: bool
    dial: Dial = PLAIN
    bodies: RowBodies | None = None


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """Check the options of a write. Raises OptionError."""
    options = Options(given, _KNOWN_OPTIONS)
    topic = options.text("topic")
    try:
        if topic is not None:
            check_batch_topic(topic)
    except InvalidMessage as error:
        raise OptionError("topic", topic, str(error)) from error
    is_exact = options.flag("exactlyOnce", default=True)
    bodies = _bodies(options.text("schema"), options.text("encoding"))
    return WriteOptions(nameservers(options), topic, is_exact, dial(options), bodies)


def _bodies(schema: str | None, encoding: str | None) -> RowBodies | None:
    body = body_option(schema, encoding)
    if body is None:
        return None
    from headrace.spark.body.encode import RowBodies

    return RowBodies(body)


def batch_writer(
    given: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceWriter:
    """The writer for ``df.write``. Raises OptionError, SchemaError, TopicNotFound, NoQueue."""
    if overwrite:
        raise OptionError(
            "mode",
            "overwrite",
            "a topic is append-only: use append, or delete and recreate the topic first",
        )
    return BatchWriter(_checked(given, schema), f"write-{uuid4().hex}")


def stream_writer(
    given: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceStreamWriter:
    """The writer for ``df.writeStream``. Raises as ``batch_writer``."""
    if overwrite:
        raise OptionError("outputMode", "complete", "a topic is append-only: use append")
    # Spark creates a writer for each micro-batch, and a broker may be down in between.
    options = _checked(given, schema, AT_ONCE if _is_new(given) else WRITING)
    if _ARROW_BASE is not DataSourceStreamWriter:
        return ArrowStreamWriter(options)
    return RowStreamWriter(
        options, arrow_schema(schema, options.bodies.fields if options.bodies else ())
    )


def _checked(
    given: Mapping[str, str], schema: StructType, patience: Patience = AT_ONCE
) -> WriteOptions:
    options = write_options(given)
    check_schema(schema, options.topic, options.bodies.fields if options.bodies else None)
    if options.topic is not None:
        with Cluster(options.nameservers, options.dial) as cluster:
            _route(cluster, options.topic, patience)
    return options


def _is_new(given: Mapping[str, str]) -> bool:
    """True if the checkpoint visibly has no commit yet, so that the topic may be a typo."""
    checkpoint = Options(given, _KNOWN_OPTIONS).text("checkpointLocation")
    if checkpoint is None:
        return False
    url = urlsplit(checkpoint)
    commits = Path(unquote(url.path), "commits")
    return url.scheme in {"", "file"} and not any(path.name.isdigit() for path in commits.glob("*"))


def _route(cluster: Cluster, topic: str, patience: Patience) -> TopicRoute:
    """The route of a topic. Raises TopicNotFound, NoQueue, NameserverUnavailable."""

    def look() -> TopicRoute:
        route = cluster.route(topic)
        if all(map(route.why_not_writable, route.write_queues)):
            raise NoQueue(topic, "write to")
        return route

    return retry_transient(look, patience)


# -- tasks -----------------------------------------------------------------------------------------


@dataclass
class Written(WriterCommitMessage):
    """A task's report to the driver: its staged attempts, by broker name."""

    query_id: str
    staged: dict[str, StagedAttempt] = field(default_factory=dict)


def write_rows(
    options: WriteOptions, query_id: str, batch_id: int, batches: Iterable[pa.RecordBatch]
) -> Written:
    """Write the rows of one task; all are stored or staged on return.

    Raises HeadraceError.
    """
    name = AttemptName(query_id, batch_id, new_attempt(options.topic))
    with TaskWriter(options, name) as writer:
        for batch in batches:
            writer.write(options.bodies.add(batch) if options.bodies else batch)
        return Written(query_id, writer.finish())


class TaskWriter:
    """Sends the rows of a task to their queues. A context manager."""

    def __init__(self, options: WriteOptions, name: AttemptName) -> None:
        self._name = name
        self._exactly_once = options.exactly_once
        self._stack = ExitStack()
        self._cluster = self._stack.enter_context(Cluster(options.nameservers, options.dial))
        self._routes: dict[str, TopicRoute] = {}
        self._links: dict[str, BrokerLink] = {}
        self._staged: dict[str, StagedBlocks] = {}
        self._ours: dict[str, bool] = {}
        self._buffer = RowBuffer(options.topic, lambda topic: len(self._route(topic).write_queues))
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
        """Add rows, which are sent once they fill a request."""
        for each in self._buffer.add(batch):
            self._send(each)

    def finish(self) -> dict[str, StagedAttempt]:
        """Send the remaining rows; returns the staged attempts, by broker name."""
        for each in self._buffer.rest():
            self._send(each)
        for link in self._links.values():
            link.finish()
        return {name: blocks.seal() for name, blocks in self._staged.items()}

    def _send(self, some: QueueRows) -> None:
        queue, broker_name = self._queue_of(some)
        link = self._link(broker_name, some.topic)
        if not self._ours[broker_name]:
            block = some.rows.for_any_broker(some.topic)
            outgoing = block.for_any_broker(_now_ms(), self._message_ids.next)
            send_outgoing(link, some.topic, queue.queue_id, outgoing)
            return
        encoded = some.rows.for_headrace(some.topic, _now_ms(), self._born_host)
        staged = self._staged.get(broker_name)
        if staged:
            staged.send(some.topic, queue.queue_id, encoded)
        else:
            send_block(link, some.topic, queue.queue_id, encoded)

    def _queue_of(self, some: QueueRows) -> tuple[MessageQueue, str]:
        """The queue for rows, and its broker. Raises NoQueue for a key whose queue has none."""
        route = self._route(some.topic)
        if some.number is not None:
            queue = route.write_queues[some.number]
            if error := route.why_not_writable(queue):
                raise error
        else:
            queues = [each for each in route.write_queues if not route.why_not_writable(each)]
            queue = queues[next(self._turns[some.topic]) % len(queues)]
        return queue, route.broker_of(queue)

    def _route(self, topic: str) -> TopicRoute:
        route = self._routes.get(topic)
        if route is None:
            route = self._routes[topic] = _route(self._cluster, topic, WRITING)
        return route

    def _link(self, broker_name: str, topic: str) -> BrokerLink:
        link = self._links.get(broker_name)
        if link is None:
            address = self._route(topic).master(broker_name)
            assert address, "write queues are on brokers with a master"
            link = BrokerLink(address, self._cluster.dial)
            self._links[broker_name] = self._stack.enter_context(link)
            is_ours = self._ours[broker_name] = link.is_headrace()
            if is_ours and self._exactly_once:
                self._staged[broker_name] = StagedBlocks(link, self._name)
            elif self._exactly_once:
                _warn_at_least_once(broker_name, address)
        return link


@cache
def _warn_at_least_once(broker_name: str, address: str) -> None:
    # Cached: Spark reuses worker processes, so the warning appears about once per process.
    _log.warning(
        "broker %s at %s runs Apache RocketMQ: rows are written to it at least once, so failed or "
        "repeated attempts leave duplicates",
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
    """Makes all rows of a job readable at its end, or none of them."""

    def __init__(self, options: WriteOptions, job_id: str) -> None:
        self._options = options
        self._job_id = job_id

    @brief
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Runs in a task."""
        return write_rows(self._options, self._job_id, 0, iterator)

    @brief
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver when all tasks are done."""
        if parts := _parts(messages):
            with Cluster(self._options.nameservers, self._options.dial) as cluster:
                committer = Committer(cluster, self._job_id)
                committer.commit(0, parts)
                try:
                    committer.forget()
                except HeadraceError as error:  # leaves a small file behind; the rows are written
                    _log.warning(
                        "cannot delete the state of %s at the brokers: %s", self._job_id, error
                    )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver when a task or the commit has failed."""
        _abort(self._options, messages, 0)


class _StreamCommits:
    """The driver's part of both stream writers."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    @brief
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Runs on the driver when all tasks are done, and again for a repeated micro-batch."""
        written = _written(messages)
        if self._options.exactly_once and written:
            with Cluster(self._options.nameservers, self._options.dial) as cluster:
                Committer(cluster, written[0].query_id).commit(batchId, _parts(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Runs on the driver when a task or the commit has failed; decided attempts stay."""
        _abort(self._options, messages, batchId)

    def _write(self, batches: Iterable[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        assert context, "Spark calls write in a task"
        query_id = context.getLocalProperty("sql.streaming.queryId")
        batch_id = context.getLocalProperty("streaming.sql.batchId")
        if query_id is None or batch_id is None:
            raise HeadraceError(
                "Spark did not set the query id and batch id: use writeStream to write"
            )
        return write_rows(self._options, query_id, int(batch_id), batches)


class RowStreamWriter(_StreamCommits, DataSourceStreamWriter):
    """A stream writer for Spark 4.0, which passes rows."""

    def __init__(self, options: WriteOptions, schema: pa.Schema) -> None:
        super().__init__(options)
        self._schema = schema

    @brief
    def write(self, iterator: Iterator[Row]) -> Written:
        """Runs in a task."""
        return self._write(_batches_of(iterator, self._schema))


class ArrowStreamWriter(_StreamCommits, _ARROW_BASE):  # type: ignore[misc]
    """A stream writer for Spark 4.1 and later, which passes Arrow batches."""

    @brief
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Runs in a task."""
        return self._write(iterator)


def _batches_of(rows: Iterator[Row], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        columns = zip(*some, strict=True)
        yield pa.record_batch(
            [_array(values, kind) for values, kind in zip(columns, schema.types, strict=True)],
            schema=schema,
        )


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_null(kind):
        return pa.nulls(len(values))
    if pa.types.is_map(kind):
        values = [value and list(value.items()) for value in values]
    return pa.array(values, kind)


def _written(messages: Iterable[WriterCommitMessage | None]) -> list[Written]:
    """The reports of tasks; failed tasks have none."""
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
        with Cluster(options.nameservers, options.dial) as cluster:
            Committer(cluster, _written(messages)[0].query_id).abort(batch_id, parts)
