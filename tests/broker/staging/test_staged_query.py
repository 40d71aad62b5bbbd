"""The phases of a staged query, pair by pair, and which decision is left when the disk fails."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from headrace_broker.staging import state as state_file
from headrace_broker.staging.known import KnownQueries
from headrace_broker.staging.query import NEXT_PHASE, Event, Phase, Query
from headrace_broker.staging.state import QueryState
from headrace_protocol.staging import Decision
from tests.support.stores import FaultyFiles

# The shortest way to each phase.
WAYS = {
    Phase.SETTLED: (),
    Phase.DECIDING: (Event.DECIDE,),
    Phase.DECIDED: (Event.DECIDE, Event.SAVE),
    Phase.REPLACING: (Event.DECIDE, Event.SAVE, Event.DECIDE),
    Phase.APPLYING: (Event.DECIDE, Event.SAVE, Event.APPLY),
    Phase.DAMAGED: (Event.DAMAGE,),
}


def query_at(folder: Path, files: FaultyFiles | None = None) -> Query:
    files = files or FaultyFiles()
    known = KnownQueries(folder, files)
    return Query(folder / "staged" / "query", files, lambda *_: None, known)


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
def test_every_pair_leads_on_or_is_a_fault(tmp_path: Path, phase: Phase, event: Event) -> None:
    query = query_at(tmp_path)
    for each in WAYS[phase]:
        query.apply(each)
    assert query.phase is phase
    if (phase, event) not in NEXT_PHASE:
        with pytest.raises(KeyError):
            query.apply(event)
        assert query.phase is phase
        return
    query.apply(event)
    assert query.phase is NEXT_PHASE[phase, event]
    assert query.is_saved == (query.phase not in {Phase.DECIDING, Phase.REPLACING})
    assert query.is_idle == (query.phase is Phase.SETTLED)


def decided(name: str, batch_id: int = 0) -> QueryState:
    return QueryState(batch_id - 1, Decision(name, batch_id, {}), tag=1)


def test_a_decision_that_is_not_saved_leaves_the_one_on_disk(tmp_path: Path) -> None:
    files = FaultyFiles()
    query = query_at(tmp_path, files)
    for state, before in ((decided("a"), QueryState()), (decided("b"), decided("a"))):
        phase = query.phase
        query.decide(state)
        files.is_broken = True
        with pytest.raises(OSError, match="error"):
            query.save()
        assert (query.phase, query.state) == (phase, before)
        files.is_broken = False
        # The other thread's work, which finds nothing to save.
        query.save()
        assert (query.phase, query.state) == (phase, before)
        query.decide(state)
        query.save()
        assert (query.phase, query.state) == (Phase.DECIDED, state)
        assert state_file.load(query.folder, files) == state


def test_a_finished_batch_makes_room_for_the_next(tmp_path: Path) -> None:
    query = query_at(tmp_path)
    query.decide(decided("a"))
    query.save()
    query.apply(Event.APPLY)
    query.applied_records = 3
    done = QueryState(0, decided("a").decision, tag=1)
    query.write(done)
    query.finish(done)
    assert (query.phase, query.state, query.applied_records) == (Phase.SETTLED, done, 0)
    found = query_at(tmp_path)
    found.load()
    assert (found.phase, found.state) == (Phase.SETTLED, done)


def test_the_phase_at_the_start_is_that_of_the_file(tmp_path: Path) -> None:
    query = query_at(tmp_path)
    query.decide(decided("a"))
    query.save()
    found = query_at(tmp_path)
    found.load()
    assert (found.phase, found.state, found.problem) == (Phase.DECIDED, decided("a"), None)
    path = query.folder / state_file.NAME
    path.write_bytes(path.read_bytes()[1:])
    found = query_at(tmp_path)
    found.load()
    assert (found.phase, found.is_idle) == (Phase.DAMAGED, False)
    assert str(path) in str(found.problem)


def test_an_owner_that_could_not_be_written_is_written_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    query = query_at(tmp_path, files)
    query.folder.mkdir(parents=True)
    query.claim("ann")
    files.is_unwritable = True
    with pytest.raises(OSError, match="error"):
        query.keep_owner()
    assert list(query.folder.iterdir()) == []
    files.is_unwritable = False
    query.keep_owner()
    query.path(0, "a").touch()
    found = query_at(tmp_path)
    found.load()
    assert found.owner == "ann"
