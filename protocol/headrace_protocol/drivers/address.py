"""Parse and pack ``host:port`` addresses."""

from __future__ import annotations

import socket
import struct
from ipaddress import ip_address


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` (an IPv6 host in brackets). Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r} is not an address: expected HOST:PORT, e.g. 127.0.0.1:9876")
    return host.strip("[]"), int(port)


def check_address(address: str) -> None:
    """Raise ValueError with the way out for what is no address of one server."""
    scheme, separator, rest = address.partition("://")
    if separator:
        raise ValueError(f"{address!r} is a URL: write {rest.strip('/')}, without {scheme}://")
    if "," in address:
        semicolons = address.replace(",", ";")
        raise ValueError(f"{address!r}: separate addresses by semicolons: '{semicolons}'")
    host, _ = split_address(address)
    if ":" in host and not address.startswith("["):
        raise ValueError(f"{address!r} is not an address: expected HOST:PORT, or [IPV6]:PORT")


def pack_host(host: str, port: int) -> bytes:
    """Address and port in the format of message records: 8 bytes for IPv4, 20 for IPv6."""
    return ip_address(host).packed + struct.pack(">i", port)


def local_ip() -> str:
    """This machine's address as other machines see it, found without sending a packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
