"""``headrace store``: tools for a store directory that no broker is using."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import options
from headrace.admin.output import (
    print_findings,
    print_json,
    print_json_line,
    print_record,
    print_rows,
    time_text,
)
from headrace.admin.progress import progress
from headrace_daemon.command import FAILED, clean, warn

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from headrace_broker.store_tools.directory import StoreDirectory
    from headrace_broker.store_tools.findings import Finding
    from headrace_broker.store_tools.fsck import Report
    from headrace_broker.store_tools.log_reader import LogDamage
    from headrace_broker.store_tools.timer_log import TimerUnit
    from headrace_protocol.message import StoredMessage


@options.group("store", "headrace store fsck /var/lib/headrace/store")
def command() -> None:
    """Check, print, count and copy a store directory."""


_directory = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
_config = click.option(
    "--config",
    "-c",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The broker's config file, for its file sizes. Default: the sizes of the files.",
)


@command.subcommand(
    "fsck",
    "headrace store fsck /var/lib/headrace/store",
    "headrace store fsck /var/lib/headrace/store --repair",
)
@_directory
@click.option("--repair", is_flag=True, help="Repair all that can be repaired without loss.")
@_config
@options.as_json
def fsck(directory: Path, config: Path | None, *, repair: bool, as_json: bool) -> None:
    """Check every record, unit, index entry and small file of a store.

    DIR is the store directory of a stopped broker. The exit code is 1 if damage remains. A repair
    saves everything it replaces in DIR/headrace.fsck.
    """
    from headrace_broker.store_tools import fsck as tool

    with _opened(directory, config) as store:
        with progress("checking", _bytes(store)) as advance:
            report = tool.check(store, advance)
        rows = [_finding_row(finding, store.root) for finding in report.findings]
        saved = None
        if repair:
            with progress("repairing", store.log_bytes) as advance:
                saved = tool.repair(store, report.findings, advance)
            with progress("checking", _bytes(store)) as advance:
                report = tool.check(store, advance)
            _mark_repaired(rows, report, store.root)
    print_findings(_report_record(report, saved), rows, as_json=as_json)
    if report.damage:
        sys.exit(FAILED)


@command.subcommand(
    "dump",
    "headrace store dump /var/lib/headrace/store --topic orders --max 10",
    "headrace store dump /var/lib/headrace/store --from 1073741824 --json",
    "headrace store dump /var/lib/headrace/store --topic users --compacted",
    "headrace store dump /var/lib/headrace/store --timers --max 10",
)
@_directory
@click.option("--topic", metavar="TOPIC", help="Only records of this topic.")
@click.option(
    "--queue", type=click.IntRange(min=0), metavar="QUEUE", help="Only records of this queue id."
)
@click.option(
    "--from",
    "start",
    type=int,
    default=0,
    metavar="OFFSET",
    help="Physical offset to start from; with --timers, position in the timer log.",
)
@click.option(
    "--max",
    "count_max",
    type=click.IntRange(min=1),
    metavar="RECORDS",
    help="Stop after this many records or units.",
)
@click.option(
    "--compacted",
    is_flag=True,
    help="Read compaction logs, which keep the newest message of each key, instead of the log.",
)
@click.option("--timers", is_flag=True, help="Print the units of the timer log instead.")
@_config
@options.as_json
def dump(
    directory: Path,
    topic: str | None,
    queue: int | None,
    start: int,
    count_max: int | None,
    config: Path | None,
    *,
    compacted: bool,
    timers: bool,
    as_json: bool,
) -> None:
    """Print the log's records in order, one per line, and damaged places to standard error.

    With --timers, print the units of the timer log and whether the wheel's slot reaches them.
    """
    if timers:
        if topic is not None or queue is not None or compacted:
            raise click.UsageError(
                "--timers goes with none of --topic, --queue and --compacted: omit them"
            )
        _dump_timers(directory, config, start, count_max, as_json=as_json)
        return
    from headrace_broker.store_tools.dump import Wanted, dump_compacted
    from headrace_broker.store_tools.dump import dump as run
    from headrace_broker.store_tools.log_reader import LogDamage

    write = _print_json_record if as_json else _print_record
    # A progress bar between the lines would garble both.
    is_piped = not sys.stdout.isatty()
    with (
        _opened(directory, config) as store,
        progress("reading", store.log_bytes if is_piped else 0) as advance,
    ):
        left = count_max
        wanted = Wanted(topic, queue, start)
        records = dump_compacted(store, wanted) if compacted else run(store, wanted, advance)
        for found in records:
            if isinstance(found, LogDamage):
                warn(_damage_text(found))
                continue
            write(found)
            left = left - 1 if left else None
            if left == 0:
                break


def _dump_timers(
    directory: Path, config: Path | None, start: int, count_max: int | None, *, as_json: bool
) -> None:
    from headrace_broker.store_tools.timer_log import timer_units

    write = _print_json_unit if as_json else _print_unit
    with _opened(directory, config) as store:
        units = (unit for unit in timer_units(store.root) if unit.position >= start)
        for unit in islice(units, count_max):
            write(unit)


@command.subcommand("stat", "headrace store stat /var/lib/headrace/store --json")
@_directory
@_config
@options.as_json
def stat(directory: Path, config: Path | None, *, as_json: bool) -> None:
    """Count a store's contents by topic: messages that can still be read."""
    from headrace_broker.store_tools.stat import store_stat, topic_stats

    with _opened(directory, config) as store:
        summary = store_stat(store)
        with progress("reading", len(store.queue_paths), is_bytes=False) as advance:
            topics = topic_stats(store, advance)
    record = {name: getattr(summary, name) for name in summary.__slots__}
    rows = [
        {
            "topic": topic.topic,
            "queues": topic.queues,
            "messages": topic.messages,
            "record_bytes": topic.record_bytes,
            "compacted_messages": topic.compacted_messages,
            "compacted_bytes": topic.compacted_bytes,
            "oldest": time_text(topic.oldest_ms or 0),
            "newest": time_text(topic.newest_ms or 0),
        }
        for topic in topics
    ]
    if as_json:
        print_json({**record, "topics": rows})
        return
    print_record(record, as_json=False)
    sys.stdout.write("\n")
    print_rows(rows, as_json=False, empty="no topic has messages")


@command.subcommand(
    "copy",
    "headrace store copy /var/lib/headrace/store ./copy --topic orders",
)
@_directory
@click.argument("target", metavar="TARGET", type=click.Path(path_type=Path))
@click.option(
    "--topic",
    "topics",
    multiple=True,
    required=True,
    metavar="TOPIC",
    help="Topic to copy; may be repeated.",
)
@_config
@options.as_json
def copy(
    directory: Path, target: Path, topics: tuple[str, ...], config: Path | None, *, as_json: bool
) -> None:
    """Copy topics into a new store: records, queues, index, settings and groups' offsets.

    Queue offsets stay the same; physical offsets, and thus offset message ids, change. Damaged
    places in the log are reported and skipped, so copying also rescues the records after them.
    """
    from headrace_broker.store_tools.copy import copy_topics

    with _opened(directory, config) as store, progress("copying", store.log_bytes) as advance:
        report = copy_topics(store, target, list(topics), advance)
    for damage in report.damage:
        warn(f"skipped {_damage_text(damage)}")
    record = {
        "records": report.record_count,
        "record_bytes": report.record_bytes,
        "unplaced": report.unplaced_count,
        "damaged_places": len(report.damage),
    }
    print_record(record, as_json=as_json)


# -- common parts ----------------------------------------------------------------------------------


def _opened(directory: Path, config: Path | None) -> AbstractContextManager[StoreDirectory]:
    from headrace_broker.store_tools.directory import open_directory

    sizes = None
    if config is not None:
        from headrace_broker.settings.files import load_config
        from headrace_broker.settings.of_store import store_settings

        sizes = store_settings(load_config(config)[0], bytes(8))
    return open_directory(directory, sizes)


def _bytes(store: StoreDirectory) -> int:
    files = (path for folder in store.queue_paths for path in folder.iterdir())
    return store.log_bytes + sum(path.stat().st_size for path in files)


def _finding_row(finding: Finding, root: Path) -> dict[str, Any]:
    return {
        "state": "damage" if finding.is_damage else "note",
        "path": str(finding.path.relative_to(root)),
        "position": finding.position,
        "problem": finding.problem,
        "can_repair": finding.fix is not None,
    }


def _mark_repaired(rows: list[dict[str, Any]], report: Report, root: Path) -> None:
    left = [_finding_row(finding, root) for finding in report.findings]
    for row in rows:
        if row not in left and row["can_repair"]:
            row["state"] = "repaired"
    rows += [row for row in left if row not in rows]


def _report_record(report: Report, saved: Path | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "records": report.record_count,
        "log_min_offset": report.log_min,
        "log_max_offset": report.log_end,
        "damaged": len(report.damage),
    }
    return {**record, "saved": str(saved)} if saved else record


def _damage_text(damage: LogDamage) -> str:
    size = damage.end - damage.start
    return (
        f"physical offset {damage.start}: {size} bytes are not a complete record: {damage.reason}"
    )


def _print_unit(unit: TimerUnit) -> None:
    cells = (
        str(unit.position),
        unit.kind,
        time_text(unit.slot_ms) or "-",
        time_text(unit.write_ms) or "-",
        str(unit.physical_offset),
        str(unit.record_bytes),
        "in wheel" if unit.is_in_wheel else "-",
    )
    sys.stdout.write("\t".join(cells) + "\n")


def _print_json_unit(unit: TimerUnit) -> None:
    record = unit._asdict()
    times = {
        "slot_time": time_text(record.pop("slot_ms")),
        "write_time": time_text(record.pop("write_ms")),
    }
    print_json_line({**record, **times})


def _print_record(message: StoredMessage) -> None:
    from headrace_protocol.compression import BodyTooLarge, CodecMissing
    from headrace_protocol.errors import CorruptRecord

    try:
        body = message.body.decode(errors="backslashreplace")
    except (BodyTooLarge, CodecMissing, CorruptRecord) as error:
        body = f"({error})"
    cells = (
        str(message.physical_offset),
        str(message.size),
        f"{message.topic}/{message.queue_id}",
        str(message.queue_offset),
        time_text(message.store_timestamp) or "-",
        message.message_id,
        body.replace("\t", " ").replace("\n", " "),
    )
    sys.stdout.write("\t".join(map(clean, cells)) + "\n")


def _print_json_record(message: StoredMessage) -> None:
    import base64

    from headrace_protocol.message_ids import decode_host

    host, port = decode_host(message.born_host)
    record = {
        "physical_offset": message.physical_offset,
        "size": message.size,
        "topic": message.topic,
        "queue": message.queue_id,
        "queue_offset": message.queue_offset,
        "sys_flag": message.sys_flag,
        "flag": message.flag,
        "born_time": time_text(message.born_timestamp),
        "born_host": f"{host}:{port}",
        "store_time": time_text(message.store_timestamp),
        "reconsume_times": message.reconsume_times,
        "message_id": message.message_id,
        "properties": message.properties,
    }
    try:
        record["body"] = message.stored_body.decode()
    except UnicodeDecodeError:
        record["body_base64"] = base64.b64encode(message.stored_body).decode()
    print_json_line(record)
