"""Bounds per host on state that outlives connections, such as groups, topics, offsets and locks.

State that ends with a connection is charged to its channel instead.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from headrace_protocol.channel import Channel

Made = Literal["topics", "groups"]

# About 20,000 groups or 60,000 topics.
HOST_BYTES_MAX = 64 * 1024 * 1024
_IPV4_BYTES = 8
_LOOPBACK = bytes((127, 0, 0, 1))
_LOOPBACK_V6 = bytes(15) + b"\1"
_MAPPED = bytes(10) + b"\xff\xff"


class Host(bytes):
    """The unit of accounting: an IPv4 address, or the /64 network of an IPv6 address.

    This machine is one host, whichever of its loopback addresses a client uses.
    """

    __slots__ = ()

    @classmethod
    def of(cls, channel: Channel) -> Host:
        """The host of a client. An IPv6 /64 network is usually one machine or household."""
        return cls.of_address(channel.host_bytes)

    @classmethod
    def of_address(cls, host_bytes: bytes) -> Host:
        """The host of an address and port, as in records."""
        if len(host_bytes) == _IPV4_BYTES:
            return cls(_LOOPBACK if host_bytes[0] == _LOOPBACK[0] else host_bytes[:4])
        if host_bytes[: len(_MAPPED)] == _MAPPED:  # an IPv4 address on an IPv6 socket
            return cls.of_address(host_bytes[len(_MAPPED) :])
        return cls(_LOOPBACK if host_bytes[:16] == _LOOPBACK_V6 else host_bytes[:8])


class Makers:
    """Notes the makers of topics and groups. See ``quotas/owners.py``; this one ignores them."""

    def check(self, kind: Made, count: int) -> None:
        """Raise RequestError if the client of the request may not make so many."""

    def made(self, kind: Made, names: Collection[str]) -> None:
        """Note that the request made some, after ``check``."""

    def gone(self, kind: Made, name: str) -> None:
        """Note a deletion."""


class HostBudget:
    """Counts bytes by host, and rejects entries beyond the bound.

    Entries loaded at the start count for no host, except undecided transactions, whose records
    name it.
    makers: who makes topics and groups.
    """

    def __init__(self, bytes_max: int = HOST_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.makers = Makers()
        self._host_bytes: Counter[Host] = Counter()
        self._kept: dict[Hashable, tuple[Host, int]] = {}

    def kept_bytes(self, host: Host) -> int:
        """Bytes that count for a host."""
        return self._host_bytes[host]

    def keep(self, host: Host, entry: Hashable, entry_bytes: int) -> None:
        """Count a new or replaced entry of some table for ``host``.

        Raises RequestError, and changes nothing, if the host would exceed its bound.
        """
        owner, owned_bytes = self._kept.get(entry, (host, 0))
        self.check(host, entry_bytes - (owned_bytes if owner == host else 0))
        self.drop(entry)
        self._kept[entry] = host, entry_bytes
        self._host_bytes[host] += entry_bytes

    def check(self, host: Host, more_bytes: int) -> None:
        """Raise RequestError if the host would exceed its bound."""
        if self._host_bytes[host] + more_bytes > self.bytes_max:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                "groups, topics, offsets, locks, staged writes and undecided transactions created "
                f"by requests of your host take {self.bytes_max >> 20} MiB, the maximum for a "
                "host: delete or decide some, or create topics and groups with `headrace topic "
                "create` and mqadmin updateSubGroup, which do not count",
            )

    def add(self, host: Host, more_bytes: int) -> None:
        """Count more bytes for a host, or fewer, whatever its bound: their records are stored."""
        self._host_bytes[host] += more_bytes
        if not self._host_bytes[host]:
            del self._host_bytes[host]

    def drop(self, entry: Hashable) -> None:
        """Stop counting an entry; does nothing if it counts for no host."""
        if (kept := self._kept.pop(entry, None)) is None:
            return
        host, entry_bytes = kept
        self.add(host, -entry_bytes)
