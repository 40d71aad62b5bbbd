"""``headrace topic``: creates, lists, describes, alters, purges and deletes topics."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, copy_commands, filter_command, options, static_commands
from headrace.admin.failures import NotFound
from headrace.admin.output import (
    print_json,
    print_record,
    print_rows,
    time_text,
    warned,
    warned_if,
    with_problems,
)
from headrace.admin.running import run_admin
from headrace.errors import ConfigurationError, RouteNotFound
from headrace_daemon.command import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.admin.client import Admin
    from headrace.admin.requests import BrokerProblem
    from headrace.admin.shrink import Unread
    from headrace.admin.topics import TopicTotals
    from headrace_protocol.bodies import (
        CompactedTopicState,
        TopicConfigAndQueueMapping,
        TopicOffset,
    )

_CHECK_S = 1.0
_COMPACTED_S = 0.2
_PERMS = {"r": 4, "w": 2, "rw": 6}

_attribute = click.option(
    "--attribute",
    multiple=True,
    metavar="NAME=VALUE",
    help="Attribute to set, e.g. message.type=FIFO; may be repeated.",
)
_broker = click.option("--broker", metavar="BROKER", help="Only on the broker with this name.")


def _perm(default: str | None) -> Callable[[options.Decorated], options.Decorated]:
    return click.option(
        "--perm",
        type=click.Choice(list(_PERMS)),
        default=default,
        show_default=True,
        metavar="PERM",
        help="Permission: rw, r or w.",
    )


@options.group("topic", "headrace topic create orders --queues 8")
def command() -> None:
    """Create, list, describe, alter, purge and delete topics."""


for _more in (
    copy_commands.copy,
    copy_commands.export,
    copy_commands.import_,
    filter_command.filter_check,
    static_commands.remap,
    static_commands.rebalance,
    static_commands.repair,
    static_commands.mapping,
):
    command.add_command(_more)


@command.subcommand(
    "create",
    "headrace topic create orders --queues 8",
    "headrace topic create steps --attribute message.type=FIFO --if-not-exists",
    "headrace topic create clicks --static --queues 16",
    "headrace topic create users --compacted --attribute key.queue=headrace",
    "headrace topic create prices --static --queues 8 --compacted",
)
@click.argument("name", metavar="TOPIC")
@click.option(
    "--queues",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="QUEUES",
    help="Number of queues on each broker; of a static topic, on all brokers together.",
)
@click.option(
    "--static",
    is_flag=True,
    help="Create a static topic, whose queues stay the same while brokers come and go, or add "
    "queues to it.",
)
@click.option(
    "--compacted",
    is_flag=True,
    help="Keep the newest message of each key for ever, instead of all messages for some days. On "
    "several brokers the topic becomes a static one.",
)
@_perm("rw")
@_attribute
@click.option(
    "--broker",
    metavar="BROKER",
    help="Only on the broker with this name; of a static topic, on those named, as A,B,C.",
)
@click.option("--cluster", metavar="CLUSTER", help="Static topic: on the brokers of a cluster.")
@click.option(
    "--force",
    is_flag=True,
    help="Add queues also to a compacted static topic, whose keys then go to other queues while "
    "their old values stay.",
)
@static_commands.dry_run
@click.option(
    "--if-not-exists", is_flag=True, help="Succeed if the topic already exists with these settings."
)
@options.answer
def create(
    name: str,
    queues: int,
    perm: str,
    attribute: tuple[str, ...],
    broker: str | None,
    cluster: str | None,
    nameserver: str | None,
    *,
    static: bool,
    compacted: bool,
    force: bool,
    dry_run: bool,
    if_not_exists: bool,
    as_json: bool,
) -> None:
    """Create a topic."""
    from headrace.admin.client import Admin
    from headrace.admin.statictopic import UnchangedTopic, is_compacted

    attributes = _attributes(attribute, compacted=compacted)
    if static and if_not_exists:
        raise ConfigurationError("--static can't be combined with --if-not-exists")
    needs_static = (
        not (static or broker)
        and is_compacted(attributes)
        and run_admin(lambda admin: admin.becomes_static(name), nameserver)
    )
    if static or needs_static:
        _check_static(name, queues, perm, is_implied=needs_static)
        change = partial(
            Admin.create_static_topic,
            topic=name,
            queues=queues,
            attributes=attributes,
            brokers=static_commands.names(broker),
            cluster=cluster,
            force=force,
            dry_run=dry_run,
        )
        with suppress(*[UnchangedTopic] if if_not_exists else []):
            created = run_admin(change, nameserver)
            static_commands.print_changes([created], as_json=as_json, dry_run=dry_run)
        return
    if cluster or dry_run or force:
        raise ConfigurationError("--cluster, --dry-run and --force require --static")
    plain = partial(
        Admin.create_topic,
        topic=name,
        queues=queues,
        perm=_PERMS[perm],
        attributes=attributes,
        broker=broker,
        if_not_exists=if_not_exists,
    )
    run_admin(plain, nameserver)
    print_record({"topic": name, "queues": queues, "perm": perm}, as_json=as_json)


def _check_static(name: str, queues: int, perm: str, *, is_implied: bool) -> None:
    """Raise ConfigurationError for --perm, and warn if the topic is static without --static."""
    if perm != "rw":
        raise ConfigurationError(
            "--static can't be combined with --perm; `headrace topic alter` changes it"
        )
    if is_implied:
        warn(
            f"{name} is a static topic, with {queues} queues on all brokers together: its keys "
            "keep their queues while brokers come and go; --broker creates it on a single one"
        )


def _attributes(texts: Sequence[str], *, compacted: bool) -> dict[str, str]:
    """The attributes of a topic that is created. Raises ConfigurationError."""
    attributes = options.pairs(texts, "attribute")
    if compacted and attributes.setdefault("cleanup.policy", "COMPACTION") != "COMPACTION":
        raise ConfigurationError(
            f"--compacted contradicts cleanup.policy={attributes['cleanup.policy']}: leave one of "
            "them out"
        )
    return attributes


@command.subcommand(
    "alter",
    "headrace topic alter orders --queues 16",
    "headrace topic alter orders --queues 4 --shrink",
    "headrace topic alter orders --perm r",
)
@click.argument("name", metavar="TOPIC", shell_complete=completion.topics)
@click.option(
    "--queues",
    type=click.IntRange(min=1),
    metavar="QUEUES",
    help="Number of queues on each broker.",
)
@click.option(
    "--shrink",
    is_flag=True,
    help="Stop writing to the queues that are to go, wait until they are consumed, then remove "
    "them.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Change the number of queues also of a compacted topic, whose keys then go to other "
    "queues while their old values stay.",
)
@_perm(None)
@_attribute
@_broker
@options.answer
def alter(
    name: str,
    queues: int | None,
    perm: str | None,
    attribute: tuple[str, ...],
    broker: str | None,
    nameserver: str | None,
    *,
    shrink: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Change a topic; what is not named stays as it is.

    Fewer queues: the command refuses to remove queues with messages that a group has not consumed.
    With --shrink it waits for the groups; if interrupted, it continues when run again.
    """
    attributes = options.pairs(attribute, "attribute")
    if queues is None and perm is None and not attributes:
        raise ConfigurationError("nothing to change: name --queues, --perm or --attribute")
    if shrink and queues is None:
        raise ConfigurationError("--shrink requires --queues")

    async def run(admin: Admin) -> list[dict[str, Any]]:
        if broker is None:
            await admin.require_everywhere(name, "altered")
        if perm or attributes:
            await admin.alter_topic(
                name,
                perm=_PERMS[perm] if perm else None,
                attributes=attributes,
                broker=broker,
            )
        if queues is not None:
            await _set_queues(admin, name, queues, broker, shrink=shrink, force=force)
        configs = await admin.topic(name, problems=None if broker is None else [])
        return [_broker_row(each, config) for each, config in configs.items()]

    print_rows(run_admin(run, nameserver), as_json=as_json, empty="on no broker")


async def _set_queues(
    admin: Admin, topic: str, queues: int, broker: str | None, *, shrink: bool, force: bool
) -> None:
    """Set the number of queues; the read queues last, if they become fewer."""
    import trio

    from headrace.admin.shrink import UnreadMessages, unread_from

    async def left() -> list[Unread]:
        return await unread_from(admin, topic, await admin.topic_stats(topic), queues, broker)

    configs = await admin.topic(topic, problems=None if broker is None else [])
    changed = {name: each for name, each in configs.items() if broker in {None, name}}
    is_smaller = any(config.read_queue_nums > queues for config in changed.values())
    if is_smaller and not shrink and (unread := await left()):
        remedy = (
            "add --shrink to stop writing to these queues and remove them once they are consumed, "
            f"or discard the messages with `headrace topic purge {topic}`"
        )
        raise UnreadMessages(topic, unread, remedy)
    for name, config in changed.items():
        reads = max(queues, config.read_queue_nums)
        await admin.alter_topic(topic, queues=queues, read_queues=reads, broker=name, force=force)
    if any(config.write_queue_nums != queues for config in changed.values()):
        warn(
            "from now on keys go to other queues: a key's messages from before and after this "
            "change may be consumed in any order"
        )
    if not is_smaller:
        return
    reported = ""
    while unread := await left():
        if str(unread[0]) != reported:
            reported = str(unread[0])
            warn(f"waiting: {reported}")
        await trio.sleep(_CHECK_S)
    for warning in await admin.alter_topic(topic, read_queues=queues, broker=broker):
        warn(warning)


@command.subcommand("list", "headrace topic list", "headrace topic list --json")
@options.system
@options.answer
def list_topics(nameserver: str | None, *, system: bool, as_json: bool) -> None:
    """List the topics with their queues, messages, bytes and last time."""
    with warned() as problems:
        found = run_admin(
            lambda admin: admin.topic_totals(system=system, problems=problems), nameserver
        )
    rows = [_totals_row(totals) for totals in found]
    print_rows(
        rows, as_json=as_json, empty="no topics yet; create one with `headrace topic create TOPIC`"
    )


def _totals_row(totals: TopicTotals) -> dict[str, Any]:
    return {
        "topic": totals.topic,
        "queues": totals.queues,
        "messages": totals.messages,
        "bytes": totals.record_bytes,
        "last_message": time_text(totals.last_timestamp_ms),
    }


@command.subcommand(
    "describe",
    "headrace topic describe orders",
    "headrace topic describe orders --json",
)
@click.argument("name", metavar="TOPIC", shell_complete=completion.topics)
@options.allow_partial
@options.answer
def describe(name: str, nameserver: str | None, *, allow_partial: bool, as_json: bool) -> None:
    """Show a topic's brokers, the offsets of its queues and the groups that read it."""
    from headrace.admin.statictopic import is_compacted

    async def run(admin: Admin) -> dict[str, Any]:
        configs = await admin.topic(name, problems=problems)
        queues = await _queue_rows(admin, name, problems)
        groups = await admin.topic_groups(name, problems=problems)
        brokers = [_broker_row(broker, config) for broker, config in configs.items()]
        description = {
            "topic": name,
            "static": await admin.is_static(name),
            "brokers": with_problems(brokers, problems),
            "queues": queues,
            "groups": groups,
        }
        if any(is_compacted(config.attributes) for config in configs.values()):
            states = await admin.compact_topic(name, start=False, problems=problems)
            description["compaction"] = _compaction_rows(states)
        return description

    with warned_if(allow_partial) as problems:
        description = run_admin(run, nameserver)
    if as_json:
        print_json(description)
        return
    if description["static"]:
        sys.stderr.write(
            f"{name} is a static topic: see `headrace topic mapping {name}` for its brokers\n"
        )
    print_rows(description["brokers"], as_json=False, empty="on no broker")
    print_rows(description["queues"], as_json=False, empty="no queues")
    if "compaction" in description:
        print_rows(description["compaction"], as_json=False, empty="no queue has messages yet")
    print_rows(
        [{"group": group} for group in description["groups"]],
        as_json=False,
        empty="no group has read it",
    )
    for broker in description["brokers"]:
        if "problem" not in broker and broker["write_queues"] > broker["read_queues"]:
            warn(
                f"{broker['broker']} has {broker['write_queues']} write queues but only "
                f"{broker['read_queues']} read queues: messages in the others are not consumed"
            )


@command.subcommand(
    "delete",
    "headrace topic delete orders",
    "headrace topic delete orders --yes",
)
@click.argument("name", metavar="TOPIC", shell_complete=completion.topics)
@options.yes
@options.nameserver
def delete(name: str, nameserver: str | None, *, yes: bool) -> None:
    """Delete a topic and all its messages."""
    options.confirm(f"delete topic {name} and all its messages", yes=yes)

    async def run(admin: Admin) -> None:
        try:
            await admin.delete_topic(name)
        except RouteNotFound as error:
            if await admin.departed_brokers():  # the error tells whether they have it
                raise
            raise NotFound(f"topic {name} does not exist; see `headrace topic list`") from error

    run_admin(run, nameserver)


@command.subcommand(
    "compact",
    "headrace topic compact users",
    "headrace topic compact users --json",
)
@click.argument("name", metavar="TOPIC", shell_complete=completion.topics)
@options.answer
def compact(name: str, nameserver: str | None, *, as_json: bool) -> None:
    """Compact a topic now, and show what that did.

    Brokers compact topics by themselves; this needs no waiting for it.
    """
    import trio

    async def run(admin: Admin) -> list[dict[str, Any]]:
        states = await admin.compact_topic(name, problems=problems)
        while any(state.is_running for state in states.values()):
            await trio.sleep(_COMPACTED_S)
            states = await admin.compact_topic(name, start=False, problems=problems)
        return _compaction_rows(states)

    with warned() as problems:
        rows = run_admin(run, nameserver)
    print_rows(rows, as_json=as_json, empty="no queue has messages yet")


@command.subcommand(
    "rebuild",
    "headrace topic rebuild users --from 10.0.0.7:10911",
    "headrace topic rebuild users --from 10.0.0.7:10911 --broker broker-b",
)
@click.argument("name", metavar="TOPIC", shell_complete=completion.topics)
@click.option(
    "--from", "source", metavar="HOST:PORT", required=True, help="Broker that has the messages."
)
@click.option("--broker", metavar="NAME", help="Broker to rebuild, if several have the topic.")
@options.answer
def rebuild(
    name: str, source: str, broker: str | None, nameserver: str | None, *, as_json: bool
) -> None:
    """Pull the older messages of a compacted topic from another broker.

    For a broker that has lost them, and still has the newer ones at the same offsets.
    """
    import trio

    from headrace.errors import HeadraceError

    async def run(admin: Admin) -> dict[str, CompactedTopicState]:
        states = await admin.rebuild_topic(name, source, broker=broker)
        while any(state.is_rebuilding for state in states.values()):
            await trio.sleep(_COMPACTED_S)
            states = await admin.rebuild_topic(name, source, broker=broker, start=False)
        return states

    states = run_admin(run, nameserver)
    for state in states.values():
        if state.rebuild_problem:
            raise HeadraceError(state.rebuild_problem)
    print_rows(_compaction_rows(states), as_json=as_json, empty="no queue has messages yet")


def _compaction_rows(states: Mapping[str, CompactedTopicState]) -> list[dict[str, Any]]:
    return [
        {
            "broker": broker,
            "queue": queue.queue_id,
            "messages": queue.messages,
            "bytes": queue.bytes,
            "dirty_bytes": queue.dirty_bytes,
            "last_run": time_text(queue.last_run_ms),
            "bytes_before": queue.bytes_before,
            "bytes_after": queue.bytes_after,
            "kept": queue.kept,
            "dropped": queue.dropped,
        }
        for broker, state in states.items()
        for queue in state.queues
    ]


@command.subcommand(
    "purge",
    "headrace topic purge orders",
    "headrace topic purge orders --yes",
)
@click.argument("name", metavar="TOPIC", shell_complete=completion.topics)
@options.yes
@options.nameserver
def purge(name: str, nameserver: str | None, *, yes: bool) -> None:
    """Delete a topic's messages, and keep the topic.

    The offsets of its groups are deleted too: they start with the next message.
    """
    options.confirm(f"delete all messages of topic {name}", yes=yes)
    run_admin(lambda admin: admin.purge_topic(name), nameserver)


def _broker_row(broker: str, config: TopicConfigAndQueueMapping) -> dict[str, Any]:
    from headrace.admin.topics import perm_text

    return {
        "broker": broker,
        "write_queues": config.write_queue_nums,
        "read_queues": config.read_queue_nums,
        "perm": perm_text(config.perm),
        "attributes": config.attributes,
    }


async def _queue_rows(
    admin: Admin, topic: str, problems: list[BrokerProblem] | None
) -> list[dict[str, Any]]:
    """A topic's queues; those of a static topic with their leaders."""
    if await admin.is_static(topic):
        return [
            _queue_row(each.leader, each.queue.queue_id, each.offsets, each.messages)
            for each in await admin.logic_queues(topic, problems=problems)
        ]
    stats = await admin.topic_stats(topic, problems=problems)
    return [
        _queue_row(queue.broker_name, queue.queue_id, at, at.message_count)
        for queue, at in stats.items()
    ]


def _queue_row(broker: str, queue_id: int, at: TopicOffset, messages: int) -> dict[str, Any]:
    return {
        "broker": broker,
        "queue": queue_id,
        "min_offset": at.min_offset,
        "max_offset": at.max_offset,
        "messages": messages,
        "last_message": time_text(at.last_update_timestamp),
    }
