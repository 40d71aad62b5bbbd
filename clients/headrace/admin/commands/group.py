"""``headrace group``: lists, describes, moves and deletes consumer groups."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, options
from headrace.admin.commands import dlq
from headrace.admin.failures import NotFound
from headrace.admin.output import (
    counted,
    print_json,
    print_record,
    print_rows,
    queue_columns,
    time_text,
    warned,
    with_problems,
)
from headrace.admin.points import parse_point
from headrace.admin.running import run_admin
from headrace.errors import ConfigurationError
from headrace_daemon.command import warn

if TYPE_CHECKING:
    from headrace.admin.client import Admin
    from headrace.admin.groups import QueueLag
    from headrace.admin.requests import BrokerProblem
    from headrace_protocol.bodies import MessageQueue

_WATCH_S = 2.0
_CLEAR = "\x1b[H\x1b[2J"


@options.group("group", "headrace group lag warehouse")
def command() -> None:
    """List, describe, move and delete consumer groups, and replay dead letters."""


command.add_command(dlq.command)


@command.subcommand("list", "headrace group list", "headrace group list --json")
@options.system
@options.answer
def list_groups(nameserver: str | None, *, system: bool, as_json: bool) -> None:
    """List the groups with their connected members and their lag over all topics."""

    async def run(admin: Admin) -> list[dict[str, Any]]:
        groups = await admin.groups(system=system, problems=problems)
        return [await _group_row(admin, group.group_name, problems) for group in groups]

    with warned() as problems:
        rows = with_problems(run_admin(run, nameserver), problems)
    print_rows(rows, as_json=as_json, empty="no groups yet; starting a consumer creates one")


async def _group_row(admin: Admin, group: str, problems: list[BrokerProblem]) -> dict[str, Any]:
    from headrace.admin.groups import member_ids

    members = await admin.members(group, problems=problems)
    lags = await admin.lag(group, problems=problems)
    return {
        "group": group,
        "members": len(member_ids(members)),
        "topics": sorted({lag.queue.topic for lag in lags if not lag.queue.topic.startswith("%")}),
        "lag": sum(lag.lag for lag in lags),
    }


@command.subcommand(
    "describe",
    "headrace group describe warehouse",
    "headrace group describe warehouse --json",
)
@click.argument("group", metavar="GROUP", shell_complete=completion.groups)
@options.answer
def describe(group: str, nameserver: str | None, *, as_json: bool) -> None:
    """Show a group's settings, members and topics, and the owner, lag and lock of each queue.

    The column alarm names queues that no member has pulled for 30 s although some are connected:
    nobody consumes their messages.
    """
    from headrace.admin.group_view import GroupView

    async def run(admin: Admin) -> dict[str, Any]:
        config = await admin.group(group, problems=problems)
        view = await GroupView.of(admin, group, problems)
        return {
            "group": group,
            "settings": {
                "consume_enabled": config.consume_enable,
                "retries_max": config.retry_max_times,
                "retry_queues": config.retry_queue_nums,
            },
            **view.rows(),
        }

    with warned() as problems:
        description = run_admin(run, nameserver)
    for conflict in description["conflicts"]:
        warn(conflict)
    if as_json:
        print_json(description)
        return
    counts = {name: description[name] for name in ("retries", "dead_letters")}
    print_record({"group": group, **description["settings"], **counts}, as_json=False)
    print_rows(description["members"], as_json=False, empty="no members are connected")
    print_rows(description["topics"], as_json=False, empty="it has read no topic")
    print_rows(description["queues"], as_json=False, empty="it has no queues")


@command.subcommand(
    "members",
    "headrace group members warehouse",
    "headrace group members warehouse --running",
    "headrace group members warehouse --running --json",
)
@click.argument("group", metavar="GROUP", shell_complete=completion.groups)
@click.option("--running", is_flag=True, help="Ask each member for its settings and queues.")
@options.answer
def members(group: str, nameserver: str | None, *, running: bool, as_json: bool) -> None:
    """List a group's connected members; with --running also what each reports about itself.

    A member reports its settings, its queues with their offsets and cached messages, and its
    subscriptions. Members of Java also report rates of each topic.
    """
    from headrace.admin.member_view import MemberView, connection_columns

    async def run(admin: Admin) -> dict[str, Any]:
        await admin.group(group, problems=problems)
        found = await admin.members(group, problems=problems)
        if running:
            return MemberView(await admin.member_reports(group, found)).rows()
        clients = {each.client_id: each for of in found.values() for each in of.connection_set}
        return {"members": [connection_columns(clients[name]) for name in sorted(clients)]}

    with warned() as problems:
        tables = run_admin(run, nameserver)
    empty = "no members are connected"
    if not running:
        print_rows(with_problems(tables["members"], problems), as_json=as_json, empty=empty)
    elif as_json:
        print_json(tables)
    else:
        print_rows(tables["members"], as_json=False, empty=empty)
        print_rows(tables["queues"], as_json=False, empty="no member has a queue")
        print_rows(tables["topics"], as_json=False, empty="no member has reported a topic")


@command.subcommand(
    "delete",
    "headrace group delete warehouse",
    "headrace group delete warehouse --yes",
)
@click.argument("group", metavar="GROUP", shell_complete=completion.groups)
@options.yes
@options.nameserver
def delete(group: str, nameserver: str | None, *, yes: bool) -> None:
    """Delete a group and its offsets.

    A group with connected members is not deleted: they would create it again.
    """
    options.confirm(f"delete group {group} and its offsets", yes=yes)
    run_admin(lambda admin: admin.delete_group(group), nameserver)


@command.subcommand(
    "lag",
    "headrace group lag warehouse",
    "headrace group lag warehouse --watch",
    "headrace group lag warehouse --topic orders --json",
)
@click.argument("group", metavar="GROUP", shell_complete=completion.groups)
@click.option("--topic", metavar="TOPIC", shell_complete=completion.topics, help="Only this topic.")
@click.option("--watch", is_flag=True, help="Show it again every 2 s, until Ctrl-C.")
@options.allow_partial
@options.answer
def lag(
    group: str,
    topic: str | None,
    nameserver: str | None,
    *,
    watch: bool,
    allow_partial: bool,
    as_json: bool,
) -> None:
    """Show a group's lag in each queue where it has a position, and in total."""
    import trio

    async def run(admin: Admin) -> None:
        while True:
            with warned() as problems:
                lags = await admin.lag(group, topic, problems=problems)
                if not lags:
                    await _check_known(admin, group, topic, problems)
                _print_lags(lags, problems, group, topic, as_json=as_json, clear=watch)
            if not watch:
                break
            await trio.sleep(_WATCH_S)
        if problems and not allow_partial:
            raise NotFound(f"the lag of group {group} is incomplete")

    run_admin(run, nameserver)


def _print_lags(
    lags: list[QueueLag],
    problems: list[BrokerProblem],
    group: str,
    topic: str | None,
    *,
    as_json: bool,
    clear: bool,
) -> None:
    if clear and sys.stdout.isatty():
        sys.stdout.write(_CLEAR)
    rows = with_problems([_lag_row(lag) for lag in lags], problems)
    where = f" in topic {topic}" if topic else ""
    print_rows(rows, as_json=as_json, empty=f"group {group} has committed nothing yet{where}")
    sys.stdout.flush()
    if lags and not as_json:
        total = sum(lag.lag for lag in lags)
        outs = [lag.out for lag in lags if lag.out is not None]
        more = f", {sum(outs)} of it taken out" if outs else ""
        sys.stderr.write(f"total lag {total} in {counted(len(lags), 'queue')}{more}\n")


async def _check_known(
    admin: Admin, group: str, topic: str | None, problems: list[BrokerProblem]
) -> None:
    """Raise GroupNotFound if the group does not exist, RouteNotFound if the topic does not."""
    await admin.group(group, problems=problems)
    if topic is not None:
        await admin.topic_stats(topic, problems=problems)


def _lag_row(lag: QueueLag) -> dict[str, Any]:
    return {
        **queue_columns(lag.queue),
        "committed_offset": lag.committed_offset,
        "max_offset": lag.max_offset,
        "lag": lag.lag,
        "out": lag.out,
        "last_consumed": time_text(lag.last_timestamp_ms),
    }


@command.subcommand(
    "reset",
    "headrace group reset warehouse orders --to earliest",
    "headrace group reset warehouse orders --to 15m",
    "headrace group reset warehouse orders --to 2026-11-21T06:00",
    "headrace group reset warehouse orders --queue 0 --to 4711",
)
@click.argument("group", metavar="GROUP", shell_complete=completion.groups)
@click.argument("topic", metavar="TOPIC", shell_complete=completion.topics)
@click.option(
    "--to",
    required=True,
    metavar="PLACE",
    help="earliest, latest, a time (2026-11-21T06:00), an age (15m), or an offset of a --queue.",
)
@click.option("--queue", type=click.IntRange(min=0), metavar="N", help="Only the queue N.")
@click.option("--broker", metavar="NAME", help="The broker of --queue, if several have one.")
@options.answer
def reset(
    group: str,
    topic: str,
    to: str,
    queue: int | None,
    broker: str | None,
    nameserver: str | None,
    *,
    as_json: bool,
) -> None:
    """Move a group to another position in a topic; running members continue from there."""
    point = parse_point(to)
    if queue is None and isinstance(point, int):
        raise ConfigurationError(
            f"--to {to}: each queue has its own offsets; add --queue, or give a time instead"
        )
    if queue is None and broker is not None:
        raise ConfigurationError("--broker requires --queue")

    async def run(admin: Admin) -> dict[MessageQueue, int]:
        if queue is None:
            assert not isinstance(point, int)
            return await admin.reset_offsets(group, topic, point)
        one = await _queue(admin, topic, queue, broker)
        if isinstance(point, int):
            return await admin.reset_queue(group, one, point)
        return await admin.reset_offsets(group, topic, point, queue=one)

    rows = [
        {**queue_columns(queue), "queue_offset": offset}
        for queue, offset in run_admin(run, nameserver).items()
    ]
    print_rows(rows, as_json=as_json, empty=f"group {group} has no position in {topic}")


async def _queue(admin: Admin, topic: str, queue_id: int, broker: str | None) -> MessageQueue:
    """The only queue of a topic with a number. Raises NotFound, ConfigurationError."""
    found = [
        queue
        for queue in await admin.topic_stats(topic)
        if queue.queue_id == queue_id and broker in {None, queue.broker_name}
    ]
    if not found:
        where = f" on broker {broker}" if broker else ""
        raise NotFound(f"topic {topic} has no queue {queue_id}{where}")
    if len(found) > 1:
        names = " and ".join(queue.broker_name for queue in found)
        raise ConfigurationError(f"{names} each have a queue {queue_id} of {topic}; add --broker")
    return found[0]


@command.subcommand(
    "clone",
    "headrace group clone warehouse auditors",
    "headrace group clone warehouse auditors --topic orders",
)
@click.argument("source", metavar="FROM", shell_complete=completion.groups)
@click.argument("target", metavar="TO", shell_complete=completion.groups)
@click.option("--topic", metavar="TOPIC", shell_complete=completion.topics, help="Only this topic.")
@options.answer
def clone(
    source: str, target: str, topic: str | None, nameserver: str | None, *, as_json: bool
) -> None:
    """Move group TO to the position of group FROM; a missing group TO is created.

    Running members of TO continue from there. Prints the positions of TO.
    """

    async def run(admin: Admin) -> list[QueueLag]:
        with warned() as problems:
            await _check_known(admin, source, topic, problems)
        await admin.clone_offsets(source, target, topic)
        return await admin.lag(target, topic)

    rows = [_lag_row(lag) for lag in run_admin(run, nameserver)]
    print_rows(rows, as_json=as_json, empty=f"group {source} has committed nothing yet")
