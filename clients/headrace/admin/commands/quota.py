"""``headrace quota``: limits what a user, a topic or a group takes of the daemons."""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import click

from headrace.admin import options
from headrace.admin.failures import NotFound
from headrace.admin.output import print_record, print_rows, warned, with_problems
from headrace.admin.running import run_admin
from headrace_protocol.quotas import LIMITS, Quota, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.admin.client import Admin
    from headrace.admin.requests import BrokerProblem
    from headrace_protocol.quotas import Of

_UNITS: Final = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


class _Bytes(click.ParamType[float]):
    """Bytes, such as 10MB."""

    name = "bytes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = _SIZE.fullmatch(str(value).removesuffix("/s"))
        unit = _UNITS.get(found[2].lower()) if found else None
        if found is None or unit is None:
            self.fail(f"{value!r} is no number of bytes, such as 10MB", param, ctx)
        return float(found[1]) * unit


class _WholeBytes(_Bytes):
    """The same without a fraction."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return int(super().convert(value, param, ctx))


_of = click.argument("of", metavar="user|topic|group", type=click.Choice(list(LIMITS)))
_name = click.argument("name", metavar="NAME")
_broker = click.option("--broker", metavar="NAME", help="At this broker alone.")


@options.group("quota", "headrace quota set topic orders --bytes-in 10MB")
def command() -> None:
    """Limit what a user, a topic or a group takes of brokers and nameservers.

    A client at its limit is not read for a moment; what can't wait gets SYSTEM_BUSY with the time
    after which to try again. Each daemon applies a quota to what it serves itself.
    """


_LIMITS: Final[tuple[tuple[str, Any, str, str], ...]] = (
    ("--requests", float, "N", "Requests a second."),
    ("--bytes-in", _Bytes(), "RATE", "Such as 10MB a second."),
    ("--bytes-out", _Bytes(), "RATE", "Such as 50MB a second."),
    ("--cpu", float, "SHARE", "Of the loop: 0.2 is a fifth."),
    ("--connections", int, "N", "Connections at a time."),
    ("--held-pulls", int, "N", "Pulls that wait at a time."),
    ("--topics", int, "N", "Topics that the user has made."),
    ("--groups", int, "N", "Groups that the user has made."),
    ("--staged-bytes", _WholeBytes(), "BYTES", "Such as 1GB of staged writes at a time."),
)


def _limits(function: Callable[..., None]) -> Callable[..., None]:
    for name, kind, metavar, text in reversed(_LIMITS):
        function = click.option(name, type=kind, metavar=metavar, help=text)(function)
    return function


@command.subcommand(
    "set",
    "headrace quota set user alice --requests 1000 --bytes-out 50MB",
    "headrace quota set user '*' --connections 100",
    "headrace quota set user bob --topics 100 --groups 20 --staged-bytes 1GB",
    "headrace quota set topic orders --bytes-in 10MB --requests 5000",
)
@_of
@_name
@_limits
@_broker
@options.answer
def set_quota(
    of: Of, name: str, broker: str | None, nameserver: str | None, *, as_json: bool, **limits: Any
) -> None:
    """Set the limits of a user, a topic or a group, in place of those it has.

    A user may be an address, for clients that do not log in. The user * is each user, and each
    address, without a quota of its own. Topics have --requests, --bytes-in, --bytes-out and --cpu,
    groups the same but --bytes-in. Nameservers apply --requests, --bytes-in, --bytes-out, --cpu and
    --connections of users.
    """
    quota = Quota(of=of, name=name, **limits)
    if not quota.limits:
        raise click.UsageError("give at least one limit, or use `headrace quota remove`")
    run_admin(lambda admin: admin.set_quota(quota, broker=broker), nameserver)
    print_record(_row(quota, as_json=as_json), as_json=as_json)


@command.subcommand(
    "remove", "headrace quota remove topic orders", "headrace quota remove user alice"
)
@_of
@_name
@_broker
@options.answer
def remove(of: Of, name: str, broker: str | None, nameserver: str | None, *, as_json: bool) -> None:
    """Remove the limits of a user, a topic or a group."""

    async def run(admin: Admin) -> None:
        unread: list[BrokerProblem] = []
        found = await admin.quotas(problems=unread)
        at = found if broker is None else {broker: found.get(broker, [])}
        is_set = any((each.of, each.name) == (of, name) for each in chain(*at.values()))
        # Otherwise the removal fails where they could not be read.
        if not is_set and not unread and at.keys() <= found.keys():
            raise NotFound(f"{of} {name} has no quota; see `headrace quota list`")
        await admin.set_quota(Quota(of=of, name=name), broker=broker)

    run_admin(run, nameserver)
    print_record({"removed": f"{of} {name}"}, as_json=as_json)


@command.subcommand("list", "headrace quota list", "headrace quota list --json")
@options.answer
def list_quotas(nameserver: str | None, *, as_json: bool) -> None:
    """List the quotas of all brokers and nameservers."""
    with warned() as problems:
        found = run_admin(lambda admin: admin.quotas(problems=problems), nameserver)
        rows = [
            {"daemon": daemon, **_row(quota, as_json=as_json)}
            for daemon, quotas in sorted(found.items())
            for quota in quotas
        ]
    print_rows(with_problems(rows, problems), as_json=as_json, empty="no quotas are set")


def _row(quota: Quota, *, as_json: bool) -> dict[str, Any]:
    limits = {limit: getattr(quota, limit) for limit in LIMITS["user"]}
    return {
        "of": quota.of,
        "name": quota.name,
        **{
            limit: value if as_json or value is None else shown(limit, value)
            for limit, value in limits.items()
        },
    }
