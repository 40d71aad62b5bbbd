"""The progress of a broker's start and stop, as its monitor reports it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from headrace_daemon.metrics.scrapes import NotServing

if TYPE_CHECKING:
    from collections.abc import Callable


class State(StrEnum):
    """State of a broker, in the order of its life."""

    LOADING = "loading"
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(slots=True)
class Readiness:
    """Progress and health of a broker; written by its loop and threads, read by the monitor's.

    done_queues, queue_count: ConsumeQueues that the start has checked, and their total.
    done_bytes, bytes_max: bytes of the log that it has read again after that, and the maximum.
    failure: while serving, returns why sends are rejected until the next start, or None.
    followers: while serving, returns how far behind each follower of the store is.
    page: while serving, returns the broker's metrics.
    """

    state: State = State.LOADING
    done_queues: int = 0
    queue_count: int = 0
    done_bytes: int = 0
    bytes_max: int = 0
    failure: Callable[[], str | None] = lambda: None
    followers: Callable[[], dict[str, dict[str, Any]]] = dict
    page: Callable[[], bytes] = lambda: b""

    def report(self) -> tuple[bool, dict[str, Any]]:
        """True if the broker accepts messages, and the details for the answer."""
        report: dict[str, Any] = {"state": self.state}
        if self.state is State.LOADING:
            report |= {
                "doneQueues": self.done_queues,
                "queues": self.queue_count,
                "doneBytes": self.done_bytes,
                "atMostBytes": self.bytes_max,
            }
        failure = self.failure() if self.state is State.SERVING else None
        if failure:
            report["failure"] = failure
        followers = self.followers() if self.state is State.SERVING else {}
        if followers:
            report["followers"] = followers
        return self.state is State.SERVING and not failure, report

    def metrics(self) -> bytes:
        """Metrics of a broker that serves; called in a thread. Raises NotServing."""
        if self.state is not State.SERVING:
            raise NotServing(f"the broker is {self.state}")
        return self.page()
