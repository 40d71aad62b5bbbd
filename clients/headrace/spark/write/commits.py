"""The driver's side of staged writes: commit a micro-batch's attempts at all brokers or at none.

The committer first queries every headrace broker registered with the nameserver for its state of
the query, then sends the decision to all of them, and only then has the brokers with a part in it
apply it. A later commit of the same micro-batch finds the decision at any broker and follows it.
Source: docs/protocol.md "Staged writes".
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from headrace.errors import RequestTimeout
from headrace.spark.errors import BrokerMissing, SparkConnectorError
from headrace.spark.retry import WRITING, retry_transient
from headrace.spark.write.broker_link import AWAY, BrokerLink
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import (
    StageAbortHeader,
    StageCommitHeader,
    StageDecideHeader,
    StageQueryHeader,
    StageStateResponseHeader,
)
from headrace_protocol.staging import Decision, StagedAttempt, encode_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.errors import HeadraceError
    from headrace.spark.cluster import Cluster
    from headrace_protocol.drivers.response import Response

Parts = dict[str, list[StagedAttempt]]

_log = logging.getLogger("headrace.spark")
_MARK_CHARACTERS = 16


def new_attempt(topic: str | None) -> str:
    """A unique name for an attempt. topic: of all its rows; None if each row has its own.

    A decision holds only the names of attempts, so the name includes a hash of the topic.
    """
    # Spark numbers attempts from 0 in each run of a query, and files of the last run may remain.
    name = uuid4().hex
    if topic is None:
        return name
    return f"{name}-{sha256(topic.encode()).hexdigest()[:_MARK_CHARACTERS]}"


def _topic_marks(decision: Decision) -> set[str]:
    names = [each.attempt for part in decision.attempts.values() for each in part]
    return {mark for name in names if (mark := name.partition("-")[2])}


class CommitConflict(SparkConnectorError):
    """Another committer decided on the same micro-batch concurrently."""


class BrokerState(NamedTuple):
    """One broker's state of a query."""

    applied_batch_id: int
    decision: Decision | None


def choose(states: Mapping[str, BrokerState], mine: Decision) -> Decision | None:
    """The decision to follow for the micro-batch of ``mine``; None if a later one was decided.

    states: by broker name, of all reachable brokers.

    A decision already in a log must be completed. A decision held by all brokers with a part in it
    may be in a log by now. A decision missing at one of these was never applied, and ``mine``
    replaces it. Raises BrokerMissing if an unreachable broker leaves this open.
    """
    batch_id = mine.batch_id
    decisions = [state.decision for state in states.values() if state.decision]
    if any(decision.batch_id > batch_id for decision in decisions):
        return None
    held = {each.decision_id: each for each in decisions if each.batch_id == batch_id}
    applied = {
        state.decision.decision_id
        for state in states.values()
        if state.decision and state.applied_batch_id == state.decision.batch_id == batch_id
    }
    alive = [each for each in held.values() if not _was_never_applied(each, states)]
    followed = [each for each in held.values() if each.decision_id in applied] or alive or [mine]
    decision = min(followed, key=lambda each: each.decision_id)
    for name in decision.attempts:
        if name not in states:
            raise BrokerMissing(
                f"broker {name} has a part in batch {batch_id}, which was decided, but cannot be "
                "reached: restart the broker, then the query"
            )
    return decision


def _was_never_applied(decision: Decision, states: Mapping[str, BrokerState]) -> bool:
    """True if a broker with a part in the decision does not hold it, so it was never applied."""
    return any(name in states and states[name].decision != decision for name in decision.attempts)


def _may_be_restarting(error: HeadraceError) -> bool:
    return isinstance(error, (*AWAY, BrokerMissing))


class Committer:
    """Commits and aborts the micro-batches of one query."""

    def __init__(self, cluster: Cluster, query_id: str) -> None:
        self._cluster = cluster
        self._query_id = query_id

    # -- commit ------------------------------------------------------------------------------------

    def commit(self, batch_id: int, parts: Parts) -> None:
        """Make the micro-batch readable, exactly once. An earlier decision is followed and logged.

        parts: the attempts, by broker name.

        Raises CommitConflict if the earlier decision is for another topic, and HeadraceError for
        failures after which the commit can be repeated.
        """

        def attempt() -> None:
            with ExitStack() as stack:
                self._commit(batch_id, parts, self._links(stack))

        retry_transient(attempt, WRITING, _may_be_restarting)

    def _commit(self, batch_id: int, parts: Parts, links: Mapping[str, BrokerLink]) -> None:
        states = {name: self._state(link) for name, link in links.items()}
        mine = _decision(batch_id, parts)
        decision = choose(states, mine)
        # A retry makes a new decision id, but names the same attempts.
        if decision is None or decision.attempts != mine.attempts:
            self._drop_own_rows(mine, decision or _last(states))
        if decision is None or not decision.attempts:
            return
        for name, link in links.items():
            self._decide(link, decision, states[name].decision)
        self._apply(decision, links)

    def _drop_own_rows(self, mine: Decision, decided: Decision) -> None:
        """Log that the rows of ``mine`` are dropped. Raises CommitConflict: see ``commit``."""
        batch = f"batch {mine.batch_id} of query {self._query_id}"
        marks = _topic_marks(mine)
        if marks and marks.isdisjoint(_topic_marks(decided) or marks):
            raise CommitConflict(
                f"{batch} was already committed to another topic: two queries use copies of one "
                "checkpoint, or option topic was changed. Give each query its own "
                "checkpointLocation, or write the batch to the previous topic once more"
            )
        _log.warning(
            "%s was already committed, so these rows are dropped. That is correct if the same "
            "query committed it before a restart; if this checkpoint is a copy of another query's, "
            "the rows are lost: start with a new checkpointLocation",
            batch,
        )

    def _links(self, stack: ExitStack) -> dict[str, BrokerLink]:
        """A link to each headrace broker, in order of name."""
        masters, dial = sorted(self._cluster.masters().items()), self._cluster.dial
        links = {name: stack.enter_context(BrokerLink(address, dial)) for name, address in masters}
        return {name: link for name, link in links.items() if link.is_headrace()}

    def _state(self, link: BrokerLink) -> BrokerState:
        answer = link.ask(RequestCode.STAGE_STATE, StageQueryHeader(query_id=self._query_id))
        applied_batch_id = answer.expect().header(StageStateResponseHeader).applied_batch_id
        decision = answer.read(Decision.decode) if answer.body else None
        return BrokerState(applied_batch_id, decision)

    def _decide(self, link: BrokerLink, decision: Decision, known: Decision | None) -> None:
        replaces = known.decision_id if known and known.batch_id == decision.batch_id else None
        header = StageDecideHeader(query_id=self._query_id, replaces=replaces)
        answer = link.ask(RequestCode.STAGE_DECIDE, header, decision.encode()).expect()
        held = answer.read(Decision.decode)
        if held != decision:
            raise CommitConflict(
                f"batch {decision.batch_id} of query {self._query_id} has another decision at "
                f"{link.address}: the query seems to run twice on one checkpoint; stop one of them"
            )

    def _apply(self, decision: Decision, links: Mapping[str, BrokerLink]) -> None:
        header = StageCommitHeader(
            query_id=self._query_id,
            batch_id=decision.batch_id,
            decision_id=decision.decision_id,
        )
        with ThreadPoolExecutor(len(decision.attempts)) as threads:
            its_links = [links[name] for name in decision.attempts]
            for answer in threads.map(lambda link: self._apply_at(link, header), its_links):
                answer.expect()

    def _apply_at(self, link: BrokerLink, header: StageCommitHeader) -> Response:
        while True:
            try:
                return link.ask(RequestCode.STAGE_COMMIT, header)
            except RequestTimeout:
                self._state(link)  # a large append takes long, but a stuck broker fails here too

    # -- abort -------------------------------------------------------------------------------------

    def abort(self, batch_id: int, parts: Parts) -> None:
        """Discard attempts, unless the broker holds a decision that names them."""
        header = StageAbortHeader(query_id=self._query_id, batch_id=batch_id)
        masters = self._cluster.masters()
        for name, attempts in parts.items():
            if name in masters:
                with BrokerLink(masters[name], self._cluster.dial) as link:
                    names = encode_names([each.attempt for each in attempts])
                    link.ask(RequestCode.STAGE_ABORT, header, names).expect()

    def forget(self) -> None:
        """Delete the state of a finished query at all brokers."""
        header = StageQueryHeader(query_id=self._query_id)
        with ExitStack() as stack:
            for link in self._links(stack).values():
                link.ask(RequestCode.STAGE_FORGET, header).expect()


def _last(states: Mapping[str, BrokerState]) -> Decision:
    decisions = [state.decision for state in states.values() if state.decision]
    return max(decisions, key=lambda each: each.batch_id)


def _decision(batch_id: int, parts: Parts) -> Decision:
    attempts = {name: tuple(its_attempts) for name, its_attempts in parts.items()}
    return Decision(uuid4().hex, batch_id, attempts)
