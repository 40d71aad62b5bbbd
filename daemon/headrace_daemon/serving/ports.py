"""A daemon's ports: checks before it listens on them, and listening sockets."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Final

from headrace_protocol.errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

# Apache RocketMQ's distance between both ports: 10909 beside 10911.
_FAST_DISTANCE: Final = 2
_BACKLOG: Final = 1024


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
                return f"{name}: {reason_of(error)}"
    return None


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises OSError with the address and a remedy."""
    return bind(host, port, _BACKLOG)


def bind(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Open a socket at an address, and listen with a backlog. Raises OSError as ``listen``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        if backlog is not None:
            listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, _listen_failed(host, port, error)) from error
    return listener


def _listen_failed(host: str, port: int, error: OSError) -> str:
    remedy = {
        errno.EADDRINUSE: "another process listens there: stop it or choose another port",
        errno.EACCES: "only root may use ports below 1024: choose a higher one",
        errno.EADDRNOTAVAIL: "no interface of this machine has that address",
    }.get(error.errno or 0, "choose another address or port")
    return f"can't listen on {host}:{port}: {reason_of(error)}; {remedy}"
