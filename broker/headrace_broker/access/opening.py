"""Opening of the broker's access control: its users are a file in the store's directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_daemon.access import opening

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.config import BrokerConfig
    from headrace_broker.store.files.filesystem import Files
    from headrace_daemon.access.opening import OpenedAccess
    from headrace_daemon.host_log import HostLog


def open_access(config: BrokerConfig, files: Files, log: HostLog) -> OpenedAccess:
    """See ``opening.open_access``. files: of the store. log: for changes by clients.

    Raises AccessError.
    """
    return opening.open_access(
        config.access_config(),
        _path(config),
        _owner(config),
        config.broker_cluster_name,
        log,
        files.replace,
    )


def check_users(config: BrokerConfig) -> None:
    """Raise AccessError if a start would fail; writes nothing."""
    opening.check_users(config.access_config(), _path(config), _owner(config))


def _path(config: BrokerConfig) -> Path:
    return config.store_path_root_dir / "config" / "users.json"


def _owner(config: BrokerConfig) -> str:
    return f"broker {config.broker_cluster_name}/{config.broker_name}"
