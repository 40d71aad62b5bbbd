"""``headrace acl``: users and rules of a cluster, and why a user may do something or not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from headrace.admin import options
from headrace.admin.commands import acl_import, acl_rule, acl_user
from headrace.admin.output import print_rows, warned
from headrace.admin.running import run_admin
from headrace_daemon.command import FAILED, warn

if TYPE_CHECKING:
    from headrace.admin.client import Admin
    from headrace.rights import Answer


@options.group(
    "acl",
    "headrace acl user create alice",
    "headrace acl rule add alice Topic:orders Pub Sub",
    "headrace acl explain alice Pub Topic:orders",
)
def command() -> None:
    """Manage users and rules, and explain what a user may do.

    Each broker and nameserver keeps users and rules of its own: changes go to all of them.
    """


command.add_command(acl_user.command)
command.add_command(acl_rule.command)
command.add_command(acl_import.command)


@command.subcommand(
    "explain",
    "headrace acl explain alice Pub Topic:orders",
    "headrace acl explain alice Sub Group:billing --from 10.0.0.7 --json",
)
@click.argument("user", metavar="USER")
@click.argument("action", metavar="ACTION")
@click.argument("resource", metavar="RESOURCE")
@click.option(
    "--from",
    "address",
    default="127.0.0.1",
    show_default=True,
    metavar="IP",
    help="Address of the client.",
)
@options.answer
def explain(
    user: str, action: str, resource: str, address: str, nameserver: str | None, *, as_json: bool
) -> None:
    """Print whether a user may do something, and the rule that decides.

    The exit code is 1 if any daemon denies it. Computed from the rules that each daemon returns,
    whether or not it checks them: see authorizationEnabled.
    """
    from headrace.rights import explain as answer
    from headrace.rights import question

    asked = question(action, resource, address)

    async def run(admin: Admin) -> dict[str, Answer]:
        users = await admin.users(problems=problems)
        rules = await admin.rules(problems=problems)
        return {
            keeper: answer(found.get(user), rules[keeper].get(user, []), asked)
            for keeper, found in users.items()
            if keeper in rules
        }

    with warned() as problems:
        answers = run_admin(run, nameserver)
    rows = [
        {
            "daemon": keeper,
            "allowed": found.is_allowed,
            "rule": None if found.rule is None else str(found.rule),
            "reason": found.reason,
        }
        for keeper, found in answers.items()
    ]
    print_rows(rows, as_json=as_json, empty="no daemon keeps users")
    if len({(found.is_allowed, found.rule) for found in answers.values()}) > 1:
        warn("the daemons differ: repeat the change that some of them missed")
    if not all(found.is_allowed for found in answers.values()):
        sys.exit(FAILED)
