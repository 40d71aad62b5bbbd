"""Consumer offsets: commits, resets, clones, and their file."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_broker.consumer.offsets import ConsumerOffsets
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import ConfigFile, unsealed
from headrace_broker.store.files.filesystem import Files
from headrace_protocol import fastjson
from headrace_protocol.at_once import run_at_once
from headrace_protocol.bodies import ConsumerOffsetSerializeWrapper
from headrace_protocol.waiting import at_once
from tests.support.golden import STORES, golden_store
from tests.support.stores import FaultyFiles

NOW_MS = 1_700_000_000_000


def open_offsets(folder: Path, files: Files | None = None) -> ConsumerOffsets:
    return ConsumerOffsets(ConfigFile(folder / "consumerOffset.json", files), lambda: NOW_MS)


@pytest.fixture
def offsets(tmp_path: Path) -> ConsumerOffsets:
    return open_offsets(tmp_path)


def everything(offsets: ConsumerOffsets) -> ConsumerOffsetSerializeWrapper:
    return ConsumerOffsetSerializeWrapper(
        offset_table=dict(offsets.committed()),
        pull_offset_table=dict(offsets.pulled()),
        group_topic_map=dict(offsets.topics_by_group()),
        data_version=offsets.data_version,
    )


def test_commits_are_found_again(offsets: ConsumerOffsets) -> None:
    assert offsets.query("g", "t", 0) is None
    assert offsets.commit("g", "t", 0, 5)
    offsets.commit_pull("g", "t", 0, 7)
    assert offsets.query("g", "t", 0) == 5
    assert offsets.query_pull("g", "t", 0) == 7
    assert offsets.query("g", "t", 1) is None
    assert offsets.commit("g", "t", 0, 3)
    assert offsets.query("g", "t", 0) == 3


def test_who_reads_what(offsets: ConsumerOffsets) -> None:
    offsets.commit("g", "t", 0, 1)
    offsets.commit("h", "t", 0, 1)
    offsets.commit("g", "u", 0, 1)
    assert offsets.topics_of("g") == {"t", "u"}
    assert offsets.groups_of("t") == {"g", "h"}
    run_at_once(offsets.delete_topic("t"))
    assert offsets.groups_of("t") == set()
    assert offsets.topics_of("h") == set()
    assert offsets.query("g", "t", 0) is None
    run_at_once(offsets.delete_group("g"))
    assert offsets.topics_of("g") == set()
    assert offsets.query("g", "u", 0) is None


def test_a_group_that_is_expected_has_no_offset(tmp_path: Path, offsets: ConsumerOffsets) -> None:
    offsets.expect("g", "t")
    offsets.commit("h", "t", 3, 1)
    offsets.expect("h", "t")
    offsets.withdraw("h", "t", 3)
    offsets.persist()
    for each in (offsets, open_offsets(tmp_path)):
        assert each.groups_of("t") == {"g", "h"}
        assert each.offsets_of("g", "t") == each.offsets_of("h", "t") == {}
        assert each.query("h", "t", 3) is None
    run_at_once(offsets.delete_group("g"))
    assert offsets.groups_of("t") == {"h"}


def test_a_reset_is_told_once_and_not_overrun(offsets: ConsumerOffsets) -> None:
    offsets.commit("g", "t", 0, 9)
    offsets.reset("g", "t", 0, 2)
    assert offsets.query("g", "t", 0) == 2
    assert not offsets.commit("g", "t", 0, 10)
    assert offsets.commit("g", "t", 1, 10)
    assert offsets.take_reset("g", "t", 1) is None
    assert offsets.take_reset("g", "t", 0) == 2
    assert offsets.take_reset("g", "t", 0) is None
    assert offsets.commit("g", "t", 0, 10)


def test_a_clone_goes_on_where_the_other_is(offsets: ConsumerOffsets) -> None:
    offsets.commit("g", "t", 0, 9)
    offsets.commit("g", "t", 1, 4)
    list(offsets.clone("g", "copy", "t"))
    offsets.commit("g", "t", 0, 10)
    assert offsets.offsets_of("copy", "t") == {0: 9, 1: 4}
    assert offsets.groups_of("t") == {"g", "copy"}


@pytest.mark.parametrize("name", STORES)
def test_a_file_of_the_peer_is_kept(name: str, tmp_path: Path) -> None:
    original = (golden_store(name) / "config/consumerOffset.json").read_bytes()
    (tmp_path / "consumerOffset.json").write_bytes(original)
    offsets = open_offsets(tmp_path)
    before = fastjson.loads(original)
    assert offsets.query("g_push", "G_TAGS", 3) == before["offsetTable"]["G_TAGS@g_push"][3]
    assert at_once(offsets.take_snapshot()) is None

    offsets.commit("g_push", "G_TAGS", 3, 77)
    offsets.persist()
    after = fastjson.loads((tmp_path / "consumerOffset.json").read_bytes())
    before["offsetTable"]["G_TAGS@g_push"][3] = 77
    assert after["offsetTable"] == before["offsetTable"]
    assert after["pullOffsetTable"] == before["pullOffsetTable"]
    assert {g: set(t) for g, t in after["groupTopicMap"].items()} == {
        g: set(t) for g, t in before["groupTopicMap"].items()
    }
    assert at_once(offsets.take_snapshot()) is None


def test_a_file_is_written_as_the_peer_writes_it(tmp_path: Path, offsets: ConsumerOffsets) -> None:
    offsets.commit("g", "t", 0, 5)
    offsets.commit("g", "t", 1, 6)
    offsets.commit_pull("g", "t", 0, 7)
    offsets.persist()
    text = unsealed((tmp_path / "consumerOffset.json").read_bytes()).decode()
    assert text == (
        '{\n\t"dataVersion":{\n\t\t"counter":0,\n\t\t"stateVersion":0,\n\t\t"timestamp":0\n\t},'
        '\n\t"groupTopicMap":{\n\t\t"g":[\n\t\t\t"t"\n\t\t]\n\t},'
        '\n\t"offsetTable":{\n\t\t"t@g":{\n\t\t\t0:5,\n\t\t\t1:6\n\t\t}\n\t},'
        '\n\t"pullOffsetTable":{\n\t\t"t@g":{\n\t\t\t0:7\n\t\t}\n\t}\n}'
    )


def test_the_version_changes_every_500_commits(offsets: ConsumerOffsets) -> None:
    for offset in range(1000):
        offsets.commit("g", "t", 0, offset)
    assert offsets.data_version.counter == 2
    assert offsets.data_version.timestamp == NOW_MS


def test_what_could_not_be_written_is_written_later(
    tmp_path: Path, offsets: ConsumerOffsets
) -> None:
    offsets.commit("g", "t", 0, 5)
    (tmp_path / "consumerOffset.json.tmp").mkdir()
    with pytest.raises(OSError, match=r"consumerOffset.json.tmp"):
        offsets.persist()
    (tmp_path / "consumerOffset.json.tmp").rmdir()
    offsets.persist()
    assert open_offsets(tmp_path).query("g", "t", 0) == 5


def test_a_file_with_a_wrong_key_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "consumerOffset.json").write_text('{"offsetTable":{"topic":{0:1}}}')
    with pytest.raises(StoreFormatError, match="'topic': expected topic@group"):
        open_offsets(tmp_path)


NAMES = st.sampled_from(["a", "b", "%RETRY%a"])
ACTIONS = st.one_of(
    st.tuples(st.just("commit"), NAMES, NAMES, st.integers(0, 2), st.integers(0, 2**63 - 1)),
    st.tuples(st.just("commit_pull"), NAMES, NAMES, st.integers(0, 2), st.integers(0, 9)),
    st.tuples(st.just("delete_topic"), NAMES),
    st.tuples(st.just("delete_group"), NAMES),
    st.tuples(st.just("persist")),
)


@pytest.mark.slow
@settings(max_examples=40)
@given(actions=st.lists(ACTIONS, max_size=30))
def test_the_file_always_holds_the_table(
    actions: list[tuple[object, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("offsets")
    offsets = open_offsets(folder)
    offsets.commit("g", "t", 0, 1)
    for name, *arguments in actions:
        outcome = getattr(offsets, str(name))(*arguments)
        if "delete" in str(name):
            run_at_once(outcome)
    offsets.persist()
    data = (folder / "consumerOffset.json").read_bytes()
    assert ConsumerOffsetSerializeWrapper.decode(data) == everything(offsets)
    assert everything(open_offsets(folder)) == everything(offsets)


async def test_offsets_that_are_waited_for_are_saved_at_once(tmp_path: Path) -> None:
    offsets = open_offsets(tmp_path)
    assert await saved(offsets, 1) is None
    assert open_offsets(tmp_path).query("g", "t", 0) == 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offsets.run, lambda: 3600)
        await trio.testing.wait_all_tasks_blocked()
        assert await saved(offsets, 2) is None
        assert open_offsets(tmp_path).query("g", "t", 0) == 2
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_stop_during_a_save_loses_no_offset(tmp_path: Path) -> None:
    offsets = open_offsets(tmp_path)
    topics = [f"t{number}" for number in range(20_000)]  # many slices
    for topic in topics:
        offsets.commit("g", topic, 0, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offsets.run, lambda: 3600)
        await trio.testing.wait_all_tasks_blocked()
        offsets.when_saved(lambda _: None)
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    offsets.persist()
    again = open_offsets(tmp_path)
    assert all(again.query("g", topic, 0) == 1 for topic in topics)


async def test_offsets_that_cannot_be_saved_are_reported(tmp_path: Path) -> None:
    files = FaultyFiles()
    offsets = open_offsets(tmp_path, files)
    files.is_unwritable = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offsets.run, lambda: 3600)
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(await saved(offsets, 1), OSError)
        nursery.cancel_scope.cancel()


async def saved(offsets: ConsumerOffsets, offset: int) -> Exception | None:
    """Commit an offset and wait for its save."""
    outcomes: list[Exception | None] = []
    is_saved = trio.Event()

    def then(problem: Exception | None) -> None:
        outcomes.append(problem)
        is_saved.set()

    offsets.commit("g", "t", 0, offset)
    offsets.when_saved(then)
    with trio.fail_after(60):
        await is_saved.wait()
    return outcomes[0]
