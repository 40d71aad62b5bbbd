"""A running peer together with the JVM that loads it: what all groups of cases share."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from headrace import Admin
from tests.bench.driver import Driver, Report
from tests.conformance.peer import Peer, running
from tests.conformance.probe import Signer, wait_for_send

PEERS = ("apache", "headrace")
FIRST_SEND_TIMEOUT_S = 60

SENDS: dict[str, dict[str, Any]] = {
    "sync-1": {"work": "sync", "threads": 1},
    "sync-32": {"work": "sync", "threads": 32},
    "async-1000": {"work": "async", "inFlight": 1000},
    "batch-100": {"work": "batch", "threads": 1},
}


@dataclass(frozen=True)
class Load:
    """One peer, from its start to its end.

    first_send_s: from its first process to the first message that it accepted.
    """

    peer: Peer
    driver: Driver
    first_send_s: float

    def job(
        self,
        work: dict[str, Any],
        topic: str = "",
        body_bytes: int = 0,
        *,
        messages: int = 0,
        seconds: float = 0,
    ) -> Report:
        """The JVM's measurements of a job; see ``headrace.bench.Job``."""
        return self.driver.run(
            {
                "nameserver": self.peer.nameserver,
                "topic": topic,
                "group": f"{work['work']}_{topic}",
                "bodyBytes": body_bytes,
                "seconds": seconds,
                "messages": messages,
                "brokerPid": self.peer.broker_pid,
                **work,
            }
        )

    def create_batched(self, *topics: str) -> None:
        """Create topics with batch queues, as many queues as others get by their first send."""
        anyio.run(self._create_batched, topics)

    async def _create_batched(self, topics: Sequence[str]) -> None:
        async with Admin(nameserver=self.peer.nameserver) as admin:
            for topic in topics:
                await admin.create_topic(topic, queues=4, attributes={"queue.type": "BatchCQ"})

    def warm_up(self, seconds: float, body_bytes: int) -> None:
        """Starts the producer; then every kind of sending, ``seconds`` each."""
        self.job({"work": "open"})
        for send in SENDS.values():
            self.job(send, "WARM_UP", body_bytes, seconds=seconds)


@contextlib.contextmanager
def loaded(
    name: str,
    directory: Path,
    *,
    settings: Mapping[str, str] | None = None,
    nameserver_settings: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    signer: Signer | None = None,
) -> Iterator[Load]:
    """A fresh peer that has accepted its first message, and a fresh JVM.

    A new JVM for each, so that none finds its client warmed up by the other.
    settings, nameserver_settings: see ``running``. options: more of the JVM's.
    signer: of the first message.
    """
    with (
        Driver(directory, options) as driver,
        running(
            name, directory, settings=settings, nameserver_settings=nameserver_settings
        ) as peer,
    ):
        wait_for_send(peer.broker, FIRST_SEND_TIMEOUT_S, signer)
        yield Load(peer, driver, time.monotonic() - peer.started)


def say(line: str) -> None:
    """Progress goes to standard error, results to standard output."""
    sys.stderr.write(line + "\n")
