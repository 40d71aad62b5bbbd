"""``headrace acl import``: takes users and rules from files of Apache RocketMQ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.admin import options
from headrace.admin.merged import print_skipped
from headrace.admin.output import print_rows
from headrace.admin.running import run_admin
from headrace.errors import HeadraceError, UserExists
from headrace_daemon.command import FAILED, warn

if TYPE_CHECKING:
    from headrace.admin.acl_files import Imported
    from headrace.admin.client import Admin


@options.command(
    "import",
    "headrace acl import plain_acl.yml --dry-run",
    "(mqadmin listUser -c C; mqadmin listAcl -c C) > acl.txt && headrace acl import acl.txt",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only print what would be made.")
@options.answer
def command(file: Path, nameserver: str | None, *, dry_run: bool, as_json: bool) -> None:
    """Make the users and rules of a plain_acl.yml, or of what mqadmin listUser and listAcl print.

    A user that exists keeps its password and kind, and gets the rules. What headrace has no
    counterpart for is named.
    """
    from headrace.admin.acl_files import parse

    found = parse(file.read_text(), str(file))
    for note in found.notes:
        warn(f"not carried over: {note}")
    for each in found.users:
        for note in each.notes:
            warn(f"{each.user.name}: {note}")
    outcomes = (
        [_would_be(each) for each in found.users]
        if dry_run
        else run_admin(lambda admin: _make(admin, found.users), nameserver)
    )
    rows = [_row(each, outcome) for each, outcome in zip(found.users, outcomes, strict=True)]
    print_rows(rows, as_json=as_json, empty=f"{file} has no users")
    if any(isinstance(outcome, HeadraceError) for outcome in outcomes):
        sys.exit(FAILED)


def _would_be(found: Imported) -> str:
    return "would be made" if found.password else "would get rules: the file has no password"


async def _make(admin: Admin, users: tuple[Imported, ...]) -> list[str | HeadraceError]:
    """Make one user after the other; returns what became of each."""
    outcomes: list[str | HeadraceError] = []
    skipped: list[str] = []
    for each in users:
        try:
            outcome, missed = await _make_one(admin, each)
            outcomes.append(outcome)
            skipped += missed
        except HeadraceError as error:
            outcomes.append(error)
    print_skipped(list(dict.fromkeys(skipped)))
    return outcomes


async def _make_one(admin: Admin, found: Imported) -> tuple[str, list[str]]:
    user, outcome, skipped = found.user, "exists", list[str]()
    if found.password:
        try:
            skipped = await admin.create_user(
                user.name,
                found.password,
                is_super=user.is_super,
                is_enabled=user.is_enabled,
            )
            outcome = "made"
        except UserExists:
            pass
    if found.rules:
        skipped = await admin.set_rules(user.name, found.rules)
    return outcome, skipped


def _row(found: Imported, outcome: str | HeadraceError) -> dict[str, object]:
    return {
        "user": found.user.name,
        "kind": "Super" if found.user.is_super else "Normal",
        "enabled": found.user.is_enabled,
        "rules": list(map(str, found.rules)),
        "outcome": str(outcome),
    }
