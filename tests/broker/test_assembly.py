"""The order in which a broker's services start and stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from headrace_broker.assembly import add_features, connect
from headrace_broker.compaction.compaction import Compaction
from headrace_broker.config import BrokerConfig
from headrace_broker.core import Pace, Surroundings, build_core
from headrace_broker.feature import Feature
from headrace_broker.pop.feature import Pop
from headrace_broker.quotas.owners import Owners
from headrace_broker.schedule.schedule import Schedule
from headrace_broker.server import Broker
from headrace_broker.timer.timers import Timers
from headrace_broker.transaction.transactions import Transactions
from headrace_daemon.network import MemoryNetwork
from headrace_daemon.services import (
    Service,
    Services,
    StopStage,
    finish_all,
    load_all,
)
from tests.support.broker import broker_config
from tests.support.features import add_feature, part
from tests.support.stores import open_store


class Recorder:
    """Services that note what is done with them."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def service(
        self,
        name: str,
        stage: StopStage = StopStage.SAVE,
        error: Exception | None = None,
        **options: bool,
    ) -> Service:
        async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            self.notes.append(f"{name} begins")
            await trio.lowlevel.checkpoint()
            self.notes.append(f"{name} has started")
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self.notes.append(f"{name} ends")

        def finish() -> None:
            self.notes.append(f"{name} finishes")
            if error is not None:
                raise error

        def load() -> None:
            self.notes.append(f"{name} loads")

        return Service(run, load, finish, stage, **options)


async def test_services_finish_by_stage_and_a_failure_skips_none() -> None:
    recorder = Recorder()
    listed = [
        recorder.service("table", error=OSError("the disk is full")),
        recorder.service("pulls", StopStage.ANSWER, error=RuntimeError("nobody expected this")),
        recorder.service("offsets"),
        recorder.service("nameservers", StopStage.DEPART, error=OSError("unreachable")),
    ]
    with pytest.raises(ExceptionGroup) as raised:
        await finish_all(listed, *StopStage)
    expected = ["nameservers", "pulls", "table", "offsets"]
    assert recorder.notes == [f"{name} finishes" for name in expected]
    errors = [str(error) for error in raised.value.exceptions]
    assert errors == ["unreachable", "nobody expected this", "the disk is full"]


async def test_only_the_services_of_a_stage_finish() -> None:
    recorder = Recorder()
    listed = [recorder.service("table"), recorder.service("pulls", StopStage.ANSWER)]
    await finish_all(listed, StopStage.ANSWER)
    assert recorder.notes == ["pulls finishes"]


async def test_a_finish_may_be_asynchronous() -> None:
    finished = trio.Event()

    async def finish() -> None:
        await trio.lowlevel.checkpoint()
        finished.set()

    await finish_all([Service(finish=finish)], StopStage.SAVE)
    assert finished.is_set()


@pytest.mark.parametrize("is_supervised", [True, False])
async def test_what_is_awaited_has_started_before_the_next_begins(is_supervised: bool) -> None:
    recorder = Recorder()
    listed = [
        recorder.service("store", is_awaited=True, is_supervised=is_supervised),
        recorder.service("server", is_awaited=True, is_supervised=is_supervised),
        Service(),
    ]
    await load_all(listed)
    async with trio.open_nursery() as nursery:
        await Services().start_all(nursery, listed, owns_process=True)
        assert recorder.notes == [
            *("store loads", "server loads"),
            *("store begins", "store has started", "server begins", "server has started"),
        ]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("owns_process", [True, False])
async def test_some_services_are_for_daemons_that_own_their_process(owns_process: bool) -> None:
    recorder = Recorder()
    listed = [recorder.service("watchdog", is_awaited=True, needs_process=True)]
    async with trio.open_nursery() as nursery:
        await Services().start_all(nursery, listed, owns_process=owns_process)
        assert bool(recorder.notes) == owns_process
        nursery.cancel_scope.cancel()
    await finish_all(listed, StopStage.SAVE)
    assert recorder.notes[-1] == "watchdog finishes"


async def test_only_a_supervised_service_outlives_an_error(autojump_clock: object) -> None:
    run_count = 0

    async def fail_once() -> None:
        nonlocal run_count
        run_count += 1
        await trio.lowlevel.checkpoint()
        if run_count == 1:
            raise RuntimeError("nobody expected this")

    supervisor = Services()
    async with trio.open_nursery() as nursery:
        await supervisor.start_all(nursery, [Service(fail_once)], owns_process=False)
    assert (run_count, supervisor.unexpected_errors) == (2, 1)
    run_count = 0
    unsupervised = [Service(fail_once, is_supervised=False)]
    with pytest.raises(ExceptionGroup) as raised:
        async with trio.open_nursery() as nursery:
            await supervisor.start_all(nursery, unsupervised, owns_process=False)
    assert raised.group_contains(RuntimeError, match="nobody expected this")


# -- those of the broker ---------------------------------------------------------------------------


async def test_a_broker_finishes_in_this_order(tmp_path: Path) -> None:
    config, network = broker_config(tmp_path), MemoryNetwork()
    store = open_store(config.store_path_root_dir)
    around = Surroundings(network, network.listen("127.0.0.1", 0), Services(), Pace())
    core = build_core(config, store, around)
    add_features(core)
    listed = connect(core)
    finishing = sorted(listed, key=lambda service: service.stage)
    topics, mappings, groups, offsets = core.tables
    owners = core.budget.makers
    assert isinstance(owners, Owners)
    assert [service.finish for service in finishing if service.finish] == [
        core.registration.unregister,
        core.clients.long_polling.answer_all,
        mappings.saved.finish,
        mappings.marks.saved.finish,
        topics.incarnations.saved.finish,
        topics.saved.finish,
        groups.saved.finish,
        core.filters.saved.finish,
        owners.saved.finish,
        core.added.tables[-1].finish,  # the request modes
        part(core, Compaction).finish,
        part(core, Pop).finish,
        part(core, Transactions).finish,
        part(core, Schedule).finish,
        part(core, Timers).finish,
        offsets.persist,
    ]


async def run_and_stop(broker: Broker) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(broker.run)
        nursery.cancel_scope.cancel()


async def test_a_broker_with_a_service_that_fails_at_the_stop_saves_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()

    failing = recorder.service("new", StopStage.ANSWER, RuntimeError("nobody expected this"))
    copying = recorder.service("last", StopStage.COPY)
    add_feature(monkeypatch, lambda _core: Feature(services=(copying, failing)))
    config = BrokerConfig(
        broker_name="b", store_path_root_dir=tmp_path, mapped_file_size_commit_log=1 << 20
    )
    with pytest.raises(ExceptionGroup) as raised:
        await run_and_stop(Broker(config, MemoryNetwork()))
    assert raised.group_contains(RuntimeError, match="nobody expected this")
    assert recorder.notes[:2] == ["last loads", "new loads"]
    assert [note for note in recorder.notes if "finishes" in note] == [
        "new finishes",
        "last finishes",
    ]
    assert recorder.notes.index("new ends") < recorder.notes.index("last finishes")
    assert not (tmp_path / "abort").exists()  # the store was closed after all
