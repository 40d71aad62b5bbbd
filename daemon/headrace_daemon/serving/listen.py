"""Listening sockets."""

from __future__ import annotations

import errno
import socket

_BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises OSError with the address and a remedy.
    """
    listener = bind(host, port)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, _listen_failed(host, port, error)) from error
    return listener


def bind(host: str, port: int) -> socket.socket:
    """Open a socket at an address. Raises OSError with the address and a remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
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
    return f"can't listen on {host}:{port}: {error.strerror}; {remedy}"
