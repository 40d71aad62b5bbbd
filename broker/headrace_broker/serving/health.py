"""Resources held by clients, stalls and errors, for the runtime info."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from headrace_daemon.logs import dropped_log_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.feature import Feature
    from headrace_daemon.services import Services
    from headrace_daemon.serving.server import RemotingServer
    from headrace_daemon.watchdog import Watchdog


class Health:
    """Counts of a running broker.

    added: returns the features, with what they report and the files that services write.
    """

    def __init__(
        self,
        server: RemotingServer,
        long_polling: LongPolling,
        watchdog: Watchdog,
        supervisor: Services,
        added: Callable[[], Feature],
    ) -> None:
        self._server = server
        self._long_polling = long_polling
        self._watchdog = watchdog
        self._supervisor = supervisor
        self._added = added

    def __call__(self) -> dict[str, str]:
        """The counts by their names in the answer to GET_BROKER_RUNTIME_INFO."""
        longest, busiest = self._watchdog.longest, self._watchdog.busiest
        return {
            "connectionCount": str(len(self._server.channels)),
            "heldPullCount": str(self._long_polling.held_count),
            # The tasks of the whole loop, including those of a program that embeds the broker.
            "taskCount": str(trio.lowlevel.current_statistics().tasks_living),
            "heldBytes": str(self._server.held_bytes),
            "longestLoopStallMs": f"{longest.ms:.1f}",
            "longestLoopStallRan": longest.ran,
            "longestLoopStallCpuMs": f"{busiest.cpu_ms:.1f}",
            "longestLoopStallCpuRan": busiest.ran,
            "loopStallCount": str(self._watchdog.stall_count),
            "longestGarbageCollectionMs": f"{self._watchdog.longest_collection_ms:.1f}",
            "droppedLogLines": str(dropped_log_lines()),
            **{
                name: value for info in self._added().runtime_info for name, value in info().items()
            },
            "unexpectedErrors": str(self.unexpected_errors()),
        }

    def unexpected_errors(self) -> int:
        """The number of unexpected errors in services, requests and writes of tables."""
        return (
            self._supervisor.unexpected_errors
            + self._server.unexpected_errors
            + sum(file.unexpected_errors for file in self._added().tables)
        )
