"""Command line of the broker alone, without client code: ``python -m headrace_broker.main``."""

from __future__ import annotations

import headrace_daemon.lean  # noqa: F401 - before what loads structlog

# isort: split
import sys
from typing import TYPE_CHECKING

import trio

from headrace_broker.access.opening import check_users
from headrace_broker.cluster.expected_store import check_never_left, check_store
from headrace_broker.cluster.registration import IdentityTaken
from headrace_broker.config import ConfigError
from headrace_broker.server import Broker, log_warnings
from headrace_broker.settings.files import load_config
from headrace_broker.store.errors import StoreError
from headrace_daemon.access.errors import AccessError
from headrace_daemon.command import daemon_parser, run_daemon
from headrace_daemon.logs import configure_logs
from headrace_daemon.network import tcp_network
from headrace_daemon.process import prepare, run_until_signal
from headrace_daemon.serving.ports import listening_problem
from headrace_protocol.errors import reason_of
from headrace_protocol.tls.settings import TlsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace_broker.config import BrokerConfig


def serve(config: Path, *, check_config: bool, log_level: str) -> None:
    """Run a broker until SIGINT or SIGTERM.

    check_config: only read the file, try the addresses to listen on and the location of tiered
    storage, ask for a lost store, and print warnings and what was checked.
    Raises ConfigError, or the errors of ``Broker.run`` in an ExceptionGroup.
    """
    settings, warnings = load_config(config)
    check_store(settings)
    if not settings.nameservers:
        warnings.append(
            f"{config}: namesrvAddr is not set, so no client will find this broker: name the "
            "nameservers to register with"
        )
    network = tcp_network(settings.tls_config_file, warnings)
    if check_config:
        if problem := listening_problem(settings.bind_address, settings.ports()):
            raise ConfigError([problem])
        check_users(settings)
        trio.run(check_never_left, settings, network)
        _check_tier(settings)
        sys.stderr.writelines(f"headrace: {warning}\n" for warning in warnings)
        sys.stderr.write(
            f"{config} is valid: broker {settings.broker_name} on {settings.bind_address}:"
            f"{settings.listen_port}, store {settings.store_path_root_dir}, nameservers "
            f"{settings.namesrv_addr or 'none'}\n"
        )
        return
    prepare()
    configure_logs(log_level)
    log_warnings(warnings)
    trio.run(run_until_signal, Broker(settings, network, owns_loop=True).run)


def _check_tier(config: BrokerConfig) -> None:
    """Put, read and remove one object in tiered storage, if it is on. Raises ConfigError."""
    if not config.message_store_plug_in:
        return
    from headrace_broker.tiered.access.drivers import mark_file
    from headrace_broker.tiered.access.probe import probe
    from headrace_broker.tiered.rescue.listing import open_driver
    from headrace_protocol.tier.paths import Home

    home = Home(config.broker_cluster_name, config.broker_name)
    tier = config.tier_settings(config.store_path_root_dir, home)
    assert tier is not None
    if not tier.is_lasting:
        return
    try:
        if tier.folder is not None and mark_file(tier.root).load() is None:
            tier.folder.mkdir(parents=True, exist_ok=True)  # as the first start
        problem = probe(open_driver(tier))
    except (StoreError, OSError) as error:
        problem = reason_of(error)
    if problem:
        where = f"{config.tiered_backend_service_provider} {tier.folder or ''}".strip()
        raise ConfigError([f"tiered storage ({where}): {problem}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = daemon_parser(
        "headrace_broker.main", "Run a broker until SIGINT or SIGTERM.", needs_config=True
    ).parse_args(arguments)
    return run_daemon(
        lambda: serve(
            options.config, check_config=options.check_config, log_level=options.log_level
        ),
        ConfigError,
        (StoreError, IdentityTaken, TlsError, AccessError),
    )


if __name__ == "__main__":
    sys.exit(main())
