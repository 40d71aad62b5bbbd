"""``headrace group dlq``: lists and replays a group's dead letters."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, options
from headrace.admin.failures import CommandFailed
from headrace.admin.messages import message_record, preview
from headrace.admin.output import print_rows, time_text
from headrace.admin.points import parse_time
from headrace.errors import ConfigurationError, HeadraceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.admin.dead_letters import DeadLetters
    from headrace.received import ReceivedMessage


@options.group("dlq", "headrace group dlq replay warehouse --dry-run")
def command() -> None:
    """List and replay a group's dead letters: the messages that it has given up."""


@command.subcommand(
    "list",
    "headrace group dlq list warehouse",
    "headrace group dlq list warehouse --from 2h --max 100 --json",
)
@click.argument("group", metavar="GROUP", shell_complete=completion.groups)
@click.option(
    "--from",
    "since",
    metavar="TIME",
    help="Only dead letters stored since a time or an age: 2026-11-21, 2h.",
)
@click.option(
    "--max",
    "count",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    metavar="MESSAGES",
    help="Maximum number of dead letters.",
)
@options.answer
def list_letters(
    group: str, since: str | None, count: int, nameserver: str | None, *, as_json: bool
) -> None:
    """List a group's dead letters, oldest first."""
    import trio

    since_ms = parse_time(since) if since else 0

    async def run() -> list[ReceivedMessage]:
        async with _dead_letters(group, nameserver) as letters:
            return await letters.stored(since_ms, count)

    rows = list(map(message_record if as_json else _short, trio.run(run)))
    print_rows(rows, as_json=as_json, empty=f"group {group} has no dead letters")


@command.subcommand(
    "replay",
    "headrace group dlq replay warehouse --dry-run",
    "headrace group dlq replay warehouse --since 2h",
    "headrace group dlq replay warehouse --message 7F0000010A2B18B4AAC2000000000000",
)
@click.argument("group", metavar="GROUP", shell_complete=completion.groups)
@click.option("--message", "message_id", metavar="ID", help="Only the dead letter with this id.")
@click.option("--since", metavar="TIME", help="Pass over those stored before a time or an age: 2h.")
@click.option(
    "--to",
    metavar="TOPIC",
    shell_complete=completion.topics,
    help="Topic to send to. Default: the one that the message was first sent to.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be sent.")
@options.answer
def replay(
    group: str,
    message_id: str | None,
    since: str | None,
    to: str | None,
    nameserver: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Send a group's dead letters once more, each to its topic.

    Every dead letter is sent once: an interrupted replay continues when it is called again, and a
    later one begins with the dead letters that are new. Messages start with new attempts.
    """
    import trio

    from headrace.names import check_topic

    if message_id and since:
        raise ConfigurationError("--message cannot be combined with --since")
    if to is not None:
        check_topic(to)
    since_ms = parse_time(since) if since else 0
    rows: list[dict[str, Any]] = []

    async def run() -> None:
        async with _dead_letters(group, nameserver) as letters:
            found = letters.one(message_id) if message_id else letters.waiting(since_ms)
            async for letter in found:
                target = letters.target(letter, to)
                if not await letters.is_replayed(letter, target):
                    if not dry_run:
                        await letters.replay(letter, target)
                    rows.append({"to": target, **_short(letter)})
                if not (dry_run or message_id):
                    await letters.commit(letter)

    try:
        trio.run(run)
    except HeadraceError as error:
        if dry_run or not rows:
            raise
        print_rows(rows, as_json=as_json, empty="")
        raise CommandFailed(f"{error}; those shown are sent, call it again for the rest") from error
    print_rows(rows, as_json=as_json, empty=f"group {group} has no dead letters to replay")


@asynccontextmanager
async def _dead_letters(group: str, nameserver: str | None) -> AsyncIterator[DeadLetters]:
    from headrace.admin.client import Admin
    from headrace.admin.dead_letters import DeadLetters

    async with (
        Admin(nameserver=nameserver) as admin,
        DeadLetters(admin, group, nameserver) as letters,
    ):
        yield letters


def _short(letter: ReceivedMessage) -> dict[str, Any]:
    return {
        "topic": letter.topic,
        "key": letter.key or None,
        "tag": letter.tag or None,
        "store_time": time_text(letter.store_timestamp_ms),
        "offset_message_id": letter.offset_message_id,
        "body": preview(letter),
    }
