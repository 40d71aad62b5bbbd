"""``headrace tier``: shows what is in tiered storage, and what is not yet; repairs and moves it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, options
from headrace.admin.failures import CommandFailed
from headrace.admin.output import (
    counted,
    print_findings,
    print_json,
    print_record,
    print_rows,
    warned,
    with_problems,
)
from headrace.admin.running import run_admin
from headrace.errors import ConfigurationError
from headrace.values import now_ms
from headrace_daemon.command import FAILED, warn

if TYPE_CHECKING:
    from headrace.admin.client import Admin
    from headrace_broker.config import BrokerConfig
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.container.stored_tier import StoredTier
    from headrace_protocol.tier_bodies import TierQueueStatus, TierStatus


@options.group("tier", "headrace tier status")
def command() -> None:
    """Show, check, repair and move tiered storage."""


_config = click.option(
    "--config",
    "-c",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The broker's config file.",
)


@command.subcommand(
    "status",
    "headrace tier status",
    "headrace tier status --topic Orders",
    "headrace tier status --max 1000 --json",
)
@click.option("--topic", metavar="TOPIC", shell_complete=completion.topics, help="Only this topic.")
@options.max_count("queues of each broker")
@options.answer
def status(topic: str | None, count: int, nameserver: str | None, *, as_json: bool) -> None:
    """List the queues of tiered topics, those furthest behind first.

    Ranges are queue offsets, the end not included. Behind is what is still to be uploaded: the log
    keeps it. Warns of brokers whose tier fails.
    """
    with warned() as problems:
        # One more tells whether there are more.
        tiers = run_admin(
            lambda admin: admin.tier_status(topic, max_count=count + 1, problems=problems),
            nameserver,
        )
    if more := [broker for broker, tier in tiers.items() if len(tier.queues) > count]:
        warn(
            f"{', '.join(more)}: only the {count} queues that are furthest behind are listed; more "
            "with a larger --max"
        )
    found = [(broker, queue) for broker, tier in tiers.items() for queue in tier.queues[:count]]
    found.sort(key=lambda pair: -pair[1].behind_messages)
    if as_json:
        failed = [{"broker": each.broker_name, "problem": str(each)} for each in problems]
        brokers = [*(_broker_row(broker, tier) for broker, tier in tiers.items()), *failed]
        print_json({"brokers": brokers, "queues": [_json_row(*pair) for pair in found]})
        return
    for broker, tier in tiers.items():
        _warn(broker, tier)
    rows = with_problems([_row(*pair) for pair in found], problems)
    print_rows(rows, as_json=False, empty="no tiered topic has messages")


@command.subcommand(
    "resume",
    "headrace tier resume",
    "headrace tier resume --topic Orders",
)
@click.option("--topic", metavar="TOPIC", shell_complete=completion.topics, help="Only this topic.")
@options.answer
def resume(topic: str | None, nameserver: str | None, *, as_json: bool) -> None:
    """Try all uploads at once, also of queues that were given up.

    After an outage uploads resume by themselves, within a minute. A queue is given up if its files
    are damaged; it is looked at again as by a restart. Lists the queues that were given up.
    """
    with warned() as problems:
        tiers = run_admin(lambda admin: admin.tier_resume(topic, problems=problems), nameserver)
    rows = [
        {
            "topic": queue.topic,
            "queue": queue.queue_id,
            "broker": broker,
            "problem": queue.problem,
        }
        for broker, tier in tiers.items()
        for queue in tier.queues
    ]
    print_rows(with_problems(rows, problems), as_json=as_json, empty="no queue was given up")


@command.subcommand(
    "forget",
    "headrace tier forget Orders --queue 0 --broker broker-a",
    "headrace tier forget Orders --queue 0 --broker broker-a --yes",
    "headrace tier forget Orders --queue 0 --broker broker-a --all --yes",
)
@click.argument("topic", shell_complete=completion.topics)
@click.option("--queue", "queue_id", type=int, required=True, metavar="N", help="Queue id.")
@click.option("--broker", required=True, metavar="NAME", help="The broker that has the queue.")
@click.option("--all", "everything", is_flag=True, help="Also what log and tier share.")
@click.option("--yes", is_flag=True, help="Do it.")
@options.nameserver
def forget(
    topic: str, queue_id: int, broker: str, nameserver: str | None, *, everything: bool, yes: bool
) -> None:
    """Drop what the tier has of a queue that is given up, and upload the queue anew.

    Of a queue whose tier has other messages than the log, those from the first other one on are
    dropped; with --all, and of a damaged queue, all of them. What the log does not have is lost.
    """

    async def run(admin: Admin) -> str:
        tier = (await admin.tier_status(topic))[broker]
        queue = next((each for each in tier.queues if each.queue_id == queue_id), None)
        if queue is None or not queue.problem:
            raise CommandFailed(f"queue {topic}/{queue_id} of {broker} is not given up")
        begin = 0 if everything else queue.foreign_from or 0
        if yes:
            await admin.tier_forget(topic, queue_id, broker=broker, from_offset=begin)
        return f"queue offsets {max(begin, queue.tier_min or 0)} to {queue.tier_end or 0}"

    which = run_admin(run, nameserver)
    sys.stderr.write(
        f"the tier drops {which}\n" if yes else f"nothing was dropped: --yes drops {which}\n"
    )


def _warn(broker: str, tier: TierStatus) -> None:
    if tier.place_problem:
        warn(f"{broker}: {tier.place_problem}")
    if tier.upload_problem_seconds:
        seconds = round(tier.upload_problem_seconds)
        warn(f"{broker}: uploads have failed for {seconds} s, retrying: {tier.upload_problem}")
    if tier.given_up_count:
        queues = counted(tier.given_up_count, "queue")
        warn(
            f"{broker}: uploads of {queues} are given up, so the log fills: see the column "
            "problem, then headrace tier resume or forget"
        )
    if tier.read_problem:
        paused = ", reads are rejected at once" if tier.is_read_paused else ""
        warn(f"{broker}: reads of the tier fail{paused}: {tier.read_problem}")
    if not tier.is_open:
        warn(f"{broker}: the tier has not been reached since the start")
    if tier.queue_count > len(tier.queues):
        warn(f"{broker}: {len(tier.queues)} of {tier.queue_count} queues, see --max")


def _broker_row(broker: str, tier: TierStatus) -> dict[str, Any]:
    return {
        "broker": broker,
        "level": tier.level,
        "is_open": tier.is_open,
        "place_problem": tier.place_problem or None,
        "upload_problem": tier.upload_problem or None,
        "upload_problem_seconds": tier.upload_problem_seconds,
        "given_up_count": tier.given_up_count,
        "foreign_count": tier.foreign_count,
        "read_problem": tier.read_problem or None,
        "is_read_paused": tier.is_read_paused,
        "queue_count": tier.queue_count,
    }


def _json_row(broker: str, queue: TierQueueStatus) -> dict[str, Any]:
    return {
        "topic": queue.topic,
        "queue": queue.queue_id,
        "broker": broker,
        "local_min": queue.local_min,
        "local_max": queue.local_max,
        "tier_min": queue.tier_min,
        "tier_end": queue.tier_end,
        "tier_bytes": queue.tier_bytes,
        **_behind(queue),
        "problem": queue.problem or None,
        "problem_since_ms": queue.problem_since_ms or None,
        "foreign_from": queue.foreign_from,
    }


def _row(broker: str, queue: TierQueueStatus) -> dict[str, Any]:
    tiered = None if queue.tier_end is None else f"{queue.tier_min}-{queue.tier_end}"
    return {
        "topic": queue.topic,
        "queue": queue.queue_id,
        "broker": broker,
        "local": f"{queue.local_min}-{queue.local_max}",
        "tier": tiered,
        "tier_bytes": queue.tier_bytes,
        **_behind(queue),
        "problem": queue.problem or None,
    }


def _behind(queue: TierQueueStatus) -> dict[str, Any]:
    return {
        "behind_messages": queue.behind_messages,
        "behind_bytes": queue.behind_bytes,
        "behind_seconds": queue.behind_seconds,
    }


# -- without a broker ------------------------------------------------------------------------------


@command.subcommand(
    "verify",
    "headrace tier verify -c broker.conf",
    "headrace tier verify -c broker.conf --deep --json",
)
@_config
@click.option("--deep", is_flag=True, help="Read and check every message, too.")
@options.as_json
def verify(config: Path, *, deep: bool, as_json: bool) -> None:
    """Compare what the tier names with what its place has.

    Needs no broker, and may run beside one. The exit code is 1 if anything is damaged; a note is
    something that the broker's next start puts right, or that takes up room.
    """
    from headrace_broker.tiered.rescue.verify import verify as run

    report = run(_settings(config)[1], deep=deep)
    rows = [
        {
            "state": "damage" if found.is_damage else "note",
            "path": found.path,
            "problem": found.problem,
        }
        for found in report.problems
    ]
    damaged = sum(found.is_damage for found in report.problems)
    counts = {"queues": report.queue_count, "messages": report.message_count, "damaged": damaged}
    print_findings(counts, rows, as_json=as_json)
    if damaged:
        sys.exit(FAILED)


@command.subcommand("rebuild", "headrace tier rebuild -c broker.conf")
@_config
@options.as_json
def rebuild(config: Path, *, as_json: bool) -> None:
    """Write the tier's metadata or manifest anew, from what the place has.

    For a tier whose metadata or manifest is lost or torn; in a folder also for consume queues and
    index files. Stop the broker first. Records and objects are not deleted, but torn ends of
    consume queues are cut. A replaced manifest or metadata file is kept as .bak. Topics that were
    deleted within the last day may come back.
    """
    from headrace_broker.tiered.rescue.rebuild import rebuild as run

    done = run(_settings(config)[1], now_ms())
    for problem in done.problems:
        warn(f"left out: {problem}")
    print_record(_counts(done.tier, left_out=len(done.problems)), as_json=as_json)
    if done.problems:
        sys.exit(FAILED)


@command.subcommand("restore", "headrace tier restore -c broker.conf")
@_config
@options.as_json
def restore(config: Path, *, as_json: bool) -> None:
    """Fill the empty store of a broker that lost its disk, so that it continues on its tier.

    Restores topics, groups and their offsets as the tier has them. Queues continue where the tier
    ends: messages that were not uploaded are lost, as are delayed messages, timers and open
    transactions. Then start the broker.
    """
    from headrace_broker.settings.of_store import store_settings
    from headrace_broker.tiered.rescue.restore import restore as run

    broker, settings = _settings(config)
    done = run(settings, store_settings(broker, bytes(8)), now_ms())
    if done is None:
        sys.stderr.write("completed what an earlier command had begun\n")
        return
    for problem in done.problems:
        warn(f"not restored: {problem}")
    print_record(_counts(done.tier, topics=done.topic_count), as_json=as_json)
    if done.problems:
        sys.exit(FAILED)


@command.subcommand(
    "sweep",
    "headrace tier sweep -c broker.conf",
    "headrace tier sweep -c broker.conf --yes",
)
@_config
@click.option("--yes", is_flag=True, help="Delete them.")
@options.as_json
def sweep(config: Path, *, yes: bool, as_json: bool) -> None:
    """List what nothing in the tier names; with --yes, delete it.

    A running broker sweeps once a day by itself. In a bucket, objects younger than a day are left
    alone; in a folder, stop the broker first.
    """
    from headrace_broker.tiered.rescue.sweep import sweep as run

    found = run(_settings(config)[1], now_ms(), deletes=yes)
    rows = [{"path": entry.path, "bytes": entry.size, "deleted": yes} for entry in found]
    print_rows(rows, as_json=as_json, empty="nothing is left over")
    if rows and not yes:
        sys.stderr.write("nothing was deleted: --yes deletes these\n")


@command.subcommand("copy", "headrace tier copy --from broker.conf --to bucket.conf")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Config file whose tier is read.",
)
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Config file whose tier is written.",
)
@options.as_json
def copy(source: Path, target: Path, *, as_json: bool) -> None:
    """Copy a tier to another place, from a folder to a bucket or back.

    Checks all messages that it reads, and afterwards all of the copy. May be run again: it copies
    what the target lacks. Stop the broker before the last run, then start it with the new settings.
    """
    from headrace_broker.tiered.rescue.copy import copy as run
    from headrace_broker.tiered.rescue.verify import verify as check

    (_, old), (_, new) = _settings(source), _settings(target)
    copied = run(old, new, now_ms())
    report = check(new, deep=True)
    for found in report.problems:
        warn(f"{found.path}: {found.problem}")
    damaged = sum(found.is_damage for found in report.problems)
    counts = {"queues": report.queue_count, "messages": report.message_count, "copied": copied}
    print_record({**counts, "damaged": damaged}, as_json=as_json)
    if damaged:
        sys.exit(FAILED)


def _counts(tier: StoredTier, **more: int) -> dict[str, int]:
    queues = tier.queues.values()
    messages = sum(queue.commit_offset - queue.min_offset for queue in queues)
    return {"queues": len(queues), "messages": messages, **more}


def _settings(path: Path) -> tuple[BrokerConfig, TierSettings]:
    """A broker's settings, and those of its tier."""
    from headrace_broker.settings.files import load_config
    from headrace_protocol.tier.paths import Home

    config = load_config(path)[0]
    home = Home(config.broker_cluster_name, config.broker_name)
    settings = config.tier_settings(config.store_path_root_dir, home)
    if settings is None:
        raise ConfigurationError(
            f"{path} has no tiered storage: set messageStorePlugIn, or name another file"
        )
    return config, settings
