"""The queues of staged blocks: a logic queue of a static topic may move while its blocks wait.

A decision is final, so a queue moves away only when the batches decided for it are in the log, and
no batch is decided for a queue that has moved or is about to.
Source: docs/protocol.md "Staged writes"; tests/broker/statictopic/test_static_staging.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import trio

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace_broker.staging.query import Query
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.serving import RunLong

_POLL_S = 0.01
# The client that decides a batch at several brokers then commits it at once.
_PENDING_S = 3.0

QueueNames = frozenset[tuple[str, int]]


class Queues(Protocol):
    """The queues of this broker, as staged blocks name them."""

    def can_move(self) -> bool:
        """True if any queue of this broker may move to another one."""

    def has_moved(self, topic: str, queue_id: int) -> bool:
        """True if a queue that clients know by this id is written at another broker."""

    def queue(self, topic: str, queue_id: int) -> StoreQueue:
        """The queue to append to. Raises StoreError if it has moved."""


class PendingBatch(RequestError):
    """A queue can't move, because a batch is decided for it and not committed."""

    def __init__(self, query_id: str, topic: str, folder: str) -> None:
        super().__init__(
            ResponseCode.ILLEGAL_OPERATION,
            f"query {query_id} has a decided batch with records for topic {topic} that is not "
            "committed: let the query resume, or stop the broker and remove "
            f"{folder} to give the query up",
        )


class Settling(NamedTuple):
    """A wait for the batches that are decided for some queues.

    deadline: by trio's clock; None until a batch is found for which it waits.
    """

    queues: QueueNames
    deadline: float | None
    then: Callable[[Exception | None], None]


class Settlements:
    """Waits until no batch is pending for queues that are to move."""

    def __init__(
        self,
        pending: Callable[[QueueNames], Iterable[Query | None]],
        resume: Callable[[Query], None],
        run_long: RunLong,
    ) -> None:
        """pending: the queries with a pending batch for one of the queues; None for a break.

        resume: applies a pending batch if this broker may. run_long: runs a look in slices.
        """
        self.closing: set[tuple[str, int]] = set()
        self._pending = pending
        self._resume = resume
        self._run_long = run_long
        self._waiting: list[Settling] = []
        self._has_work = trio.Event()

    def begin(self, queues: QueueNames, then: Callable[[Exception | None], None]) -> None:
        """Call back once nothing is pending."""
        self.closing |= queues
        self._run_long(self._look(Settling(queues, None, then), resumes=True))

    def end(self, queues: QueueNames) -> None:
        """The queues have moved, or will not."""
        self.closing -= queues

    async def run(self) -> None:
        """Call back those that wait, until cancelled."""
        while True:
            await self._has_work.wait()
            self._has_work = trio.Event()
            while self._waiting:
                await trio.sleep(_POLL_S)
                waiting, self._waiting = self._waiting, []
                for each in waiting:
                    self._run_long(self._look(each, resumes=False))

    def _look(self, settling: Settling, *, resumes: bool) -> Iterator[None]:
        """Call back unless a batch is pending. resumes: have each pending batch applied."""
        pending: Query | None = None
        for query in self._pending(settling.queues):
            if query is None:
                yield
                continue
            pending = query
            if not resumes:
                break
            self._resume(query)
        if pending is None:
            settling.then(None)
            return
        now = trio.current_time()
        deadline = settling.deadline or now + _PENDING_S
        if now < deadline:
            self._waiting.append(settling._replace(deadline=deadline))
            self._has_work.set()
        else:
            topic = next(iter(settling.queues))[0]
            settling.then(PendingBatch(pending.folder.name, topic, str(pending.folder)))
