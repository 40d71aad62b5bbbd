"""Checks of a daemon's ports before it listens on them."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from headrace_daemon.serving.listen import bind

if TYPE_CHECKING:
    from collections.abc import Mapping

# Apache RocketMQ's distance between both ports: 10909 beside 10911.
_FAST_DISTANCE: Final = 2


def fast_port(port: int, setting: int) -> int:
    """The second port of a server on ``port``; 0 or less: none, or not known yet.

    setting: -1 for the port below by two.
    """
    return port - _FAST_DISTANCE if setting < 0 else setting


def equal_ports(ports: Mapping[str, int]) -> str | None:
    """The setting that names the port of another, and which other."""
    names: dict[int, str] = {}
    for name, port in ports.items():
        if port > 0 and names.setdefault(port, name) != name:
            return f"{name}={port}: {names[port]} is the same port, choose another"
    return None


def listening_problem(host: str, ports: Mapping[str, int]) -> str | None:
    """The reason for which no daemon could listen there. A port in use is none: it may run."""
    for name, port in ports.items():
        try:
            if port >= 0:
                bind(host, port).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"{name}: {error.strerror}"
    return None
