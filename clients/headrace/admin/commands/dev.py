"""``headrace dev``: runs a nameserver and a broker in one process."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.admin import options
from headrace_daemon.command import warn

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from headrace.embedded import DaemonOptions, Embedded
    from headrace_broker.store.recovery import LoadStage


@options.command(
    "dev",
    "headrace dev",
    "headrace dev --data ./messages --nameserver-port 0 --broker-port 0",
    "headrace dev --secure --data ./messages",
    "headrace dev --set fileReservedTime=1 --set autoCreateTopicEnable=false",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory to keep the messages in. Default: a temporary one, deleted at the end.",
)
@click.option(
    "--log-file-mib",
    type=click.IntRange(16, 1024),
    default=64,
    show_default=True,
    metavar="MIB",
    help="Size of the log's files; a store keeps the size of its first start.",
)
@click.option(
    "--nameserver-port",
    type=options.port,
    default=9876,
    show_default=True,
    metavar="PORT",
    help="Port of the nameserver; 0 selects any free port.",
)
@click.option(
    "--broker-port",
    type=options.port,
    default=10911,
    show_default=True,
    metavar="PORT",
    help="Port of the broker; 0 selects any free port.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on; without --secure, 0.0.0.0 gives everyone on the network full "
    "access.",
)
@click.option(
    "--secure",
    is_flag=True,
    help="Serve users with TLS only; makes an authority, a certificate and the Super user root, "
    "and the context dev by which commands and clients of this user find them.",
)
@click.option(
    "--config",
    "-c",
    "config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with more settings of the broker, as lines key=value; see conf/broker.conf.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Setting of the broker, with precedence over the file; may be repeated.",
)
@options.log_level("warning")
def command(
    data: Path | None,
    log_file_mib: int,
    nameserver_port: int,
    broker_port: int,
    host: str,
    config: Path | None,
    changes: tuple[str, ...],
    log_level: str,
    *,
    secure: bool,
) -> None:
    """Run a nameserver and a broker in one process.

    They run until SIGINT (Ctrl-C) or SIGTERM.

    Prints one line once it accepts messages: ready nameserver=HOST:PORT broker=HOST:PORT data=DIR
    """
    import headrace_daemon.lean  # noqa: F401 - before what loads structlog

    # isort: split
    import trio

    from headrace.embedded import DaemonOptions
    from headrace_daemon.logs import configure_logs
    from headrace_daemon.process import prepare

    settings = _settings(config, changes)
    prepare()
    configure_logs(log_level)
    listening = DaemonOptions(
        host,
        nameserver_port,
        broker_port,
        log_file_mib << 20,
        settings,
        users={} if secure else None,
        is_encrypted=secure,
    )
    if secure:
        from headrace.admin.dev_context import check_context

        check_context()
    trio.run(_run, data, listening)


# Settings that options of this command choose.
_OPTIONS = {
    "bindAddress": "--host",
    "anonymousAccess": "--host",
    "listenPort": "--broker-port",
    "namesrvAddr": "--nameserver-port",
    "storePathRootDir": "--data",
}


def _settings(config: Path | None, changes: tuple[str, ...]) -> dict[str, str]:
    """Settings by key. Raises ConfigError that names the line of each unusable one."""
    from headrace_broker.config import BrokerConfig, ConfigError
    from headrace_broker.settings.files import read_settings

    values, origins, warnings = read_settings("\n".join(changes), "--set")
    if config:
        in_file = read_settings(config.read_text(), str(config))
        values, origins = in_file[0] | values, in_file[1] | origins
        warnings += in_file[2]
    if values:
        BrokerConfig().changed(values, origins)
    if taken := [
        f"{origins[key]}: {key}: use {_OPTIONS[key]}" for key in values if key in _OPTIONS
    ]:
        raise ConfigError(taken)
    for warning in warnings:
        warn(warning)
    return values


async def _run(data: Path | None, options: DaemonOptions) -> None:
    import signal

    import trio

    from headrace.embedded import run_daemons
    from headrace_daemon.collector import settle
    from headrace_daemon.network import TcpNetwork
    from headrace_daemon.process import give_back_freed_memory
    from headrace_daemon.services import Services

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with (
            run_daemons(
                data,
                options,
                network=TcpNetwork(),
                owns_loop=True,
                on_progress=_show_progress if sys.stderr.isatty() else None,
            ) as running,
            trio.open_nursery() as nursery,
        ):
            Services().start_soon(nursery, give_back_freed_memory)
            settle()
            with _context(running) if options.is_encrypted else nullcontext():
                _say_ready(running)
                async for _ in signals:
                    break
            nursery.cancel_scope.cancel()


def _context(running: Embedded) -> AbstractContextManager[None]:
    from headrace.admin.dev_context import context_of

    return context_of(running)


def _say_ready(running: Embedded) -> None:
    sys.stdout.write(
        f"ready nameserver={running.nameserver} broker={running.broker} data={running.data}\n"
    )
    sys.stdout.flush()
    if sys.stdout.isatty():
        _suggest(running)


def _suggest(running: Embedded) -> None:
    from headrace.admin.suggestions import suggest
    from headrace.config import resolve_nameservers

    is_default = resolve_nameservers() == (running.nameserver,)
    option = "" if is_default or running.passwords else f" -n {running.nameserver}"
    suggest(
        {
            f"consume orders -f{option}": "in a second terminal",
            f'send orders "first order"{option}': "in a third one",
        }
    )


def _show_progress(stage: LoadStage, done: int, most: int) -> None:
    if stage == "queues":
        text = f"loading queues: {done} of {most}"
    else:
        text = f"reading the log: {done >> 20} of at most {most >> 20} MiB"
    end = "\n" if done == most else ""
    sys.stderr.write(f"\r\x1b[K{text}{end}")
    sys.stderr.flush()
