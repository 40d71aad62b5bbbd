"""The check that brokers register an address of the host that they connect from."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

from headrace_protocol.codes import ResponseCode
from headrace_protocol.drivers.address import split_address
from headrace_protocol.errors import RequestError


def check_own_address(address: str, client: str) -> None:
    """Raise RequestError unless ``address`` is on the host of ``client``; both are host:port."""
    host, source = _ip(address), _ip(client)
    if host is None or not (host == source or (_is_loopback(source) and _is_local(host))):
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            f"{address} cannot be registered from {client}: with registerFromOwnAddress=true a "
            "broker must register the IP address that it connects from; set brokerIP1 to it, or "
            "registerFromOwnAddress=false at this nameserver",
        )


def _ip(address: str) -> IPv4Address | IPv6Address | None:
    try:
        ip = ip_address(split_address(address)[0])
    except ValueError:
        return None
    return ip.ipv4_mapped or ip if isinstance(ip, IPv6Address) else ip


def _is_loopback(ip: IPv4Address | IPv6Address | None) -> bool:
    return ip is not None and ip.is_loopback


def _is_local(ip: IPv4Address | IPv6Address) -> bool:
    """True if an address belongs to this machine. Tries to bind it, sends no packet.

    A broker on the nameserver's machine connects over loopback and registers a public address.
    """
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return False
    return True
