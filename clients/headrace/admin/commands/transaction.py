"""``headrace transaction``: lists transactions without a decision, and resumes discarded ones."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import options
from headrace.admin.failures import NotFound
from headrace.admin.messages import message_record, preview
from headrace.admin.output import (
    counted,
    newest_of_each,
    print_record,
    print_rows,
    time_text,
    warned,
    with_problems,
)
from headrace.admin.running import run_admin
from headrace.errors import RouteNotFound
from headrace_daemon.command import warn

if TYPE_CHECKING:
    from headrace.admin.client import Admin
    from headrace.admin.waiting import OpenTransaction


@options.group("transaction", "headrace transaction list --group shop")
def command() -> None:
    """List transactions without a decision, and resume discarded ones.

    Only their producers decide them.
    """


@command.subcommand(
    "list",
    "headrace transaction list",
    "headrace transaction list --group shop --json",
)
@click.option("--group", metavar="GROUP", help="Only transactions of this group of producers.")
@options.max_count("transactions of each state")
@options.answer
def list_transactions(
    group: str | None, count: int, nameserver: str | None, *, as_json: bool
) -> None:
    """List transactions that nobody has decided: the oldest open ones, then discarded ones.

    The broker asks the producers of an open one from time to time. A discarded one was asked about
    too often; `headrace transaction resume` has it asked about again. An open one is shown some
    seconds after it was sent.
    """

    async def run(admin: Admin) -> tuple[list[OpenTransaction], int]:
        found, total = await admin.transactions(group, max_count=count, problems=problems)
        if total > len(found) == count:
            warn(
                f"only the oldest {len(found)} open transactions are listed; younger ones with a "
                "larger --max"
            )
        # One more tells whether there are more.
        discarded = await admin.discarded_transactions(
            group, max_count=count + 1, problems=problems
        )
        newest = newest_of_each(
            discarded,
            count,
            lambda one: one.message.queue.broker_name,
            f"only the {count} transactions that were discarded last are listed; older ones with "
            "a larger --max",
        )
        return [*found, *newest], total

    with warned() as problems:
        transactions, total = run_admin(run, nameserver)
        rows = with_problems([_row(one, as_json=as_json) for one in transactions], problems)
    print_rows(rows, as_json=as_json, empty="all transactions are decided")
    if transactions and not as_json:
        sys.stderr.write(f"{counted(total, 'open transaction')}\n")


def _row(one: OpenTransaction, *, as_json: bool) -> dict[str, Any]:
    message = one.message
    row = {
        "group": one.group,
        "topic": one.topic,
        "state": "discarded" if one.is_discarded else "open",
        "checks": one.checks,
        "id": message.offset_message_id,
    }
    if as_json:
        # The record's own topic is the broker's.
        return {**message_record(message), **row}
    return {
        **row,
        "born_time": time_text(message.born_timestamp_ms),
        "key": message.key or None,
        "body": preview(message),
    }


@command.subcommand(
    "resume",
    "headrace transaction resume 7F00000100002A9F00000000000003E8",
)
@click.argument("message_id", metavar="ID")
@options.answer
def resume(message_id: str, nameserver: str | None, *, as_json: bool) -> None:
    """Have the producers of a discarded transaction asked again, from the start and once."""
    from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC

    async def run(admin: Admin) -> dict[str, Any]:
        found = None
        with suppress(RouteNotFound):  # the first discarded one creates the topic
            found = await admin.message(message_id, CHECK_MAX_TIME_TOPIC)
        if found is None or found.queue.topic != CHECK_MAX_TIME_TOPIC:
            raise NotFound(
                f"{message_id} is not the id of a discarded transaction; see `headrace "
                "transaction list`"
            )
        await admin.resume_transaction(found)
        return {"resumed": found.offset_message_id, "message_id": found.message_id}

    print_record(run_admin(run, nameserver), as_json=as_json)
