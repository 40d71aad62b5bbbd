"""``headrace send``: sends messages from an argument, a file or standard input."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, options
from headrace.admin.output import print_record, queue_columns
from headrace.admin.points import parse_duration, parse_moment
from headrace.admin.progress import progress
from headrace.admin.row_sender import RowSender, open_source
from headrace.admin.rows import BadRow, Columns, RowFormat, format_of, read_messages
from headrace.delays import LEVEL_MAX
from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.messages import Message, SendResult


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
@options.answer
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

    with open_source(file) as source:
        row_format = RowFormat(format_name) if format_name else format_of(source.name)
        if row_format is RowFormat.LINES and columns.names():
            raise ConfigurationError("lines have no columns; use --format csv or --format ndjson")
        with progress(source.name, source.file_bytes) as advance:
            messages = partial(
                read_messages, name=source.name, row_format=row_format, topic=topic, columns=columns
            )
            stream = RowSender(source, messages, advance)
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
