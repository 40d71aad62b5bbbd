"""Copies of topics: from one to another, to a file, and from a file.

A copy has body, key, tag and properties of its original; properties of its own keep what the new
message can't have: id and times of the original. A copy of a copy keeps those of the first.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec
import trio

from headrace.admin.end_reader import EndReader
from headrace.admin.failures import CommandFailed
from headrace.admin.goal import Goal, all_queues
from headrace.admin.messages import message_record
from headrace.admin.output import queue_text, time_text
from headrace.consumer.subscription import Choice
from headrace.errors import InvalidMessage
from headrace.messages import Copy
from headrace_protocol.compression import UNREADABLE
from headrace_protocol.drivers.files import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import BinaryIO

    from headrace.consumer.pull import PullConsumer
    from headrace.messages import Message
    from headrace.producer.producer import Producer
    from headrace.received import MessageBatch, ReceivedMessage
    from headrace_protocol.bodies import MessageQueue

ORIGIN_ID = "origin_message_id"
ORIGIN_BORN_TIME = "origin_born_time"
ORIGIN_STORE_TIME = "origin_store_time"

_COMMIT_S = 1.0
_IMPORT_MESSAGES = 500
_IMPORT_BYTES = 8 * 1024 * 1024
_LINE_BEGIN = b'{"topic":'


class Original(NamedTuple):
    """A message to copy. queue: its queue, as text that is the same for all its messages."""

    queue: str
    message: Message


class Pace:
    """Limits a copy to a number of messages a second; None for no limit."""

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._free_at = trio.current_time()

    async def wait(self, count: int) -> None:
        """Wait until ``count`` more messages are due."""
        if self._per_second is not None:
            await trio.sleep_until(self._free_at)
            self._free_at = max(self._free_at, trio.current_time()) + count / self._per_second


class Target:
    """The topic that gets the copies.

    Messages with a key go to the key's queue. Those of one original queue without a key go to one
    queue. So both keep their order.
    """

    def __init__(self, producer: Producer, topic: str, pace: Pace) -> None:
        self.count = 0
        self._producer = producer
        self._topic = topic
        self._pace = pace
        self._numbers: dict[str, int] = {}

    async def send(self, originals: Sequence[Original]) -> None:
        """Store copies. Raises the errors of ``Producer.send_many``."""
        queues = await self._producer.queues(self._topic)
        await self._pace.wait(len(originals))
        if keyed := [each.message for each in originals if each.message.key]:
            await self._producer.send_many(keyed)
        by_queue: dict[str, list[Message]] = {}
        for original_queue, message in originals:
            if not message.key:
                by_queue.setdefault(original_queue, []).append(message)
        for original_queue, messages in by_queue.items():
            number = self._numbers.setdefault(original_queue, len(self._numbers))
            # Without a queue to write to, the producer waits for one, or says why there is none.
            queue = queues[number % len(queues)] if queues else None
            await self._producer.send_many(messages, queue=queue)
        self.count += len(originals)


# -- from one topic to another ---------------------------------------------------------------------


async def copy_topic(
    consumer: PullConsumer,
    producer: Producer,
    source: str,
    target: str,
    per_second: float | None = None,
) -> int:
    """Copy what ``source`` holds now; returns the number of messages.

    consumer: of the group that keeps the progress. It commits each second, so a copy that is
    interrupted repeats a second's messages. Both clients are opened for the copy.
    Raises PartialRead if queues can't be read to the end, and CommandFailed for a damaged message.
    """
    async with consumer, producer:
        copies = Target(producer, target, Pace(per_second))
        await producer.queues(target)
        reader = await _reader(consumer, source, {})
        # Not the consumer's positions: it has also read messages that are not copied.
        copied: dict[MessageQueue, int] = {}
        commit_at = trio.current_time() + _COMMIT_S
        try:
            while not reader.is_over:
                if received := await reader.receive():
                    batch, end = received
                    await copies.send([*_originals(batch.before(end), target)])
                    copied[batch.queue] = min(batch.next_offset, end)
                if trio.current_time() >= commit_at:
                    await consumer.commit(copied)
                    commit_at = trio.current_time() + _COMMIT_S
        finally:
            with trio.CancelScope(shield=True):
                await consumer.commit(copied)
        reader.check()
        return copies.count


async def _reader(
    consumer: PullConsumer, topic: str, begin: Mapping[tuple[str, int], int]
) -> EndReader:
    """begin: where to begin in queues, by broker and queue id; others where the group is."""

    async def start_of(queue: MessageQueue, end: int) -> int | None:
        offset = begin.get((queue.broker_name, queue.queue_id))
        if offset is not None and offset > end:
            # No HeadraceError: the reader would retry it.
            name = f"{queue.broker_name}/{queue.queue_id}"
            raise click.UsageError(
                f"the file has messages up to offset {offset} of {name}, which ends at {end}: "
                "they are of an earlier topic of this name; choose another file"
            )
        return offset

    goal = Goal(topic, await all_queues(consumer, topic), consumer.max_offset)
    return EndReader(consumer, goal, Choice(), start_of)


def _originals(batch: MessageBatch, topic: str) -> Iterator[Original]:
    queue = f"{batch.queue.broker_name}/{batch.queue.queue_id}"
    for message in batch:
        yield Original(queue, _copy(message, topic))


def _copy(message: ReceivedMessage, topic: str) -> Message:
    try:
        times = time_text(message.born_timestamp_ms), time_text(message.store_timestamp_ms)
        properties = _origin(message.message_id, *times) | message.properties
        return Copy(topic, message.body, message.key, message.tag, properties)
    except UNREADABLE as error:
        raise CommandFailed(
            f"{queue_text(message.queue)}@{message.queue_offset}: {error}; to skip it, move the "
            "group with `headrace group reset`"
        ) from error


def _origin(message_id: str | None, born: str | None, stored: str | None) -> dict[str, str]:
    """The properties that tell where a copy is from."""
    origin = {ORIGIN_ID: message_id, ORIGIN_BORN_TIME: born, ORIGIN_STORE_TIME: stored}
    return {name: text for name, text in origin.items() if text}


# -- to a file -------------------------------------------------------------------------------------


async def export_topic(
    consumer: PullConsumer, topic: str, path: Path, per_second: float | None = None
) -> int:
    """Append what the file does not have yet of a topic, one JSON object a line.

    A last line without its end, from a run that was killed, is removed. Returns the number of
    messages written. Raises PartialRead, OSError, and CommandFailed for a line that is no message
    of this topic.
    """
    with path.open("ab+") as file:
        begin = _resume(file, path, topic)
        async with consumer:
            reader = await _reader(consumer, topic, begin)
            pace, count = Pace(per_second), 0
            while not reader.is_over:
                if received := await reader.receive():
                    batch, end = received
                    lines = [_line(message) for message in batch.before(end)]
                    await pace.wait(len(lines))
                    file.writelines(lines)
                    count += len(lines)
            file.flush()
            reader.check()
            return count


def _line(message: ReceivedMessage) -> bytes:
    return msgspec.json.encode(message_record(message)) + b"\n"


class _Row(msgspec.Struct):
    """A line of ``headrace consume --json``."""

    broker: str
    queue: int
    queue_offset: int
    topic: str | None = None
    body: str | None = None
    body_base64: str | None = None
    key: str | None = None
    tag: str | None = None
    message_id: str | None = None
    born_time: str | None = None
    store_time: str | None = None
    properties: dict[str, str] = {}
    problem: str | None = None


_decode_row = msgspec.json.Decoder(_Row).decode


def _resume(file: BinaryIO, path: Path, topic: str) -> dict[tuple[str, int], int]:
    """The next offset of each queue; cuts a torn last line, if it was one of a message."""
    file.seek(0)
    begin: dict[tuple[str, int], int] = {}
    whole_bytes = 0
    for number, line in enumerate(file, 1):
        location = f"{path}:{number}"
        if not line.endswith(b"\n"):
            if not (line.startswith(_LINE_BEGIN) or _LINE_BEGIN.startswith(line)):
                raise CommandFailed(f"{location}: not a line of `headrace consume --json`")
            break
        row = _row(line, location)
        if row.topic != topic:
            raise CommandFailed(
                f"{location}: a message of topic {row.topic}, not {topic}; give each topic a file "
                "of its own"
            )
        begin[row.broker, row.queue] = row.queue_offset + 1
        whole_bytes += len(line)
    file.truncate(whole_bytes)
    return begin


def _row(line: bytes, location: str) -> _Row:
    try:
        return _decode_row(line)
    except ValueError as error:
        raise CommandFailed(
            f"{location}: not a line of `headrace consume --json`: {error}"
        ) from error


# -- from a file -----------------------------------------------------------------------------------


async def import_file(
    producer: Producer,
    path: Path,
    topic: str,
    per_second: float | None = None,
    *,
    at_once: int = _IMPORT_MESSAGES,
) -> int:
    """Store the messages of a file in a topic; returns their number.

    ``PATH.TOPIC.imported`` keeps the progress, so an import that is repeated continues there. One
    that was killed repeats at most ``at_once`` messages. ``-`` is standard input, and keeps no
    progress. Raises CommandFailed for a line that is no message.
    """
    async with producer:
        copies = Target(producer, topic, Pace(per_second))
        if path == Path("-"):
            name, number = "standard input", 1
            while lines := await trio.to_thread.run_sync(
                _some_lines, sys.stdin.buffer, at_once, abandon_on_cancel=True
            ):
                await copies.send(_of_lines(lines, topic, name, number))
                number += len(lines)
            return copies.count
        progress = path.with_name(f"{path.name}.{topic}.imported")
        with path.open("rb") as file:
            number = 1 + _skip_imported(file, progress)
            while lines := _some_lines(file, at_once):
                await copies.send(_of_lines(lines, topic, str(path), number))
                number += len(lines)
                replace_file(progress, b"%d" % file.tell())
        return copies.count


def _skip_imported(file: BinaryIO, progress: Path) -> int:
    """Read on to where the last import ended; returns the number of lines before."""
    if not progress.exists():
        return 0
    text = progress.read_text().strip()
    count = 0
    while str(file.tell()) != text:
        if not file.readline():
            raise CommandFailed(
                f"{progress} is about another file of this name; remove it to import all lines"
            )
        count += 1
    return count


def _some_lines(file: BinaryIO, at_once: int) -> list[bytes]:
    lines: list[bytes] = []
    bytes_left = _IMPORT_BYTES
    while len(lines) < at_once and bytes_left > 0 and (line := file.readline()):
        lines.append(line)
        bytes_left -= len(line)
    return lines


def _of_lines(lines: list[bytes], topic: str, name: str, number: int) -> list[Original]:
    """number: that of the first line."""
    return [_of_line(line, topic, f"{name}:{at}") for at, line in enumerate(lines, number)]


def _of_line(line: bytes, topic: str, name: str) -> Original:
    row = _row(line, name)
    queue = f"{row.broker}/{row.queue}"
    if row.problem is not None:
        raise CommandFailed(f"{name}: {queue}@{row.queue_offset} was unreadable: {row.problem}")
    body = _body(row, name)
    properties = _origin(row.message_id, row.born_time, row.store_time) | row.properties
    message = Copy(topic, body, row.key or "", row.tag or "", properties)
    try:
        message.check()
    except InvalidMessage as error:
        raise CommandFailed(f"{name}: {queue}@{row.queue_offset}: {error}") from error
    return Original(queue, message)


def _body(row: _Row, name: str) -> bytes:
    if row.body_base64 is None:
        return (row.body or "").encode()
    try:
        return base64.b64decode(row.body_base64, validate=True)
    except ValueError as error:
        raise CommandFailed(f"{name}: body_base64 is malformed: {error}") from error
