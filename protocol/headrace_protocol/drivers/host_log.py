"""Log lines that strangers can cause: so many of each host, and the number of the rest."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

# Per host and event, between two reports.
LINES_MAX = 20
# A stranger may have many addresses.
_HOSTS_MAX = 1000
_REPORTED_AT_ONCE = 10


class HostLog:
    """A logger that no host can flood.

    Whoever owns it calls ``report`` every few seconds.
    """

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._counts: Counter[tuple[str, str]] = Counter()

    def info(self, client: str, event: str, **fields: Any) -> None:
        """Log what ``client``, "host:port", has changed."""
        if self._has_room(client, event):
            self._log.info(event, client=client, **fields)

    def warning(self, client: str, event: str, **fields: Any) -> None:
        """Log what ``client``, "host:port", has caused."""
        if self._has_room(client, event):
            self._log.warning(event, client=client, **fields)

    def error(self, client: str, event: str, **fields: Any) -> None:
        """The same for a fault of ours."""
        if self._has_room(client, event):
            self._log.error(event, client=client, **fields)

    def report(self) -> None:
        """Log how many lines were left out since the last report, and let hosts have new ones."""
        counts, self._counts = self._counts, Counter()
        for (host, event), count in counts.most_common(_REPORTED_AT_ONCE):
            if count > LINES_MAX:
                self._log.warning("lines left out", of=event, host=host, count=count - LINES_MAX)

    def _has_room(self, client: str, event: str) -> bool:
        key = client.rpartition(":")[0], event
        if key not in self._counts and len(self._counts) >= _HOSTS_MAX:
            key = "other hosts", event
        self._counts[key] += 1
        return self._counts[key] <= LINES_MAX
