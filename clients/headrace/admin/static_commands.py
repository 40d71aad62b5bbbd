"""Commands of ``headrace topic`` for static topics: remap, rebalance, repair and mapping."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, options
from headrace.admin.failures import NotFound
from headrace.admin.output import print_json, print_rows, time_text, warned, with_problems
from headrace.admin.running import run_admin
from headrace_daemon.command import warn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from headrace.admin.chains import QueuePart
    from headrace.admin.client import Admin
    from headrace.admin.statictopic import Change
    from headrace_protocol.statictopic.mapping import MappingItem


_topic = click.argument("name", metavar="TOPIC", shell_complete=completion.topics)
dry_run = click.option(
    "--dry-run", is_flag=True, help="Show the leaders before and after the change, and change none."
)


def names(text: str | None) -> list[str]:
    """Names from an option, separated by commas."""
    return [name for name in (text or "").split(",") if name]


@options.command(
    "remap",
    "headrace topic remap orders --to broker-b,broker-c",
    "headrace topic remap orders --to broker-b --queue 3 --dry-run",
)
@_topic
@click.option("--to", required=True, metavar="BROKER[,...]", help="Brokers that lead from now on.")
@click.option(
    "--queue", "queues", type=click.IntRange(min=0), multiple=True, metavar="QUEUE",
    help="Move only this queue; may be repeated.",
)  # fmt: skip
@click.option(
    "--mode",
    type=click.Choice(["strict", "available"]),
    default="strict",
    show_default=True,
    metavar="MODE",
    help="strict: no gap in the offsets, and sends wait for a moment. available: as Apache's "
    "mqadmin does it; offsets jump to a multiple of 10000.",
)
@dry_run
@options.answer
def remap(
    name: str,
    to: str,
    queues: tuple[int, ...],
    mode: str,
    nameserver: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Move queues of a static topic to other brokers.

    The messages stay where they are, and are read from there; new ones go to the new leaders.
    Without --queue, no other broker than those named with --to leads a queue afterwards.
    """
    from headrace_protocol.statictopic.plans import Mode

    changes = _run_one(
        lambda admin: admin.remap_static_topic(
            name, names(to), queues=queues or None, mode=Mode(mode), dry_run=dry_run
        ),
        nameserver,
    )
    print_changes(changes, as_json=as_json, dry_run=dry_run)


@options.command(
    "rebalance",
    "headrace topic rebalance orders --dry-run",
    "headrace topic rebalance",
)
@click.argument("name", metavar="[TOPIC]", required=False, shell_complete=completion.topics)
@dry_run
@options.answer
def rebalance(name: str | None, nameserver: str | None, *, dry_run: bool, as_json: bool) -> None:
    """Spread the queues of a static topic, or of all, over all brokers.

    It moves the fewest queues after which no broker leads more than one queue more than another.
    """
    from headrace.admin.statictopic import UnchangedTopic

    async def changes(admin: Admin) -> list[Change]:
        done = []
        for topic in [name] if name else await admin.static_topics():
            with suppress(UnchangedTopic):
                done.append(await admin.rebalance_static_topic(topic, dry_run=dry_run))
        return done

    print_changes(run_admin(changes, nameserver), as_json=as_json, dry_run=dry_run)


@options.command(
    "repair",
    "headrace topic repair orders --dry-run",
    "headrace topic repair orders --forget-broker broker-b",
)
@_topic
@click.option(
    "--forget-broker",
    "forget",
    multiple=True,
    metavar="BROKER",
    help="Give up the messages of a broker that won't come back; may be repeated.",
)
@dry_run
@options.answer
def repair(
    name: str, forget: tuple[str, ...], nameserver: str | None, *, dry_run: bool, as_json: bool
) -> None:
    """Finish a change of a static topic that ended in the middle.

    It also restores the mapping of a broker that has lost it, from the copy of another one.
    """
    changes = _run_one(
        lambda admin: admin.repair_static_topic(name, forget=forget, dry_run=dry_run), nameserver
    )
    print_changes(changes, as_json=as_json, dry_run=dry_run, empty=f"topic {name} is whole")


@options.command(
    "mapping",
    "headrace topic mapping orders",
    "headrace topic mapping orders --json",
)
@_topic
@options.answer
def mapping(name: str, nameserver: str | None, *, as_json: bool) -> None:
    """Show the physical queues behind each queue of a static topic, oldest first.

    The last one of each queue is its leader, which gets all new messages.
    """
    with warned() as problems:
        parts = run_admin(lambda admin: admin.queue_parts(name, problems=problems), nameserver)
    rows = [_part_row(part) for part in parts]
    if not rows and not problems:
        raise NotFound(
            f"topic {name} is not a static topic; `headrace topic describe {name}` shows its queues"
        )
    print_rows(with_problems(rows, problems), as_json=as_json, empty="no broker leads a queue")


def _part_row(part: QueuePart) -> dict[str, Any]:
    item, extent = part.item, part.extent
    return {
        "queue": part.queue,
        "gen": item.gen,
        "broker": item.bname,
        "physical_queue": item.queue_id,
        "leader": part.is_leader,
        "min_offset": extent and extent.min_offset,
        "max_offset": extent and extent.max_offset,
        "messages": extent and extent.messages,
        "led_from": time_text(item.time_of_start),
        "led_until": time_text(item.time_of_end),
    }


# -- changes ---------------------------------------------------------------------------------------


def _run_one(change: Callable[[Admin], Awaitable[Change]], nameserver: str | None) -> list[Change]:
    """The change; none if the topic is as wanted already."""
    from headrace.admin.statictopic import UnchangedTopic

    try:
        return [run_admin(change, nameserver)]
    except UnchangedTopic:
        return []


def print_changes(
    changes: Sequence[Change], *, as_json: bool, dry_run: bool, empty: str = "nothing to change"
) -> None:
    """Print the leaders before and after changes, and what they give up."""
    rows = [row for change in changes for row in _leader_rows(change)]
    if as_json:
        print_json([_change_record(change) for change in changes])
    else:
        print_rows(rows, as_json=False, empty=empty)
    for change in changes:
        for gone in change.plan.gone:
            until = "on" if gone.end is None else f"to {gone.end - 1}"
            where = f" with broker {gone.broker}" if gone.broker else ""
            verb = "would be" if dry_run else "are"
            warn(
                f"the messages of topic {change.plan.topic}, queue {gone.queue}, from offset "
                f"{gone.start} {until} {verb} gone{where}"
            )


def _change_record(change: Change) -> dict[str, Any]:
    return {
        "topic": change.plan.topic,
        "epoch": change.plan.epoch,
        "leaders": _leader_rows(change),
        "before": change.before,
        "after": change.after,
    }


def _leader_rows(change: Change) -> list[dict[str, Any]]:
    """The queues that get another leader."""
    rows = []
    for queue, (old, new) in change.leaders().items():
        if old is None or (old.bname, old.queue_id) != (new.bname, new.queue_id):
            rows.append(
                {
                    "topic": change.plan.topic,
                    "queue": queue,
                    "before": _queue_text(old),
                    "after": _queue_text(new),
                    "from_offset": None if new.logic_offset < 0 else new.logic_offset,
                }
            )
    return rows


def _queue_text(item: MappingItem | None) -> str | None:
    """A physical queue as broker/queue."""
    return f"{item.bname}/{item.queue_id}" if item else None
