"""``headrace timer``: lists and cancels messages that wait for their time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, options
from headrace.admin.failures import NotFound
from headrace.admin.messages import message_record, preview
from headrace.admin.output import (
    counted,
    print_record,
    print_rows,
    time_text,
    warned,
    with_problems,
)
from headrace.admin.points import parse_later
from headrace.admin.running import run_admin
from headrace_daemon.command import warn

if TYPE_CHECKING:
    from headrace.admin.client import Admin
    from headrace.admin.waiting import WaitingTimer
    from headrace_protocol.recall_handle import RecallHandle


@options.group("timer", "headrace timer list --topic reminders")
def command() -> None:
    """List and cancel timers: messages that wait for their time."""


@command.subcommand(
    "list",
    "headrace timer list",
    "headrace timer list --topic reminders --until 15m",
    "headrace timer list --max 1000 --json",
)
@click.option("--topic", metavar="TOPIC", shell_complete=completion.topics, help="Only this topic.")
@click.option(
    "--until",
    metavar="TIME",
    help="Only timers due until then: 2026-11-21T06:00, or 15m from now.",
)
@options.max_count("timers")
@options.answer
def list_timers(
    topic: str | None, until: str | None, count: int, nameserver: str | None, *, as_json: bool
) -> None:
    """List the timers that wait, the next ones first, and how many there are.

    Messages with a delay level are not timers: the broker keeps them in another way.
    """
    until_ms = parse_later(until) if until else None
    with warned() as problems:
        timers, total = run_admin(
            # One more tells whether there are more.
            lambda admin: admin.timers(
                topic, until_ms=until_ms, max_count=count + 1, problems=problems
            ),
            nameserver,
        )
        if len(timers) > count:
            warn(f"only the next {count} timers are listed; later ones with a larger --max")
            del timers[count:]
        rows = with_problems([_row(timer, as_json=as_json) for timer in timers], problems)
    print_rows(rows, as_json=as_json, empty="no timers wait")
    if timers and not as_json:
        where = f" for topic {topic}" if topic else ""
        sys.stderr.write(f"{counted(total, 'waiting timer')}{where}\n")


def _row(timer: WaitingTimer, *, as_json: bool) -> dict[str, Any]:
    message = timer.message
    row = {"topic": timer.topic, "due": time_text(timer.due_ms), "id": message.message_id}
    if as_json:
        # The record's own topic is the broker's.
        return {**message_record(message), **row, "recall_handle": timer.recall_handle}
    return {
        **row,
        "broker": message.queue.broker_name,
        "key": message.key or None,
        "tag": message.tag or None,
        "body": preview(message),
    }


@command.subcommand(
    "cancel",
    "headrace timer cancel 7F0000010A2B18B4AAC2000000000000",
    "headrace timer cancel djEgcmVtaW5kZXJzIGJyb2tlci1hIDE3MDAwMDAwMDAwMDEgMDA=",
)
@click.argument("timer", metavar="ID|HANDLE")
@options.answer
def cancel(timer: str, nameserver: str | None, *, as_json: bool) -> None:
    """Cancel a timer by its id, or by the handle that its sender got.

    Fails if it does not wait any more. Prints how many timers of its topic still wait.
    """

    async def run(admin: Admin) -> dict[str, Any]:
        handle = await _handle(admin, timer)
        await admin.cancel_timer(handle)
        counts = await admin.timer_counts(problems=problems)
        return {
            "cancelled": handle.uniq_key,
            "topic": handle.topic,
            "broker": handle.broker_name,
            "still_waiting": counts.get(handle.topic, 0),
        }

    with warned() as problems:
        record = run_admin(run, nameserver)
    print_record(record, as_json=as_json)


async def _handle(admin: Admin, timer: str) -> RecallHandle:
    """The handle that recalls a timer. Raises NotFound for an unknown id."""
    from headrace.admin.waiting import handle_of
    from headrace_protocol.recall_handle import decode_recall_handle
    from headrace_protocol.system_topics import TIMER_TOPIC

    handle = decode_recall_handle(timer)
    if handle is None:
        waiting = await admin.message(timer, TIMER_TOPIC)
        handle = handle_of(waiting) if waiting else None
    if handle is None:
        raise NotFound(
            f"{timer} is neither a recall handle nor the id of a timer; see `headrace timer list`"
        )
    return handle
