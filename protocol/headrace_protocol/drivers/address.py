"""Parse and pack ``host:port`` addresses."""

from __future__ import annotations

import struct
from ipaddress import ip_address


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` (an IPv6 host in brackets). Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r} is not an address: expected HOST:PORT, e.g. 127.0.0.1:9876")
    return host.strip("[]"), int(port)


def pack_host(host: str, port: int) -> bytes:
    """Address and port in the format of message records: 8 bytes for IPv4, 20 for IPv6."""
    return ip_address(host).packed + struct.pack(">i", port)
