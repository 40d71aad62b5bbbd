"""Names that the certificates of servers may have: the host of the address, or a broker's own.

Routes hold addresses, often IPs that change while certificates stay. So where a client connects to
an IP, a broker's certificate may also be for ``NAME.CLUSTER``, as its route calls it.
Source: docs/security.md "TLS".
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_protocol.bodies import BrokerData
    from headrace_protocol.tls.settings import ClientTls

_KNOWN_MAX: Final = 20_000
# As certificates can have it.
_NAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})+")


class ServerNames:
    """The names of one client's servers, by address."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        # Addresses whose certificates are for these names; others are for the host, or not known.
        self._proved: set[str] = set()

    def learn(self, brokers: Iterable[BrokerData]) -> None:
        """Note the brokers of a route or a cluster."""
        for broker in brokers:
            for address in broker.broker_addrs.values():
                self.put(address, broker.broker_name, broker.cluster)

    def put(self, address: str, broker_name: str, cluster: str) -> None:
        """Note a broker."""
        name = f"{broker_name}.{cluster}"
        if self._names.get(address) == name or not _NAME.fullmatch(name):
            return
        if len(self._names) >= _KNOWN_MAX:
            self._names.clear()
            self._proved.clear()
        self._names[address] = name
        self._proved.discard(address)

    def of(self, settings: ClientTls, address: str) -> tuple[str, ...]:
        """The names that a certificate may have, the likeliest first. Raises ValueError."""
        host = settings.name_of(address)
        own = self._names.get(address)
        if own is None or settings.server_name is not None or not _is_ip(host):
            return (host,)
        return (own, host) if address in self._proved else (host, own)

    def proved(self, address: str, name: str) -> None:
        """The certificate at an address is for a name."""
        if self._names.get(address) == name:
            self._proved.add(address)
        else:
            self._proved.discard(address)


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
