"""``headrace acl user``: creates, changes, deletes and lists users."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - click's
from typing import TYPE_CHECKING

import click

from headrace.admin import options
from headrace.admin.merged import merged, print_skipped, with_holders
from headrace.admin.output import print_rows, warned
from headrace.admin.passwords import password_file, read_password
from headrace.admin.running import run_admin
from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.rights import ClusterUser

_no_password = click.option(
    "--no-password",
    is_flag=True,
    help="Leave the user without one: only a token or a certificate proves it.",
)
_name = click.argument("name", metavar="USER")


@options.group("user", "headrace acl user create alice", "headrace acl user list")
def command() -> None:
    """Create, change, delete and list users."""


@command.subcommand(
    "create",
    "headrace acl user create alice",
    "headrace acl user create root --super --password-file root.password",
    "pwgen 24 1 | headrace acl user create alice --no-signatures",
    "headrace acl user create reports --no-password",
)
@_name
@click.option("--super", "is_super", is_flag=True, help="Let the user do everything.")
@click.option(
    "--no-signatures",
    is_flag=True,
    help="Keep no password, only a proof of it: no use with Apache RocketMQ's clients.",
)
@_no_password
@password_file
@options.nameserver
def create(
    name: str,
    password_file: Path | None,
    nameserver: str | None,
    *,
    is_super: bool,
    no_signatures: bool,
    no_password: bool,
) -> None:
    """Create a user, without rights until rules are added."""
    if no_password and password_file:
        raise ConfigurationError("--no-password, but --password-file has one: give one of them")
    password = None if no_password else read_password(name, password_file)
    print_skipped(
        run_admin(
            lambda admin: admin.create_user(
                name, password, is_super=is_super, signs=not no_signatures
            ),
            nameserver,
        )
    )


@command.subcommand(
    "update",
    "headrace acl user update alice --password",
    "headrace acl user update alice --disable",
    "headrace acl user update alice --super",
    "headrace acl user update alice --no-password",
)
@_name
@click.option("--password", "asks", is_flag=True, help="Ask for a new password.")
@_no_password
@password_file
@click.option("--enable/--disable", "is_enabled", default=None, help="Let the user log in, or not.")
@click.option("--super/--normal", "is_super", default=None, help="Kind of the user.")
@options.nameserver
def update(
    name: str,
    password_file: Path | None,
    nameserver: str | None,
    *,
    asks: bool,
    no_password: bool,
    is_enabled: bool | None,
    is_super: bool | None,
) -> None:
    """Change a user's password, kind or status; a change counts from the next request on."""
    if [asks, no_password, bool(password_file)].count(True) > 1:
        raise ConfigurationError(
            "--password asks for one, --password-file has one, --no-password takes it away: give "
            "one of them"
        )
    password = read_password(name, password_file) if asks or password_file else None
    print_skipped(
        run_admin(
            lambda admin: admin.update_user(
                name,
                password=password,
                no_password=no_password,
                is_super=is_super,
                is_enabled=is_enabled,
            ),
            nameserver,
        )
    )


@command.subcommand("delete", "headrace acl user delete alice --yes")
@_name
@options.yes
@options.nameserver
def delete(name: str, nameserver: str | None, *, yes: bool) -> None:
    """Delete a user with its rules."""
    options.confirm(f"delete user {name} with its rules", yes=yes)
    print_skipped(run_admin(lambda admin: admin.delete_user(name), nameserver))


@command.subcommand("list", "headrace acl user list", "headrace acl user list --json")
@options.answer
def list_users(nameserver: str | None, *, as_json: bool) -> None:
    """List the users; passwords are never shown.

    Where daemons differ, each form of a user is a row that names its daemons.
    """
    with warned() as problems:
        found = run_admin(lambda admin: admin.users(problems=problems), nameserver)
    by_keeper = {keeper: set(users.values()) for keeper, users in found.items()}
    rows = with_holders(merged(by_keeper), _row)
    print_rows(rows, as_json=as_json, empty="no users; `headrace acl user create` makes one")


def _row(user: ClusterUser) -> dict[str, object]:
    return {
        "user": user.name,
        "kind": "Super" if user.is_super else "Normal",
        "enabled": user.is_enabled,
        "signs": user.signs,
        "password": user.has_password,
    }
