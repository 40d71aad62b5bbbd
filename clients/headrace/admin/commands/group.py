"""``headrace group``: lists consumer groups, shows their lag and moves them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.admin import options
from headrace.admin.failures import NotFound
from headrace.admin.output import print_rows, time_text, warned, with_problems
from headrace.admin.places import parse_place
from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.admin.client import Admin, BrokerProblem, QueueLag
    from headrace_protocol.bodies import MessageQueue


@click.group("group", epilog=options.examples("headrace group lag warehouse"))
def command() -> None:
    """List and move consumer groups, and show their lag."""


@command.command(
    "list", epilog=options.examples("headrace group list", "headrace group list --json")
)
@options.system
@options.as_json
@options.nameserver
def list_groups(nameserver: str | None, *, system: bool, as_json: bool) -> None:
    """List the groups with their connected members and their lag over all topics."""
    import trio

    from headrace.admin.client import Admin

    async def run() -> list[dict[str, Any]]:
        async with Admin(nameserver=nameserver) as admin:
            groups = await admin.groups(system=system, problems=problems)
            return [await _group_row(admin, group.group_name, problems) for group in groups]

    with warned() as problems:
        rows = with_problems(trio.run(run), problems)
    print_rows(rows, as_json=as_json, empty="no groups yet; starting a consumer creates one")


async def _group_row(admin: Admin, group: str, problems: list[BrokerProblem]) -> dict[str, Any]:
    members = await admin.members(group, problems=problems)
    lags = await admin.lag(group, problems=problems)
    ids = {client.client_id for found in members.values() for client in found.connection_set}
    return {
        "group": group,
        "members": len(ids),
        "topics": sorted({lag.queue.topic for lag in lags if not lag.queue.topic.startswith("%")}),
        "lag": sum(lag.lag for lag in lags),
    }


@command.command(
    "lag",
    epilog=options.examples(
        "headrace group lag warehouse", "headrace group lag warehouse --topic orders --json"
    ),
)
@click.argument("group", metavar="GROUP")
@click.option("--topic", metavar="TOPIC", help="Only this topic.")
@options.as_json
@options.nameserver
def lag(group: str, topic: str | None, nameserver: str | None, *, as_json: bool) -> None:
    """Show a group's lag in each queue where it has a position."""
    import trio

    from headrace.admin.client import Admin

    async def run() -> list[QueueLag]:
        async with Admin(nameserver=nameserver) as admin:
            lags = await admin.lag(group, topic, problems=problems)
            if not lags:
                await _check_known(admin, group, topic, problems)
            return lags

    with warned() as problems:
        rows = with_problems([_lag_row(lag) for lag in trio.run(run)], problems)
    where = f" in topic {topic}" if topic else ""
    print_rows(rows, as_json=as_json, empty=f"group {group} has committed nothing yet{where}")


async def _check_known(
    admin: Admin, group: str, topic: str | None, problems: list[BrokerProblem]
) -> None:
    """Raise NotFound if the group does not exist, RouteNotFound if the topic does not."""
    if group not in {known.group_name for known in await admin.groups(problems=problems)}:
        raise NotFound(f"group {group} does not exist; see `headrace group list`")
    if topic is not None:
        await admin.topic_stats(topic, problems=problems)


def _lag_row(lag: QueueLag) -> dict[str, Any]:
    return {
        "topic": lag.queue.topic,
        "broker": lag.queue.broker_name,
        "queue": lag.queue.queue_id,
        "committed_offset": lag.committed_offset,
        "max_offset": lag.max_offset,
        "lag": lag.lag,
        "last_consumed": time_text(lag.last_timestamp_ms),
    }


@command.command(
    "reset",
    epilog=options.examples(
        "headrace group reset warehouse orders --to earliest",
        "headrace group reset warehouse orders --to 15m",
        "headrace group reset warehouse orders --to 2026-11-21T06:00",
    ),
)
@click.argument("group", metavar="GROUP")
@click.argument("topic", metavar="TOPIC")
@click.option(
    "--to",
    required=True,
    metavar="PLACE",
    help="earliest, latest, a time (2026-11-21T06:00) or an age (15m).",
)
@options.as_json
@options.nameserver
def reset(group: str, topic: str, to: str, nameserver: str | None, *, as_json: bool) -> None:
    """Move a group to another position in a topic; running members continue from there."""
    import trio

    from headrace.admin.client import Admin

    place = parse_place(to)
    if isinstance(place, int):
        raise ConfigurationError(f"--to {to}: each queue has its own offsets; give a time instead")

    async def run() -> dict[MessageQueue, int]:
        async with Admin(nameserver=nameserver) as admin:
            return await admin.reset_offsets(group, topic, place)

    rows = [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "queue_offset": offset,
        }
        for queue, offset in trio.run(run).items()
    ]
    print_rows(rows, as_json=as_json, empty=f"group {group} has no position in {topic}")
