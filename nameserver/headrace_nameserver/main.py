"""The nameserver's command line without client code: ``python -m headrace_nameserver.main``."""

from __future__ import annotations

import headrace_daemon.lean  # noqa: F401 - before what loads structlog

# isort: split
import argparse
import sys
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from headrace_daemon.access.errors import AccessError
from headrace_daemon.access.opening import check_users
from headrace_daemon.command import daemon_parser, run_daemon
from headrace_daemon.logs import configure_logs
from headrace_daemon.network import tcp_network
from headrace_daemon.process import prepare, run_until_signal
from headrace_daemon.serving.ports import listening_problem
from headrace_nameserver.config import ConfigError, NameServerConfig, check_ports, load_config
from headrace_nameserver.server import OWNER, NameServer
from headrace_protocol.tls.settings import TlsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = structlog.get_logger("headrace.nameserver")

_FORGETFUL = (
    "kvConfigPath is not set: a restart forgets which brokers left, and answers without them look "
    "whole; name a file on a disk that stays"
)


def serve(config: Path | None, *, port: int | None, check_config: bool, log_level: str) -> None:
    """Run a nameserver until SIGINT or SIGTERM.

    port: overrides the file's listenPort.
    check_config: check the configuration files and the addresses to listen on, print what was
    checked, then return.

    Raises ConfigError, AccessError, or an ExceptionGroup with the errors of ``NameServer.run``.
    """
    settings = load_config(config) if config else NameServerConfig()
    if port is not None:
        settings = msgspec.structs.replace(settings, listen_port=port)
    check_ports(settings)
    warnings = [] if settings.kv_config_path else [_FORGETFUL]
    server = NameServer(settings, tcp_network(settings.tls_config_file, warnings))
    if check_config:
        if settings.users_path is not None:
            check_users(settings.access_config(), settings.users_path, OWNER)
        if problem := listening_problem(settings.bind_address, settings.ports()):
            raise ConfigError(problem)
        sys.stderr.writelines(f"headrace: {warning}\n" for warning in warnings)
        sys.stderr.write(
            f"{config or 'default settings'}: valid, nameserver on {settings.bind_address}:"
            f"{settings.listen_port}\n"
        )
        return
    prepare()
    configure_logs(log_level)
    for warning in warnings:
        log.warning(warning)
    trio.run(run_until_signal, server.run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = daemon_parser(
        "headrace_nameserver.main", "Run a nameserver until SIGINT or SIGTERM.", needs_config=False
    )
    parser.add_argument(
        "--port", type=_port, help="port to listen on; overrides listenPort of the file"
    )
    options = parser.parse_args(arguments)
    return run_daemon(
        lambda: serve(
            options.config,
            port=options.port,
            check_config=options.check_config,
            log_level=options.log_level,
        ),
        ConfigError,
        (AccessError, TlsError),
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 0xFFFF:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: expected a number up to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
