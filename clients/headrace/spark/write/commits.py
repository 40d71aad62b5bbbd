"""The driver's side of staged writes: which attempts make up a batch, at all brokers or none.

Every broker of ours that the nameserver knows is asked what it knows of the query, then told the
decision, and only then those act on it that have a part in it. Whoever comes later with the same
batch finds the decision at any of them and follows it. Source: docs/protocol.md "Staged writes".
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from headrace.errors import RequestTimeout
from headrace.spark.errors import BrokerMissing, SparkConnectorError
from headrace.spark.write.lanes import AWAY, PATIENCE_S, PAUSE_S, Lane
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

    from headrace.spark.cluster import Cluster
    from headrace_protocol.drivers.response import Response

Parts = dict[str, list[StagedAttempt]]

_log = logging.getLogger("headrace.spark")
_MARK_CHARACTERS = 16


def new_attempt(topic: str | None) -> str:
    """A name for an attempt; topic: of all its rows, None if each row has its own.

    Names of attempts are all that a decision has, so the topic leaves a mark in them.
    """
    # Spark counts attempts anew in each run of a query, and files of the last one may be left.
    name = uuid4().hex
    if topic is None:
        return name
    return f"{name}-{sha256(topic.encode()).hexdigest()[:_MARK_CHARACTERS]}"


def _topic_marks(decision: Decision) -> set[str]:
    names = [each.attempt for part in decision.attempts.values() for each in part]
    return {mark for name in names if (mark := name.partition("-")[2])}


class CommitConflict(SparkConnectorError):
    """Somebody else decided on the batch at the same time."""


class BrokerState(NamedTuple):
    """What one broker knows of a query."""

    applied_batch_id: int
    decision: Decision | None


def choose(states: Mapping[str, BrokerState], mine: Decision) -> Decision | None:
    """The decision to follow for the batch of ``mine``; None if a later one was decided.

    states: by broker, of all that can be asked.

    What is in a log already must be completed. What all brokers with a part in it hold may be in
    a log by now. What one of them does not hold was never acted on, and ``mine`` takes its place.
    Raises BrokerMissing when that can't be told.
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
    alive = [each for each in held.values() if not _is_dead(each, states)]
    followed = [each for each in held.values() if each.decision_id in applied] or alive or [mine]
    decision = min(followed, key=lambda each: each.decision_id)
    for name in decision.attempts:
        if name not in states:
            raise BrokerMissing(
                f"broker {name} has a part in batch {batch_id}, which was decided, and can't be "
                "reached: start it again, then the query"
            )
    return decision


def _is_dead(decision: Decision, states: Mapping[str, BrokerState]) -> bool:
    """Whether a broker without which nobody acts on a decision does not hold it."""
    return any(name in states and states[name].decision != decision for name in decision.attempts)


class Committer:
    """Commits and aborts batches of one query."""

    def __init__(self, cluster: Cluster, query_id: str) -> None:
        self._cluster = cluster
        self._query_id = query_id

    # -- commit ------------------------------------------------------------------------------------

    def commit(self, batch_id: int, parts: Parts) -> None:
        """Make the batch readable, exactly once; what was decided before is followed, and logged.

        parts: the attempts by name of broker. Raises CommitConflict if that is of another topic,
        HeadraceError: commit again then.
        """
        until = time.monotonic() + PATIENCE_S
        while not self._is_committed(batch_id, parts, until):
            time.sleep(PAUSE_S)

    def _is_committed(self, batch_id: int, parts: Parts, until: float) -> bool:
        """Try once; False when a broker is away that may be starting again."""
        try:
            with ExitStack() as stack:
                self._commit(batch_id, parts, self._lanes(stack))
        except (*AWAY, BrokerMissing):
            if time.monotonic() > until:
                raise
            return False
        return True

    def _commit(self, batch_id: int, parts: Parts, lanes: Mapping[str, Lane]) -> None:
        states = {name: self._state(lane) for name, lane in lanes.items()}
        mine = _decision(batch_id, parts)
        decision = choose(states, mine)
        # Decisions are made anew by who tries again, but not what they say.
        if decision is None or decision.attempts != mine.attempts:
            self._give_way(mine, decision or _last(states))
        if decision is None or not decision.attempts:
            return
        for name, lane in lanes.items():
            self._decide(lane, decision, states[name].decision)
        self._apply(decision, lanes)

    def _give_way(self, mine: Decision, decided: Decision) -> None:
        """Say that the rows of ``mine`` are dropped. Raises CommitConflict: see ``commit``."""
        batch = f"batch {mine.batch_id} of query {self._query_id}"
        marks = _topic_marks(mine)
        if marks and marks.isdisjoint(_topic_marks(decided) or marks):
            raise CommitConflict(
                f"{batch} was committed before, to another topic than this one's: two queries have "
                "copies of one checkpoint, or option topic was changed. Give each its own "
                "checkpointLocation, or write the batch to the topic of before once more"
            )
        _log.warning(
            "%s was committed before, so these rows are dropped. That is right if it was the same "
            "query, before a restart; if this checkpoint is a copy of another one's, they are "
            "lost: begin with a new checkpointLocation",
            batch,
        )

    def _lanes(self, stack: ExitStack) -> dict[str, Lane]:
        """A lane to each broker of ours, in order of name."""
        masters = sorted(self._cluster.masters().items())
        lanes = {name: stack.enter_context(Lane(address)) for name, address in masters}
        return {name: lane for name, lane in lanes.items() if lane.is_headrace()}

    def _state(self, lane: Lane) -> BrokerState:
        answer = lane.ask(RequestCode.STAGE_STATE, StageQueryHeader(query_id=self._query_id))
        applied_batch_id = answer.expect().header(StageStateResponseHeader).applied_batch_id
        decision = answer.read(Decision.decode) if answer.body else None
        return BrokerState(applied_batch_id, decision)

    def _decide(self, lane: Lane, decision: Decision, known: Decision | None) -> None:
        replaces = known.decision_id if known and known.batch_id == decision.batch_id else None
        header = StageDecideHeader(query_id=self._query_id, replaces=replaces)
        answer = lane.ask(RequestCode.STAGE_DECIDE, header, decision.encode()).expect()
        held = answer.read(Decision.decode)
        if held != decision:
            raise CommitConflict(
                f"batch {decision.batch_id} of query {self._query_id} was decided otherwise at "
                f"{lane.address}: the query seems to run twice on one checkpoint; stop one of them"
            )

    def _apply(self, decision: Decision, lanes: Mapping[str, Lane]) -> None:
        header = StageCommitHeader(
            query_id=self._query_id,
            batch_id=decision.batch_id,
            decision_id=decision.decision_id,
        )
        with ThreadPoolExecutor(len(decision.attempts)) as threads:
            its_lanes = [lanes[name] for name in decision.attempts]
            for answer in threads.map(lambda lane: self._apply_at(lane, header), its_lanes):
                answer.expect()

    def _apply_at(self, lane: Lane, header: StageCommitHeader) -> Response:
        while True:
            try:
                return lane.ask(RequestCode.STAGE_COMMIT, header)
            except RequestTimeout:
                self._state(lane)  # much to append takes long; somebody who is stuck raises here

    # -- abort -------------------------------------------------------------------------------------

    def abort(self, batch_id: int, parts: Parts) -> None:
        """Give attempts up, as far as no broker holds a decision that names them."""
        header = StageAbortHeader(query_id=self._query_id, batch_id=batch_id)
        masters = self._cluster.masters()
        for name, attempts in parts.items():
            if name in masters:
                with Lane(masters[name]) as lane:
                    names = encode_names([each.attempt for each in attempts])
                    lane.ask(RequestCode.STAGE_ABORT, header, names).expect()

    def forget(self) -> None:
        """Let all brokers forget a query that will not come back."""
        header = StageQueryHeader(query_id=self._query_id)
        with ExitStack() as stack:
            for lane in self._lanes(stack).values():
                lane.ask(RequestCode.STAGE_FORGET, header).expect()


def _last(states: Mapping[str, BrokerState]) -> Decision:
    decisions = [state.decision for state in states.values() if state.decision]
    return max(decisions, key=lambda each: each.batch_id)


def _decision(batch_id: int, parts: Parts) -> Decision:
    attempts = {name: tuple(its_attempts) for name, its_attempts in parts.items()}
    return Decision(uuid4().hex, batch_id, attempts)
