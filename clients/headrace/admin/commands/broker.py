"""``headrace broker``: the daemon that stores messages, and the settings of running ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import options
from headrace.admin.failures import NotFound
from headrace.admin.output import print_rows, warned, with_problems
from headrace.admin.running import run_admin
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.admin.client import Admin
    from headrace.admin.requests import BrokerNode


@options.group(
    "broker",
    "headrace broker -c conf/broker.conf",
    "headrace broker -c conf/broker.conf --check-config",
    "headrace broker config get fileReservedTime",
    invoke_without_command=True,
)
@click.option(
    "--config",
    "-c",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with lines key=value; see conf/broker.conf.",
)
@options.check_config
@options.log_level("info")
@click.pass_context
def command(
    context: click.Context, config: Path | None, log_level: str, *, check_config: bool
) -> None:
    """Run a broker, or read and change the settings of running ones.

    A broker stores messages and hands them to consumers. It runs until SIGINT (Ctrl-C) or SIGTERM.
    """
    if context.invoked_subcommand is not None:
        return
    if config is None:
        raise click.UsageError("Missing option '--config' / '-c'", context)
    from headrace_broker.main import serve

    serve(config, check_config=check_config, log_level=log_level)


@command.subcommand("forget", "headrace broker forget broker-b --yes")
@click.argument("name", metavar="BROKER")
@options.yes
@options.nameserver
def forget(name: str, nameserver: str | None, *, yes: bool) -> None:
    """Tell all nameservers that a broker that left won't come back.

    From then on reads that lack its messages are no errors any more, and keys of compacted topics
    go to the brokers that are left.
    """
    options.confirm(f"forget broker {name} with the messages that only it has", yes=yes)

    async def run(admin: Admin) -> None:
        if not await admin.forget_broker(name):
            raise NotFound(f"no nameserver remembers a broker {name} that left")

    run_admin(run, nameserver)


@options.group("config", "headrace broker config get")
def config_group() -> None:
    """Read and change the settings of running brokers."""


command.add_command(config_group)


_broker = click.option(
    "--broker", metavar="BROKER", help="Only the broker with this name. Default: all."
)


@config_group.subcommand(
    "get",
    "headrace broker config get fileReservedTime",
    "headrace broker config get --broker broker-a --json",
)
@click.argument("names", metavar="[NAME]...", nargs=-1)
@_broker
@options.answer
def get(
    names: tuple[str, ...], broker: str | None, nameserver: str | None, *, as_json: bool
) -> None:
    """Show settings of running brokers; all of them if none is named."""
    from headrace.admin.requests import BrokerProblem
    from headrace.tasks import gather

    async def run(admin: Admin) -> list[dict[str, Any]]:
        nodes = await _nodes(admin, broker)
        rows = []
        for node, found in zip(
            nodes,
            await gather(lambda node: admin.broker_config(node.address), nodes),
            strict=True,
        ):
            if isinstance(found, HeadraceError):
                problems.append(BrokerProblem(node.broker_name, node.address, found))
            else:
                rows += _rows(node, found, names)
        if problems and not rows:
            raise problems[0].error
        return rows

    with warned() as problems:
        rows = run_admin(run, nameserver)
    print_rows(with_problems(rows, problems), as_json=as_json, empty="no settings")


def _rows(
    node: BrokerNode, settings: dict[str, str], names: tuple[str, ...]
) -> list[dict[str, Any]]:
    for name in names:
        if name not in settings:
            raise NotFound(f"broker {node.broker_name} has no setting {name}")
    return [
        {"broker": node.broker_name, "id": node.broker_id, "name": name, "value": settings[name]}
        for name in names or sorted(settings)
    ]


@config_group.subcommand(
    "set",
    "headrace broker config set fileReservedTime=48",
    "headrace broker config set fileReservedTime=48 --broker broker-a",
)
@click.argument("settings", metavar="NAME=VALUE...", nargs=-1, required=True)
@_broker
@options.answer
def set_config(
    settings: tuple[str, ...], broker: str | None, nameserver: str | None, *, as_json: bool
) -> None:
    """Change settings of running brokers, and show them.

    A broker refuses those that it reads only at its start. All brokers are tried before the
    command fails with the error of one.
    """
    from headrace.tasks import gather_or_raise

    changes = options.pairs(settings, "setting")

    async def run(admin: Admin) -> list[dict[str, Any]]:
        nodes = await _nodes(admin, broker)

        async def change(node: BrokerNode) -> list[dict[str, Any]]:
            await admin.update_broker_config(node.address, changes)
            return _rows(node, await admin.broker_config(node.address), tuple(changes))

        return [row for rows in await gather_or_raise(change, nodes) for row in rows]

    print_rows(run_admin(run, nameserver), as_json=as_json, empty="no settings")


async def _nodes(admin: Admin, broker: str | None) -> list[BrokerNode]:
    nodes = [node for node in await admin.cluster() if broker in {None, node.broker_name}]
    if not nodes:
        raise NotFound(
            f"no broker named {broker} has registered; see `headrace cluster`"
            if broker
            else "no broker has registered; see `headrace doctor`"
        )
    return nodes
