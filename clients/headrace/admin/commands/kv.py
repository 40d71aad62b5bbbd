"""``headrace kv``: reads and writes the keys of a topic that is used as a table."""

from __future__ import annotations

import base64
import binascii
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, options
from headrace.admin.failures import NotFound, report
from headrace.admin.output import print_json_line, print_record, queue_columns, time_text
from headrace.admin.row_sender import RowSender, open_source
from headrace.admin.rows import NESTED_TOO_DEEPLY, BadRow
from headrace.admin.terminal import clean_lines
from headrace.errors import HeadraceError, RouteNotFound
from headrace_daemon.command import FAILED, NOT_FOUND, clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.messages import Message, SendResult
    from headrace.table.client import Change, Table

# A person waits for the answer.
_PATIENCE_MS = 1000

_topic = click.argument("topic", metavar="TOPIC", shell_complete=completion.topics)
_key = click.argument("key", metavar="KEY")


@options.group("kv", "headrace kv put settings colour blue")
def command() -> None:
    """Get, put, delete and watch keys of a topic that is used as a table.

    The newest message of a key holds its value. A compacted topic keeps these messages for ever.
    """


@command.subcommand(
    "get",
    "headrace kv get settings colour",
    "headrace kv get settings colour --json",
)
@_topic
@_key
@options.allow_partial
@options.answer
def get(
    topic: str, key: str, nameserver: str | None, *, allow_partial: bool, as_json: bool
) -> None:
    """Print the value of a key.

    Brokers that do not look up keys, such as RocketMQ's, have their whole topic read. The exit code
    is 3 only if the key does not exist; 1 if that is not known.
    """
    import trio

    try:
        value = trio.run(_value, topic, key, nameserver, allow_partial)
    except HeadraceError as error:
        if isinstance(error, RouteNotFound) and not error.retryable:
            raise
        code = report(error)
        raise click.exceptions.Exit(FAILED if code == NOT_FOUND else code) from error
    if value is None:
        raise NotFound(f"table {topic} has no key {key!r}")
    if as_json:
        print_json_line(_row(key, value))
    elif sys.stdout.isatty():
        sys.stdout.write(clean_lines(value.decode(errors="backslashreplace")) + "\n")
    else:
        sys.stdout.buffer.write(value + b"\n")


async def _value(
    topic: str,
    key: str,
    nameserver: str | None,
    allow_partial: bool,
) -> bytes | None:
    from headrace.errors import KeyLookupUnsupported

    table = partial(_table, topic, nameserver, allow_partial=allow_partial)
    try:
        async with table(local=False) as remote:
            return await remote.get(key)
    except KeyLookupUnsupported:
        async with table(local=True) as copy:
            return await copy.get(key)


def _table(
    topic: str, nameserver: str | None, *, local: bool, allow_partial: bool = False
) -> Table[bytes]:
    from headrace.table.client import Table

    return Table(
        topic,
        local=local,
        nameserver=nameserver,
        delivery_timeout_ms=_PATIENCE_MS,
        allow_partial=allow_partial,
    )


@command.subcommand(
    "put",
    "headrace kv put settings colour blue",
    "cat ada.jpg | headrace kv put photos ada",
)
@_topic
@_key
@click.argument("value", metavar="[VALUE]", type=options.BYTES, required=False)
@options.answer
def put(
    topic: str, key: str, value: bytes | None, nameserver: str | None, *, as_json: bool
) -> None:
    """Set the value of a key; without VALUE, to the whole standard input."""
    import trio

    body = sys.stdin.buffer.read() if value is None else value

    async def run() -> SendResult:
        async with _table(topic, nameserver, local=False) as table:
            return await table.put(key, body)

    _print_result(trio.run(run), key, as_json=as_json)


@command.subcommand("delete", "headrace kv delete settings colour")
@_topic
@_key
@options.answer
def delete(topic: str, key: str, nameserver: str | None, *, as_json: bool) -> None:
    """Delete a key, whether or not it exists."""
    import trio

    async def run() -> SendResult:
        async with _table(topic, nameserver, local=False) as table:
            return await table.delete(key)

    _print_result(trio.run(run), key, as_json=as_json)


def _print_result(result: SendResult, key: str, *, as_json: bool) -> None:
    record = {"topic": result.queue.topic, "key": key, **queue_columns(result.queue)}
    print_record({**record, "queue_offset": result.queue_offset}, as_json=as_json)


@command.subcommand(
    "watch",
    "headrace kv watch settings",
    "headrace kv watch settings --all --json",
)
@_topic
@click.option("--all", "with_values", is_flag=True, help="Print the present values first.")
@click.option(
    "--max", "count", type=click.IntRange(min=1), metavar="N", help="Stop after so many changes."
)
@options.allow_partial
@options.answer
def watch(
    topic: str,
    count: int | None,
    nameserver: str | None,
    *,
    with_values: bool,
    allow_partial: bool,
    as_json: bool,
) -> None:
    """Print each change: time, put or delete, key and value.

    If changes come faster than they are printed, only the newest one of each key is.
    """
    import trio

    from headrace.admin.interrupts import deferred_interrupts

    async def run() -> None:
        with deferred_interrupts() as interrupts:
            reader = _table(topic, nameserver, local=True, allow_partial=allow_partial)
            async with reader as table, interrupts.cancel_block():
                if not with_values:
                    await table.synced()
                changes = table.changes()
                for _ in range(count or sys.maxsize):
                    _print_change(await anext(changes), as_json=as_json)
                    sys.stdout.flush()

    trio.run(run)


def _print_change(change: Change[bytes], *, as_json: bool) -> None:
    time = time_text(change.timestamp_ms)
    if as_json:
        print_json_line({**_row(change.key, change.value), "store_time": time})
        return
    value = (change.value or b"").decode(errors="backslashreplace")
    action = "delete" if change.is_deletion else "put"
    sys.stdout.write(f"{time}\t{action}\t{clean(change.key)}\t{clean(value)}\n")


@command.subcommand("dump", "headrace kv dump settings")
@_topic
@options.allow_partial
@options.nameserver
def dump(topic: str, nameserver: str | None, *, allow_partial: bool) -> None:
    """Print all keys with their values, a line of JSON each, in order of the keys.

    A value that is not UTF-8 is in value_base64 instead of value.
    """
    import trio

    async def run() -> list[tuple[str, bytes]]:
        async with _table(topic, nameserver, local=True, allow_partial=allow_partial) as table:
            await table.synced()
            return sorted(table.items())

    for key, value in trio.run(run):
        print_json_line(_row(key, value))


def _row(key: str, value: bytes | None) -> dict[str, Any]:
    try:
        return {"key": key, "value": None if value is None else value.decode()}
    except UnicodeDecodeError:
        return {"key": key, "value_base64": base64.b64encode(value or b"").decode()}


@command.subcommand(
    "load",
    "headrace kv load settings settings.ndjson",
    "cat settings.ndjson | headrace kv load settings",
)
@_topic
@click.argument("file", type=click.Path(path_type=Path), metavar="[FILE]", required=False)
@options.answer
def load(topic: str, file: Path | None, nameserver: str | None, *, as_json: bool) -> None:
    """Put the keys and values of a file as `headrace kv dump` prints it, or of standard input.

    The value null deletes its key. Other keys are kept. Stops at the first invalid line.
    """
    import trio

    with open_source(file) as source:
        sender = RowSender(source, partial(_messages, topic, source.name))
        trio.run(sender.send, nameserver)
    failure = sender.failure
    if isinstance(failure, BadRow):
        raise BadRow(failure.location, f"{failure.reason}. Lines loaded before it: {sender.sent}")
    if failure:
        raise failure
    print_record({"topic": topic, "keys": sender.sent}, as_json=as_json)


def _messages(topic: str, name: str, lines: Iterable[bytes]) -> Iterator[Message]:
    """The messages of rows. Raises BadRow for the first invalid one."""
    import msgspec

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            message = _message(topic, msgspec.json.decode(line))
            message.check()
        except (ValueError, RecursionError) as error:
            too_deep = isinstance(error, RecursionError)
            reason = NESTED_TOO_DEEPLY if too_deep else str(error)
            raise BadRow(f"{name}:{number}", reason) from error
        yield message


def _message(topic: str, row: object) -> Message:
    """The message of a row. Raises ValueError."""
    from headrace.messages import Message

    if not isinstance(row, dict) or row.keys() not in ({"key", "value"}, {"key", "value_base64"}):
        raise ValueError('expected {"key": "...", "value": "..."} or "value_base64"')
    key = row["key"]
    if not (isinstance(key, str) and key.strip()):
        raise ValueError("the key is not a text, or blank")
    value = row.get("value", row.get("value_base64"))
    if value is None:
        return Message(topic, b"", key)
    if not isinstance(value, str) or not value:
        raise ValueError("the value is neither a text nor null, or empty; null deletes the key")
    try:
        body = base64.b64decode(value, validate=True) if "value_base64" in row else value.encode()
    except binascii.Error as error:
        raise ValueError(f"value_base64 is not base64: {error}") from error
    return Message(topic, body, key)
