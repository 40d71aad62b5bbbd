"""Rate-limited logging of events that clients cause: some lines per host, then a count."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger

# Per host and event, between two reports.
LINES_MAX = 20
# A client may use many addresses: hosts beyond these share one count.
_HOSTS_MAX = 1000
_REPORTED_AT_ONCE = 10


class HostLog:
    """A logger that no host can flood.

    Its owner calls ``report`` every few seconds.
    """

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._counts: Counter[tuple[str, str]] = Counter()

    def info(self, client: str, event: str, **fields: Any) -> None:
        """Log a change that ``client``, "host:port", made."""
        self._write(self._log.info, client, event, fields)

    def warning(self, client: str, event: str, **fields: Any) -> None:
        """Log a problem that ``client``, "host:port", caused."""
        self._write(self._log.warning, client, event, fields)

    def error(self, client: str, event: str, **fields: Any) -> None:
        """Log a fault of ours that ``client`` triggered."""
        self._write(self._log.error, client, event, fields)

    def report(self) -> None:
        """Log how many lines were suppressed since the last report, and reset the counts."""
        counts, self._counts = self._counts, Counter()
        for (host, event), count in counts.most_common(_REPORTED_AT_ONCE):
            if count > LINES_MAX:
                self._log.warning("lines suppressed", of=event, host=host, count=count - LINES_MAX)

    def _write(
        self, write: Callable[..., Any], client: str, event: str, fields: dict[str, Any]
    ) -> None:
        key = client.rpartition(":")[0], event
        if key not in self._counts and len(self._counts) >= _HOSTS_MAX:
            key = "other hosts", event
        self._counts[key] += 1
        if self._counts[key] <= LINES_MAX:
            write(event, client=client, **fields)
