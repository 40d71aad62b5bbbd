"""``headrace send``: sends messages from an argument, a file or standard input."""

from __future__ import annotations

import select
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from headrace.admin import completion, options
from headrace.admin.output import print_record, queue_columns
from headrace.admin.points import parse_duration, parse_moment
from headrace.admin.progress import progress
from headrace.admin.rows import (
    LINE_BYTES_MAX,
    BadRow,
    Columns,
    RowFormat,
    format_of,
    read_messages,
)
from headrace.delays import LEVEL_MAX
from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import FileIO

    import trio

    from headrace.messages import Message, SendResult

_CHUNK_BYTES = 256 * 1024
_IN_FLIGHT = 2000

Chunk = list["Message"]


@options.command(
    "send",
    "headrace send orders 'two apples' -k 4711 -t paid -p source=shop",
    "headrace send photos --body-file apple.jpg",
    "headrace send reminders 'tea is ready' --delay 3m",
    "headrace send orders --file orders.csv --key-column id --tag-column state",
    "seq 1000 | headrace send numbers",
)
@click.argument("topic", metavar="TOPIC", shell_complete=completion.topics)
@click.argument("body", metavar="[BODY]", type=options.BYTES, required=False)
@click.option(
    "--body-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Send the whole file as one message; - means standard input.",
)
@click.option(
    "--key", "-k", default="", metavar="KEY", help="Key of the message; separate several by spaces."
)
@click.option("--tag", "-t", default="", metavar="TAG", help="Tag of the message.")
@click.option(
    "--property",
    "-p",
    "properties",
    multiple=True,
    metavar="NAME=VALUE",
    help="Property of the message; may be repeated.",
)
@click.option(
    "--delay", metavar="DURATION", help="Deliver the message later: 500ms, 5s, 15m, 2h, 1d."
)
@click.option(
    "--at",
    metavar="TIME",
    help="Deliver the message at a time: 2026-11-21T06:00, local or with zone.",
)
@click.option(
    "--delay-level",
    type=click.IntRange(1, LEVEL_MAX),
    metavar="LEVEL",
    help="Deliver the message after the broker's delay of this level: 1 to 18.",
)
@click.option(
    "--file",
    "-f",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with one message per line; - means standard input.",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice([each.value for each in RowFormat]),
    metavar="FORMAT",
    help="Format of the input: lines, ndjson or csv. Default: by file extension: .csv, .ndjson, "
    ".jsonl.",
)
@click.option(
    "--key-column",
    metavar="COLUMN",
    help="Column or field with the key; an empty value means no key.",
)
@click.option("--tag-column", metavar="COLUMN", help="Column or field with the tag.")
@click.option(
    "--body-column",
    metavar="COLUMN",
    help="Column or field with the body. Default: the row as JSON.",
)
@options.as_json
@options.nameserver
def command(
    topic: str,
    body: bytes | None,
    body_file: Path | None,
    key: str,
    tag: str,
    properties: tuple[str, ...],
    delay: str | None,
    at: str | None,
    delay_level: int | None,
    file: Path | None,
    format_name: str | None,
    key_column: str | None,
    tag_column: str | None,
    body_column: str | None,
    nameserver: str | None,
    *,
    as_json: bool,
) -> None:
    """Send one message, or each line or row of a file.

    BODY is a single message. Without it and --body-file, messages are read from standard input or
    --file, one per line.
    """
    import trio

    from headrace.messages import Message
    from headrace.names import check_topic

    check_topic(topic)
    delays = _delays(delay, at, delay_level)
    if body is not None or body_file:
        if file or format_name or key_column or tag_column or body_column:
            raise ConfigurationError("a single message cannot be combined with options for rows")
        if body is not None and body_file:
            raise ConfigurationError("BODY cannot be combined with --body-file")
        message = Message(
            topic,
            body if body is not None else _whole(body_file),
            key=key,
            tag=tag,
            properties=options.pairs(properties, "property"),
            **delays,
        )
        print_record(_sent(trio.run(_send_one, nameserver, message)), as_json=as_json)
        return
    if key or tag or properties or delays:
        raise ConfigurationError(
            "--key, --tag, --property and delays require BODY or --body-file; for rows, use "
            "--key-column and --tag-column"
        )
    columns = Columns(key_column, tag_column, body_column)
    _send_rows(topic, file, format_name, columns, nameserver, as_json=as_json)


def _send_rows(
    topic: str,
    file: Path | None,
    format_name: str | None,
    columns: Columns,
    nameserver: str | None,
    *,
    as_json: bool,
) -> None:
    import trio

    with _open(file) as source:
        row_format = RowFormat(format_name) if format_name else format_of(source.name)
        if row_format is RowFormat.LINES and columns.names():
            raise ConfigurationError("lines have no columns; use --format csv or --format ndjson")
        with progress(source.name, source.file_bytes) as advance:
            stream = _Stream(source, row_format, topic, columns, advance)
            started = time.monotonic()
            trio.run(stream.send, nameserver)
            seconds = time.monotonic() - started
    summary = {
        "topic": topic,
        "messages": stream.sent,
        "seconds": round(seconds, 3),
        "messages_per_second": round(stream.sent / seconds, 1),
    }
    print_record(summary, as_json=as_json)
    failure = stream.failure
    if isinstance(failure, BadRow):
        raise BadRow(
            failure.location,
            f"{failure.reason}. Messages sent before this row: {stream.sent}, none after it",
        )
    if failure:
        raise failure


def _delays(delay: str | None, at: str | None, delay_level: int | None) -> dict[str, Any]:
    """Arguments of a message. Raises ConfigurationError."""
    given = {
        "delay": parse_duration(delay).total_seconds() if delay else None,
        "deliver_at": parse_moment(at) if at else None,
        "delay_level": delay_level,
    }
    return {name: value for name, value in given.items() if value is not None}


def _whole(path: Path | None) -> bytes:
    if path is None or path == Path("-"):
        return sys.stdin.buffer.read()
    return path.read_bytes()


async def _send_one(nameserver: str | None, message: Message) -> SendResult:
    from headrace.producer.producer import Producer

    # A person waits for the answer.
    async with Producer(nameserver=nameserver, delivery_timeout_ms=1000) as producer:
        return await producer.send(message)


def _sent(result: SendResult) -> dict[str, Any]:
    return {
        **queue_columns(result.queue),
        "queue_offset": result.queue_offset,
        "message_id": result.message_id,
        "offset_message_id": result.offset_message_id,
        **({"recall_handle": result.recall_handle} if result.recall_handle else {}),
    }


class _Source(NamedTuple):
    name: str
    file: FileIO
    file_bytes: int | None


@contextmanager
def _open(path: Path | None) -> Iterator[_Source]:
    if path is None or path == Path("-"):
        # A buffered reader has a lock, and Python aborts at exit if a thread still holds it.
        yield _Source("standard input", sys.stdin.buffer.raw, None)  # type: ignore[union-attr]
        return
    with path.open("rb", buffering=0) as file:
        yield _Source(str(path), file, path.stat().st_size)


def _read(file: FileIO) -> bytes:
    """The next bytes; empty at the end. Waits even if the file was made non-blocking."""
    while (data := file.read(_CHUNK_BYTES)) is None:
        select.select([file], [], [])
    return data


class _Stream:
    """Sends rows to the broker: reads them in a thread, and sends them through a pipeline.

    sent: number of messages stored, once ``send`` is done. failure: the bad row, or the file's
    error, that ended it early.
    """

    def __init__(
        self,
        source: _Source,
        row_format: RowFormat,
        topic: str,
        columns: Columns,
        advance: Callable[[int], None],
    ) -> None:
        self.sent = 0
        self.failure: BadRow | OSError | None = None
        self._source = source
        self._row_format = row_format
        self._topic = topic
        self._columns = columns
        self._advance = advance

    async def send(self, nameserver: str | None) -> None:
        """Send all messages up to the first bad row."""
        import trio

        from headrace.producer.producer import Producer

        chunks_in, chunks_out = trio.open_memory_channel["Chunk"](2)
        async with Producer(nameserver=nameserver) as producer, trio.open_nursery() as nursery:
            nursery.start_soon(self._read, chunks_in)
            async with producer.pipeline(max_in_flight=_IN_FLIGHT) as pipeline:
                async for chunk in chunks_out:
                    await pipeline.send_all(chunk)
                    self.sent += len(chunk)

    async def _read(self, chunks: trio.MemorySendChannel[Chunk]) -> None:
        import trio

        async with chunks:
            # A read of standard input cannot be interrupted, only abandoned.
            await trio.to_thread.run_sync(self._read_in_thread, chunks, abandon_on_cancel=True)

    def _read_in_thread(self, chunks: trio.MemorySendChannel[Chunk]) -> None:
        import trio

        chunk: Chunk = []

        def hand_over() -> None:
            nonlocal chunk
            if chunk:
                trio.from_thread.run(chunks.send, chunk)
                chunk = []

        lines = self._lines(before_read=hand_over)
        rows = read_messages(lines, self._source.name, self._row_format, self._topic, self._columns)
        try:
            for message in rows:
                chunk.append(message)
        except (BadRow, OSError) as error:
            self.failure = error
        hand_over()

    def _lines(self, before_read: Callable[[], None]) -> Iterator[bytes]:
        """Lines with their line ends; calls ``before_read`` before each read, which may block.

        Raises BadRow for a line that is too long, and OSError.
        """
        rest, count = b"", 0
        while True:
            before_read()
            data = _read(self._source.file)
            self._advance(len(data))
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line + b"\n"
            count += len(lines)
            if len(rest) > LINE_BYTES_MAX:
                location = f"{self._source.name}:{count + 1}"
                raise BadRow(location, f"a line of more than {LINE_BYTES_MAX} bytes")
        if rest:
            yield rest
