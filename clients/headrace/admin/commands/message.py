"""``headrace message``: finds messages by id or key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headrace.admin import completion, options
from headrace.admin.failures import NotFound
from headrace.admin.messages import message_record, preview
from headrace.admin.output import (
    newest_of_each,
    print_record,
    print_rows,
    time_text,
    warned_if,
    with_problems,
)
from headrace.admin.points import parse_time
from headrace.admin.running import run_admin
from headrace.errors import ConfigurationError
from headrace_protocol.system_topics import TRACE_TOPIC

if TYPE_CHECKING:
    from headrace.admin.client import Admin
    from headrace.admin.message_trace import TraceEvent
    from headrace.admin.output import Row
    from headrace.admin.queries import QueuedMessage
    from headrace.received import ReceivedMessage

_TIMESTAMP_MS_MAX = 2**63 - 1
_TRANSACTION = "its transaction ends"


_topic = click.option(
    "--topic",
    metavar="TOPIC",
    shell_complete=completion.topics,
    help="The message's topic; required for a producer's id.",
)


@options.group("message", "headrace message query orders 4711 --since 2h")
def command() -> None:
    """Find, trace and resend messages."""


@command.subcommand(
    "get",
    "headrace message get 7F00000100002A9F000000000000012C",
    "headrace message get 7F0000010A2B18B4AAC2000000000000 --topic orders --json",
)
@click.argument("message_id", metavar="ID")
@_topic
@options.allow_partial
@options.answer
def get(
    message_id: str,
    topic: str | None,
    nameserver: str | None,
    *,
    allow_partial: bool,
    as_json: bool,
) -> None:
    """Show one message, also one that waits for its time or for its transaction's end.

    ID is the broker's id of the message (offset_message_id) or the producer's (message_id).
    """

    async def run(admin: Admin) -> Row | None:
        message = await admin.message(message_id, topic, problems=problems)
        if message is not None:
            return message_record(message)
        if topic is None:
            return None
        queued = await admin.queued(topic, message_id, by_id=True, problems=problems)
        return (
            {"waits_until": _until(queued[0])} | message_record(queued[0].message)
            if queued
            else None
        )

    with warned_if(allow_partial) as problems:
        record = run_admin(run, nameserver)
    if record is None:
        raise NotFound(f"message {message_id} does not exist or has expired")
    print_record(record, as_json=as_json)


@command.subcommand(
    "query",
    "headrace message query orders 4711",
    "headrace message query orders 4711 --since 2h --until 30m --json",
)
@click.argument("topic", metavar="TOPIC", shell_complete=completion.topics)
@click.argument("key", metavar="KEY")
@click.option(
    "--max",
    "count",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    metavar="MESSAGES",
    help="Maximum number of messages per broker.",
)
@click.option(
    "--since",
    metavar="TIME",
    help="Only messages stored since a time or an age: 2026-11-21, 2h.",
)
@click.option("--until", metavar="TIME", help="Only messages stored until a time or an age.")
@options.allow_partial
@options.answer
def query(
    topic: str,
    key: str,
    count: int,
    since: str | None,
    until: str | None,
    nameserver: str | None,
    *,
    allow_partial: bool,
    as_json: bool,
) -> None:
    """List the messages with a key, oldest first, then those that wait to be delivered."""
    begin_ms = parse_time(since) if since else 0
    end_ms = parse_time(until) if until else _TIMESTAMP_MS_MAX
    if begin_ms > end_ms:
        raise ConfigurationError(f"--since {since} is later than --until {until}; swap them")

    async def run(admin: Admin) -> tuple[list[ReceivedMessage], list[QueuedMessage]]:
        found = await admin.query_by_key(
            topic,
            key,
            # One more tells whether there are more.
            max_count=count + 1,
            begin_ms=begin_ms,
            end_ms=end_ms,
            problems=problems,
        )
        queued = await admin.queued(
            topic, key, max_count=count + 1, begin_ms=begin_ms, end_ms=end_ms, problems=problems
        )
        return found, queued

    with warned_if(allow_partial) as problems:
        found, queued = run_admin(run, nameserver)
        found = newest_of_each(
            found,
            count,
            lambda message: message.queue.broker_name,
            f"only the newest {count} messages are listed; older ones with a larger --max, or an "
            "earlier --until",
        )
        queued = newest_of_each(
            queued,
            count,
            lambda each: each.message.queue.broker_name,
            f"only the newest {count} messages that wait are listed; others with a larger --max",
        )
    row_of = message_record if as_json else _short
    # Most topics have nothing that waits, and need no column for it.
    waits_not = {"waits_until": None} if queued else {}
    rows: list[Row] = [{**row_of(message), **waits_not} for message in found]
    rows += [{**row_of(each.message), "waits_until": _until(each)} for each in queued]
    if as_json or rows:
        print_rows(with_problems(rows, problems), as_json=as_json, empty="")
    if not rows:
        raise NotFound(f"no message of {topic} has the key {key}")


def _until(queued: QueuedMessage) -> str:
    if queued.until_ms is None:
        return _TRANSACTION
    return time_text(queued.until_ms) or ""


def _short(message: ReceivedMessage) -> dict[str, object]:
    return {
        "broker": message.queue.broker_name,
        "queue": message.queue.queue_id,
        "queue_offset": message.queue_offset,
        "store_time": time_text(message.store_timestamp_ms),
        "tag": message.tag or None,
        "offset_message_id": message.offset_message_id,
        "body": preview(message),
    }


@command.subcommand(
    "resend",
    "headrace message resend 7F00000100002A9F000000000000012C --group billing --to 10.0.0.7@4711#3",
)
@click.argument("message_id", metavar="ID")
@click.option(
    "--group",
    required=True,
    metavar="GROUP",
    shell_complete=completion.groups,
    help="The member's group.",
)
@click.option("--to", "client_id", required=True, metavar="CLIENT", help="The member's client id.")
@_topic
@options.answer
def resend(
    message_id: str,
    group: str,
    client_id: str,
    topic: str | None,
    nameserver: str | None,
    *,
    as_json: bool,
) -> None:
    """Have a connected member process a message again, and show what became of it.

    The group's progress stays where it is. `headrace group members` lists the members.
    """
    result = run_admin(lambda admin: admin.resend(message_id, group, client_id, topic), nameserver)
    if result is None:
        raise NotFound(f"message {message_id} does not exist or has expired")
    row = {
        "result": result.consume_result,
        "spent_ms": result.spent_time_mills,
        "remark": result.remark,
    }
    print_record(row, as_json=as_json)


@command.subcommand(
    "trace",
    "headrace message trace 7F0000010A2B18B4AAC2000000000000 --topic orders",
    "headrace message trace 7F0000010A2B18B4AAC2000000000000 --json",
)
@click.argument("message_id", metavar="ID")
@click.option(
    "--topic",
    metavar="TOPIC",
    shell_complete=completion.topics,
    help="The message's topic; by default the one that a trace of its send names.",
)
@click.option(
    "--trace-topic",
    default=TRACE_TOPIC,
    show_default=True,
    metavar="TOPIC",
    help="Topic into which clients write their traces.",
)
@options.allow_partial
@options.answer
def trace(
    message_id: str,
    topic: str | None,
    trace_topic: str,
    nameserver: str | None,
    *,
    allow_partial: bool,
    as_json: bool,
) -> None:
    """List what happened to the message with a producer's id, oldest first.

    Producers and consumers tell it if they trace: with trace=True, HEADRACE_TRACE=1, or Java's
    enableTrace. Where the message is now, also without. A trace that can't be read as a whole
    fails, unless a part is enough.
    """
    with warned_if(allow_partial) as problems:
        events = run_admin(
            lambda admin: admin.trace(
                message_id, topic, trace_topic=trace_topic, problems=problems
            ),
            nameserver,
        )
    rows = list(map(_traced, events))
    if as_json or rows:
        print_rows(with_problems(rows, problems), as_json=as_json, empty="")
    if not rows:
        raise NotFound(
            f"no trace of message {message_id} in {trace_topic}"
            f"{f', nor the message in {topic}' if topic else '; --topic finds the message itself'}"
        )


def _traced(event: TraceEvent) -> dict[str, object]:
    until = time_text(event.waits_until_ms) if event.waits_until_ms else None
    if event.event == "waits" and until is None:
        until = _TRANSACTION
    return {
        "time": time_text(event.time_ms),
        "event": event.event,
        "group": event.group or None,
        "client": event.client or None,
        "retries": event.retries,
        "waits_until": until,
        "detail": event.detail or None,
    }
