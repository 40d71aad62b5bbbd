"""``headrace audit``: check and print the audit log of a daemon."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import options
from headrace.admin.output import print_json_line, print_record, print_rows, time_text
from headrace.admin.points import parse_time
from headrace_daemon.command import FAILED, fail, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

_files = click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)


@options.group(
    "audit", "headrace audit verify /var/log/headrace/audit.log*", "headrace audit show audit.log"
)
def command() -> None:
    """Check and print the audit log of a daemon.

    FILEs are the log that its auditLogPath names and the rotated files, in any order.
    """


@command.subcommand(
    "verify",
    "headrace audit verify /var/log/headrace/audit.log*",
    "headrace audit verify audit.log --expect 9b2f...",
)
@_files
@click.option("--expect", metavar="HASH", default="", help="Hash that one of the lines must have.")
@options.as_json
def verify(files: tuple[Path, ...], expect: str, *, as_json: bool) -> None:
    """Check that no line was changed, removed or added.

    The exit code is 1 if one was; the first of them is named. Nothing in the files shows whether
    lines were cut off at the end: keep the last hash elsewhere, and expect it in a later check.
    """
    from headrace_daemon.audit.verify import check, in_order

    paths = in_order(files)
    found = check(paths, expect.lower())
    record = {
        "files": len(paths),
        "lines": found.line_count,
        "begins_after": found.begins_after,
        "last_hash": found.ends_with,
    }
    if as_json:
        record |= {"problem": found.problem, "notes": found.notes}
    print_record(record, as_json=as_json)
    if not as_json:
        for note in found.notes:
            warn(note)
    if found.problem:
        fail(found.problem)
        sys.exit(FAILED)


@command.subcommand(
    "show",
    "headrace audit show audit.log --event denied --since 2h",
    "headrace audit show audit.log* --user alice --json",
)
@_files
@click.option("--user", metavar="NAME", help="Only events of this user.")
@click.option("--event", metavar="EVENT", help="Only events of this name, such as denied.")
@click.option("--since", metavar="TIME", help="Only events since a time, or of an age such as 2h.")
@options.as_json
def show(
    files: tuple[Path, ...],
    user: str | None,
    event: str | None,
    since: str | None,
    *,
    as_json: bool,
) -> None:
    """Print events, the oldest first; their chain is not checked."""
    start = time_text(parse_time(since)) or "" if since else ""
    wanted = {"user": user, "event": event}
    rows = [
        row
        for row in _rows(files)
        if row["time"] >= start and all(row[key] == value for key, value in wanted.items() if value)
    ]
    if as_json:
        for row in rows:
            print_json_line(row)
    else:
        print_rows(rows, as_json=False, empty="no such events")


def _rows(files: tuple[Path, ...]) -> Iterator[dict[str, Any]]:
    """The events; other lines are warned of."""
    import msgspec

    from headrace_daemon.audit.lines import Event
    from headrace_daemon.audit.verify import in_order, read

    decoder = msgspec.json.Decoder(Event)
    for raw in read(in_order(files)):
        try:
            yield msgspec.structs.asdict(decoder.decode(raw.data))
        except (msgspec.DecodeError, UnicodeDecodeError):
            warn(f"{raw.place}: not a line of an audit log")
