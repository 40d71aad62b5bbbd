"""``headrace topic``: creates, lists, describes and deletes topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.admin import options
from headrace.admin.failures import NotFound
from headrace.admin.output import (
    print_json,
    print_record,
    print_rows,
    time_text,
    warned,
    with_problems,
)
from headrace.errors import ConfigurationError
from headrace_daemon.command import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_protocol.bodies import MessageQueue, TopicConfigAndQueueMapping, TopicOffset

_PERMS = {"r": 4, "w": 2, "rw": 6}

_attribute = click.option(
    "--attribute",
    multiple=True,
    metavar="KEY=VALUE",
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


@click.group("topic", epilog=options.examples("headrace topic create orders --queues 8"))
def command() -> None:
    """Create, list, describe and delete topics."""


@command.command(
    "create",
    epilog=options.examples(
        "headrace topic create orders --queues 8",
        "headrace topic create steps --attribute message.type=FIFO",
    ),
)
@click.argument("name", metavar="TOPIC")
@click.option(
    "--queues",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="QUEUES",
    help="Number of queues on each broker.",
)
@_perm("rw")
@_attribute
@_broker
@options.as_json
@options.nameserver
def create(
    name: str,
    queues: int,
    perm: str,
    attribute: tuple[str, ...],
    broker: str | None,
    nameserver: str | None,
    *,
    as_json: bool,
) -> None:
    """Create a topic, or change an existing one."""
    import trio

    from headrace.admin.client import Admin

    attributes = _attributes(attribute)

    async def run() -> None:
        async with Admin(nameserver=nameserver) as admin:
            await admin.create_topic(
                name, queues=queues, perm=_PERMS[perm], attributes=attributes, broker=broker
            )

    trio.run(run)
    print_record({"topic": name, "queues": queues, "perm": perm}, as_json=as_json)


@command.command(
    "list", epilog=options.examples("headrace topic list", "headrace topic list --json")
)
@options.system
@options.as_json
@options.nameserver
def list_topics(nameserver: str | None, *, system: bool, as_json: bool) -> None:
    """List the topics that the nameserver knows."""
    import trio

    from headrace.admin.client import Admin

    async def run() -> list[str]:
        async with Admin(nameserver=nameserver) as admin:
            return await admin.topics(system=system)

    rows = [{"topic": name} for name in trio.run(run)]
    print_rows(
        rows, as_json=as_json, empty="no topics yet; create one with `headrace topic create NAME`"
    )


@command.command(
    "describe",
    epilog=options.examples(
        "headrace topic describe orders", "headrace topic describe orders --json"
    ),
)
@click.argument("name", metavar="TOPIC")
@options.as_json
@options.nameserver
def describe(name: str, nameserver: str | None, *, as_json: bool) -> None:
    """Show a topic's brokers, the offsets of its queues and the groups that read it."""
    import trio

    from headrace.admin.client import Admin

    async def run() -> dict[str, Any]:
        async with Admin(nameserver=nameserver) as admin:
            configs = await admin.topic(name, problems=problems)
            stats = await admin.topic_stats(name, problems=problems)
            groups = await admin.topic_groups(name, problems=problems)
            brokers = [_broker_row(broker, config) for broker, config in configs.items()]
            return {
                "topic": name,
                "brokers": with_problems(brokers, problems),
                "queues": [_queue_row(queue, offset) for queue, offset in stats.items()],
                "groups": groups,
            }

    with warned() as problems:
        description = trio.run(run)
    if as_json:
        print_json(description)
        return
    print_rows(description["brokers"], as_json=False, empty="on no broker")
    print_rows(description["queues"], as_json=False, empty="no queues")
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


@command.command(
    "delete",
    epilog=options.examples("headrace topic delete orders", "headrace topic delete orders --yes"),
)
@click.argument("name", metavar="TOPIC")
@options.yes
@options.nameserver
def delete(name: str, nameserver: str | None, *, yes: bool) -> None:
    """Delete a topic and all its messages."""
    import trio

    from headrace.admin.client import Admin

    if not yes:
        options.confirm(f"delete topic {name} and all its messages")

    async def run() -> None:
        async with Admin(nameserver=nameserver) as admin:
            if name not in await admin.topics(system=True):
                raise NotFound(f"topic {name} does not exist; see `headrace topic list`")
            await admin.delete_topic(name)

    trio.run(run)


def _attributes(pairs: Sequence[str]) -> dict[str, str]:
    attributes = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ConfigurationError(f"attribute {pair!r}: write KEY=VALUE")
        attributes[key] = value
    return attributes


def _broker_row(broker: str, config: TopicConfigAndQueueMapping) -> dict[str, Any]:
    return {
        "broker": broker,
        "write_queues": config.write_queue_nums,
        "read_queues": config.read_queue_nums,
        "perm": "".join(letter for letter in "rw" if config.perm & _PERMS[letter]) or "none",
        "attributes": config.attributes,
    }


def _queue_row(queue: MessageQueue, offset: TopicOffset) -> dict[str, Any]:
    return {
        "broker": queue.broker_name,
        "queue": queue.queue_id,
        "min_offset": offset.min_offset,
        "max_offset": offset.max_offset,
        "messages": offset.max_offset - offset.min_offset,
        "last_message": time_text(offset.last_update_timestamp),
    }
