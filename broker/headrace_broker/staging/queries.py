"""The queries with staged writes, and what they take of the memory of their clients' hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from headrace_broker.staging.known import KnownQueries
from headrace_broker.staging.query import Attempt, Phase, Query
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import Lane, RequestError, reason_of
from headrace_protocol.waiting import fetch

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.host_budget import Host, HostBudget
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.staging import Decision

Result = TypeVar("Result")

FOLDER: Final = "staged"
STAGED_WRITES: Final = Lane("staged writes", threads=4, outlives_client=True)
# Memory of each, measured by tests/abuse/test_kept_for_hosts.py.
_QUERY_BYTES: Final = 4096
_ATTEMPT_BYTES: Final = 2048
_DECIDED_BYTES: Final = 512


class Queries(dict[str, Query]):
    """The queries with state or attempts, by id.

    known: names of the queries with a state on disk.
    """

    def __init__(self, store: MessageStore, budget: HostBudget) -> None:
        super().__init__()
        self.root = store.root / FOLDER
        self.known = KnownQueries(store.root, store.fs)
        self._files = store.fs
        self._budget = budget

    def load(self) -> None:
        """Read the state of each query. Raises OSError, StoreFormatError."""
        known = self.known.load()
        for query_id in sorted(known.union(folder.name for folder in self.root.glob("*"))):
            query = self[query_id] = self.new(query_id)
            query.load(is_known=query_id in known)

    def new(self, query_id: str) -> Query:
        """A query without state, which is not kept."""
        return Query(self.root / query_id, self._files, self.drop_attempt, self.known)

    def sound(self, query_id: str) -> Query:
        """A query; one without state is not kept. Raises RequestError if its state is damaged."""
        query = self.get(query_id) or self.new(query_id)
        if query.phase is Phase.DAMAGED:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(query.problem))
        return query

    async def saved(self, query_id: str) -> Query:
        """A query whose state is on disk. Raises RequestError."""
        while not (query := self.sound(query_id)).is_saved:
            await self.in_thread(query.save)
        return query

    def staged_bytes(self, query_id: str) -> int:
        """Bytes of a query's attempts."""
        query = self.get(query_id)
        return sum(each.file_bytes for each in query.attempts.values()) if query else 0

    # -- what hosts have here ----------------------------------------------------------------------

    def register(self, query: Query, host: Host) -> None:
        """Keep a query that now has state, and count it for ``host``. Raises RequestError."""
        query_id = query.folder.name
        if query_id not in self:
            self._budget.keep(host, ("query", query_id), _QUERY_BYTES)
            self[query_id] = query

    def begin_attempt(self, query: Query, batch_id: int, name: str, host: Host) -> Attempt:
        """A new attempt, counted for ``host``. Raises RequestError."""
        self.register(query, host)
        self._budget.keep(host, (query.folder.name, batch_id, name), _ATTEMPT_BYTES)
        attempt = query.attempts[batch_id, name] = Attempt(query.path(batch_id, name))
        return attempt

    def count_decision(self, query: Query, decision: Decision, host: Host) -> None:
        """Keep a query with a decision, and count both for ``host``. Raises RequestError."""
        self.register(query, host)
        self._budget.keep(host, ("decision", query.folder.name), _decision_bytes(decision))

    def drop(self, query: Query) -> None:
        """Forget a query."""
        query_id = query.folder.name
        self.pop(query_id, None)
        self._budget.drop(("query", query_id))
        self._budget.drop(("decision", query_id))

    def drop_attempt(self, query: Query, batch_id: int, name: str) -> None:
        """Forget an attempt."""
        query.attempts.pop((batch_id, name), None)
        self._budget.drop((query.folder.name, batch_id, name))

    # -- files -------------------------------------------------------------------------------------

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """The result of work on files. Raises RequestError."""
        try:
            return await fetch(work, STAGED_WRITES)
        except OSError as error:
            raise self.unavailable(error) from error

    def unavailable(self, error: OSError) -> RequestError:
        """The answer where files can't be written or read."""
        return RequestError(
            ResponseCode.SERVICE_NOT_AVAILABLE,
            f"staged writes can't be kept: {reason_of(error)} "
            f"({error.filename or self.root}); free space or repair the disk, then write again",
        )


def _decision_bytes(decision: Decision) -> int:
    """Estimated memory of a decision."""
    chars = len(decision.decision_id) + sum(map(len, decision.attempts))
    attempts = sum(map(len, decision.attempts.values()))
    return 4 * chars + _DECIDED_BYTES * (1 + len(decision.attempts) + attempts)
