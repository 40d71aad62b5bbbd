"""``headrace acl rule``: adds, removes and lists rules of users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.admin import options
from headrace.admin.merged import merged, print_skipped, with_holders
from headrace.admin.output import print_rows, warned
from headrace.admin.running import run_admin
from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.rights import Rule

_user = click.argument("user", metavar="USER")
_default = click.option(
    "--default",
    "is_default",
    is_flag=True,
    help="A default rule, which counts where no other rule of the user speaks of a request.",
)


@options.group(
    "rule",
    "headrace acl rule add alice Topic:orders Pub Sub",
    "headrace acl rule list alice",
)
def command() -> None:
    """Add, remove and list the rules of users.

    A rule speaks of a resource (*, Topic:orders, Topic:orders*, Topic:*; also Group and Cluster)
    and of actions: Pub, Sub, Create, Update, Delete, Get, List, or All. The closest resource
    decides, at a tie Deny; what no rule speaks of is denied.
    """


@command.subcommand(
    "add",
    "headrace acl rule add alice Topic:orders Pub",
    "headrace acl rule add alice 'Topic:orders*' Sub --from 10.0.0.0/8",
    "headrace acl rule add alice Topic:salaries All --deny",
)
@_user
@click.argument("resource", metavar="RESOURCE")
@click.argument("actions", metavar="ACTION...", nargs=-1, required=True)
@click.option("--deny", is_flag=True, help="Deny the actions.")
@click.option(
    "--from",
    "addresses",
    multiple=True,
    metavar="IP",
    help="Only for clients of this address or network; may be repeated.",
)
@_default
@options.nameserver
def add(user: str, nameserver: str | None, *, deny: bool, is_default: bool, **words: Any) -> None:
    """Add a rule; it replaces the user's rules for the same resource."""
    from headrace.rights import Rule

    rule = Rule(decision="Deny" if deny else "Allow", policy=_policy(is_default), **words)
    rule.checked()
    print_skipped(run_admin(lambda admin: admin.set_rules(user, [rule]), nameserver))


@command.subcommand(
    "remove",
    "headrace acl rule remove alice Topic:orders",
    "headrace acl rule remove alice --all",
)
@_user
@click.argument("resource", metavar="[RESOURCE]", required=False)
@click.option("--all", "is_all", is_flag=True, help="All rules of the user.")
@_default
@options.nameserver
def remove(
    user: str, resource: str | None, nameserver: str | None, *, is_all: bool, is_default: bool
) -> None:
    """Remove a user's rules for a resource, or all of them."""
    if is_all == (resource is not None):
        raise ConfigurationError("name the RESOURCE, or give --all for all rules of the user")
    policy = _policy(is_default)
    print_skipped(
        run_admin(lambda admin: admin.remove_rules(user, resource, policy=policy), nameserver)
    )


@command.subcommand("list", "headrace acl rule list", "headrace acl rule list alice --json")
@click.argument("user", metavar="[USER]", required=False)
@options.answer
def list_rules(user: str | None, nameserver: str | None, *, as_json: bool) -> None:
    """List the rules of a user, or of all.

    Where daemons differ, rules that some of them lack name those that have them.
    """
    with warned() as problems:
        found = run_admin(lambda admin: admin.rules(problems=problems), nameserver)
    by_keeper = {
        keeper: {
            (name, rule)
            for name, rules in by_user.items()
            if user in {None, name}
            for rule in rules
        }
        for keeper, by_user in found.items()
    }
    rows = with_holders(merged(by_keeper), _row)
    of_whom = f"user {user} has" if user else "there are"
    print_rows(rows, as_json=as_json, empty=f"{of_whom} no rules")


def _row(held: tuple[str, Rule]) -> dict[str, object]:
    user, rule = held
    return {
        "user": user,
        "resource": rule.resource,
        "actions": list(rule.actions),
        "decision": rule.decision,
        "from": list(rule.addresses),
        "policy": rule.policy,
    }


def _policy(is_default: bool) -> str:
    from headrace.rights import CUSTOM, DEFAULT

    return DEFAULT if is_default else CUSTOM
