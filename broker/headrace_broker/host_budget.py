"""What hosts make the broker keep beyond their connections, e.g. groups, topics, offsets and locks.

What ends with a connection is charged to its channel instead.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from headrace_protocol.serving import Channel

# Some 20,000 groups or 60,000 topics.
HOST_BYTES_MAX = 64 * 1024 * 1024
_IPV4_BYTES = 8


class Host(bytes):
    """Whose requests count together: an IPv4 address, or the network that an IPv6 address is of."""

    __slots__ = ()

    @classmethod
    def of(cls, channel: Channel) -> Host:
        """The host of a client. An IPv6 network (/64) mostly is one machine or household."""
        host = channel.host_bytes
        return cls(host[:4] if len(host) == _IPV4_BYTES else host[:8])


class HostBudget:
    """Counts bytes by host and refuses what would be too much.

    Nothing is known of what was there before the start: it counts for nobody.
    """

    def __init__(self, bytes_max: int = HOST_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._host_bytes: Counter[Host] = Counter()
        self._kept: dict[Hashable, tuple[Host, int]] = {}

    def kept_bytes(self, host: Host) -> int:
        """How much is kept for a host."""
        return self._host_bytes[host]

    def keep(self, host: Host, entry: Hashable, entry_bytes: int) -> None:
        """Count an entry of some table, which may have been kept before, for ``host``.

        Raises RequestError when the host may not have that much; then all is as before.
        """
        owner, owned_bytes = self._kept.get(entry, (host, 0))
        freed_bytes = owned_bytes if owner == host else 0
        if self._host_bytes[host] + entry_bytes - freed_bytes > self._bytes_max:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"requests of your host make this broker keep {self._bytes_max >> 20} MiB of "
                "groups, topics, offsets, locks and staged writes, the most that one host may: "
                "delete what is not needed, or create topics and groups with `headrace topic "
                "create` and mqadmin updateSubGroup",
            )
        self.drop(entry)
        self._kept[entry] = host, entry_bytes
        self._host_bytes[host] += entry_bytes

    def drop(self, entry: Hashable) -> None:
        """An entry is gone; nothing if it was not kept for a host."""
        if (kept := self._kept.pop(entry, None)) is None:
            return
        host, entry_bytes = kept
        self._host_bytes[host] -= entry_bytes
        if not self._host_bytes[host]:
            del self._host_bytes[host]
