"""fsck finds each kind of damage, and repairs what can be without losing anything."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_broker.staging.blocks import StagedBlock
from headrace_broker.staging.state import QueryState, state_file
from headrace_broker.store.errors import StoreFormatError, StoreLocked
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.positions import Position, Positions
from headrace_broker.store.followers.follower_work import position_file
from headrace_broker.store.settings import StoreSettings
from headrace_broker.store_tools.directory import StoreDirectory, disk_bytes, open_directory
from headrace_broker.store_tools.findings import Finding
from headrace_broker.store_tools.fsck import check, repair
from headrace_protocol.blocks import encode_records
from headrace_protocol.bodies import DataVersion
from headrace_protocol.staging import Decision, StagedAttempt
from headrace_protocol.statictopic.mapping_file import encode_file
from tests.broker.statictopic.test_static_changes import led_here
from tests.support.access import UsersUnderTest, entry
from tests.support.damage import TOPICS_TEXT, contents, quiet
from tests.support.golden import STORES, copy_golden_store, golden_settings
from tests.support.stores import HOST, crash, open_store, put, query_index, small_settings


@pytest.fixture
def opened(root: Path) -> Iterator[StoreDirectory]:
    with open_directory(root, small_settings(root)) as directory:
        yield directory


def read(root: Path) -> dict[tuple[str, int], list[bytes]]:
    copy = root.with_name("read")
    shutil.copytree(root, copy)
    store = open_store(copy)
    found = contents(store)
    crash(store)
    shutil.rmtree(copy)
    return found


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def newest(folder: Path) -> Path:
    return max(folder.iterdir())


# --- sound stores --------------------------------------------------------------------------


def test_a_store_of_ours_is_sound(opened: StoreDirectory) -> None:
    report = check(opened, quiet)
    assert report.findings == []
    assert report.record_count == 60


def test_progress_ends_at_the_length_of_all_files(opened: StoreDirectory) -> None:
    advances: list[int] = []
    check(opened, advances.append)
    queue_files = (path for folder in opened.queue_paths for path in folder.iterdir())
    assert min(advances) >= 0
    assert sum(advances) == opened.log_bytes + sum(path.stat().st_size for path in queue_files)


def test_disk_bytes_are_those_of_the_blocks_before_and_after_a_check(root: Path) -> None:
    path = root / "commitlog" / "ahead"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
    before = disk_bytes(path)
    assert before >= 1 << 20
    path.read_bytes()
    assert disk_bytes(path) == before


@pytest.mark.parametrize("name", STORES)
def test_a_store_of_the_peer_is_sound(name: str, tmp_path: Path) -> None:
    root = copy_golden_store(name, tmp_path / "store")
    with open_directory(root, golden_settings(root)) as directory:
        report = check(directory, quiet)
    assert report.damage == []
    assert report.record_count == {"clean": 477, "kill9": 805}[name]
    abort = ["abort"] if name == "kill9" else []
    assert [finding.path.name for finding in report.findings] == abort


def test_sizes_are_found_by_themselves(root: Path) -> None:
    shutil.rmtree(root / "index")
    with open_directory(root) as directory:
        assert directory.settings.commit_log_file_bytes == 4096
        assert directory.settings.consume_queue_file_bytes == 200
        assert not check(directory, quiet).damage


def test_sizes_that_cannot_be_found_are_asked_for(root: Path) -> None:
    with pytest.raises(StoreFormatError, match="--config"), open_directory(root):
        pass


# --- who may look --------------------------------------------------------------------------


def test_the_lock_of_another_process_counts(root: Path) -> None:
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    child = os.fork()
    if not child:
        descriptor = os.open(root / "lock", os.O_RDWR)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        os.write(ready_write, b"1")
        os.read(done_read, 1)
        os._exit(0)
    os.read(ready_read, 1)
    with pytest.raises(StoreLocked), open_directory(root, small_settings(root)):
        pass
    os.write(done_write, b"1")
    os.waitpid(child, 0)
    for descriptor in (ready_read, ready_write, done_read, done_write):
        os.close(descriptor)


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreFormatError, match="is no store"), open_directory(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(FileNotFoundError), open_directory(tmp_path / "nowhere"):
        pass


# --- damage that can be mended -------------------------------------------------------------


def spoil_unit_place(root: Path) -> None:
    overwrite(root / "consumequeue/A/0/00000000000000000000", 5 * 20 + 7, b"\x55")


def spoil_unit_tags(root: Path) -> None:
    overwrite(root / "consumequeue/B/1/00000000000000000000", 3 * 20 + 19, b"\x55")


def make_a_hole_in_a_queue(root: Path) -> None:
    overwrite(root / "consumequeue/A/0/00000000000000000000", 2 * 20, bytes(60))


def cut_a_queue(root: Path) -> None:
    overwrite(root / "consumequeue/C/0/00000000000000000000", 4 * 20, bytes(120))


def append_a_wild_unit(root: Path) -> None:
    path = root / "consumequeue/B/1/00000000000000000000"
    used = len(path.read_bytes().rstrip(b"\0"))
    assert used < 180
    overwrite(path, -(-used // 20) * 20, (1 << 40).to_bytes(8, "big") + (99).to_bytes(4, "big"))


def spoil_an_index_entry(root: Path) -> None:
    path = newest(root / "index")
    overwrite(path, 40 + 10 * 4 + 2 * 20, b"\x55")


def spoil_an_index_link(root: Path) -> None:
    overwrite(min((root / "index").iterdir()), 40 + 10 * 4 + 9 * 20 + 19, b"\x66")


def spoil_an_index_slot(root: Path) -> None:
    overwrite(newest(root / "index"), 40 + 3, b"\x77")


def spoil_the_index_header(root: Path) -> None:
    overwrite(newest(root / "index"), 39, b"\x77")


def cut_an_index_file(root: Path) -> None:
    os.truncate(newest(root / "index"), 100)


def spoil_the_checkpoint(root: Path) -> None:
    overwrite(root / "checkpoint", 1, b"\x55")


def spoil_the_index_mark(root: Path) -> None:
    overwrite(root / "positions/index.json", 20, b"\x55")


def write_behind_the_log(root: Path) -> None:
    path = newest(root / "commitlog")
    used = len(path.read_bytes().rstrip(b"\0"))
    overwrite(path, used + 5, b"leftovers of an earlier time")


def cut_a_config_file(root: Path) -> None:
    os.truncate(root / "config/topics.json", 9)


MENDABLE = [
    spoil_unit_place,
    spoil_unit_tags,
    make_a_hole_in_a_queue,
    cut_a_queue,
    append_a_wild_unit,
    spoil_an_index_entry,
    spoil_an_index_link,
    spoil_an_index_slot,
    spoil_the_index_header,
    cut_an_index_file,
    spoil_the_checkpoint,
    spoil_the_index_mark,
    write_behind_the_log,
    cut_a_config_file,
]


@pytest.mark.parametrize("spoil", MENDABLE, ids=lambda spoil: spoil.__name__)
def test_damage_is_found_and_mended(spoil: Callable[[Path], None], root: Path) -> None:
    wanted = read(root)
    spoil(root)
    with open_directory(root, small_settings(root)) as directory:
        damage = check(directory, quiet).damage
        assert damage
        assert all(finding.fix for finding in damage), damage
        saved = repair(directory, damage, quiet)
        assert saved is not None
        assert any(path.is_file() for path in saved.rglob("*"))
        assert check(directory, quiet).damage == []
    assert read(root) == wanted


def test_a_repaired_index_answers_as_before(root: Path) -> None:
    spoil_an_index_entry(root)
    with open_directory(root, small_settings(root)) as directory:
        repair(directory, check(directory, quiet).damage, quiet)
    store = open_store(root)
    assert len(query_index(store, "A", "x30", 9, 0, 1 << 62)) == 1
    store.close()


def test_a_torn_table_comes_back_from_its_backup(root: Path) -> None:
    config = ConfigFile(root / "config/topics.json")
    config.save(TOPICS_TEXT)
    cut_a_config_file(root)
    with open_directory(root, small_settings(root)) as directory:
        saved = repair(directory, check(directory, quiet).damage, quiet)
    assert saved is not None
    assert (saved / "config/topics.json").stat().st_size == 9
    assert config.load() == TOPICS_TEXT


def test_a_mapping_that_a_broker_refuses_is_found(root: Path) -> None:
    config = ConfigFile(root / "config/topicQueueMapping.json")
    good = encode_file({"T": led_here()}, DataVersion())
    config.save(good)
    config.save(good.replace(b'"queueId":1', b'"queueId":0'))
    with open_directory(root, small_settings(root)) as directory:
        (found,) = check(directory, quiet).findings
        assert "queueId 0 on broker-a is used twice" in found.problem
        assert "backup is intact" in found.problem
        repair(directory, check(directory, quiet).damage, quiet)
    assert config.load() == good


def test_what_was_replaced_is_kept(root: Path) -> None:
    path = root / "consumequeue/A/0/00000000000000000000"
    spoil_unit_place(root)
    bad = path.read_bytes()[100:120]
    with open_directory(root, small_settings(root)) as directory:
        saved = repair(directory, check(directory, quiet).damage, quiet)
    assert saved is not None
    assert (saved / "consumequeue/A/0/00000000000000000000@100").read_bytes() == bad


# --- damage that only copies can be saved from ---------------------------------------------


def findings_of(root: Path, settings: StoreSettings) -> list[Finding]:
    with open_directory(root, settings) as directory:
        return check(directory, quiet).damage


def test_a_record_damaged_in_the_middle_is_named_and_left(root: Path) -> None:
    path = root / "commitlog/00000000000000004096"
    overwrite(path, 90, b"\x55\x55")
    before = path.read_bytes()
    with open_directory(root, small_settings(root)) as directory:
        damage = check(directory, quiet).damage
        assert damage[0].path == path
        assert damage[0].position == 0
        assert "body CRC does not match; whole records follow" in damage[0].problem
        assert damage[0].fix is None
        repair(directory, [damage[0]], quiet)
    assert path.read_bytes() == before


@pytest.mark.parametrize("position", [0, 4, 30, 84])
def test_reading_goes_on_behind_damage(position: int, root: Path) -> None:
    overwrite(root / "commitlog/00000000000000004096", position, b"\x55\x55")
    with open_directory(root, small_settings(root)) as directory:
        report = check(directory, quiet)
    assert report.record_count == 59
    assert len([f for f in report.damage if f.path.parent.name == "commitlog"]) == 1


def test_files_out_of_place_are_named(root: Path) -> None:
    (root / "commitlog" / "notes.txt").write_text("mine")
    (root / "consumequeue/A/0/notes.txt").write_text("mine")
    names = [finding.path.name for finding in findings_of(root, small_settings(root))]
    assert names == ["notes.txt", "notes.txt"]


def test_a_missing_log_file_is_named(root: Path) -> None:
    (root / "commitlog/00000000000000004096").unlink()
    damage = findings_of(root, small_settings(root))
    assert "follows 00000000000000000000 with a gap" in damage[0].problem


def test_a_deleted_topic_is_no_damage(root: Path) -> None:
    store = open_store(root)
    store.delete_topic("A")
    store.close()
    with open_directory(root, small_settings(root)) as directory:
        report = check(directory, quiet)
    assert report.damage == []
    assert {f.path.parent.name for f in report.findings} == {"A"}


def test_what_queries_keep_aside(root: Path, opened: StoreDirectory) -> None:
    folder = root / "staged" / "query"
    folder.mkdir(parents=True)
    encoded = encode_records("A", [b"one", b"two"], b"", born_timestamp=1, born_host=HOST)
    block = StagedBlock("A", 0, encoded.record_count, 0, encoded.body)
    data = block.head() + bytes(block.body)
    whole = StagedAttempt("decided", len(data), 2)
    state = QueryState(decision=Decision("d", 0, {"broker-a": (whole,)}))
    state_file(folder, opened.fs).save(state)
    for name in ("0.decided", "0.other"):
        (folder / f"{name}.blocks").write_bytes(data)
    assert check(opened, quiet).findings == []
    for name in ("0.decided", "0.other"):
        overwrite(folder / f"{name}.blocks", len(data) - 1, b"!")
    found = [(f.path.name, f.is_damage, f.position) for f in check(opened, quiet).findings]
    assert found == [("0.decided.blocks", True, 0), ("0.other.blocks", False, 0)]
    overwrite(folder / "state.json", 3, b"!")
    problem = check(opened, quiet).damage[0]
    assert problem.path.name == "state.json"
    assert "does not match its checksum" in problem.problem


def test_folders_that_only_the_peer_reads_are_named(root: Path, opened: StoreDirectory) -> None:
    (root / "consumequeue_ext" / "T").mkdir(parents=True)
    findings = check(opened, quiet).findings
    assert [(f.path.name, f.is_damage) for f in findings] == [("consumequeue_ext", False)]


# --- positions of followers ----------------------------------------------------------------


def with_positions(root: Path, positions: Positions) -> None:
    """A store with three messages in T/0."""
    store = open_store(root)
    for _ in range(3):
        put(store, store.queue("T", 0))
    store.close()
    position_file(root, "copies", Files()).save(positions)


def follower_findings_of(root: Path) -> list[Finding]:
    with open_directory(root, small_settings(root)) as directory:
        found = check(directory, quiet).findings
    return [finding for finding in found if finding.path.parent.name == "followers"]


def test_positions_within_their_queues_are_sound(tmp_path: Path) -> None:
    with_positions(tmp_path, {("T", 0): Position(3, 200)})
    assert follower_findings_of(tmp_path) == []


def test_a_position_beyond_its_queue_is_found(tmp_path: Path) -> None:
    with_positions(tmp_path, {("T", 0): Position(4, 300)})
    (finding,) = follower_findings_of(tmp_path)
    assert finding.is_damage
    assert "is at 4 of queue T/0, which ends at 3" in finding.problem


def test_a_position_in_a_queue_that_is_gone_is_a_note(tmp_path: Path) -> None:
    with_positions(tmp_path, {("Gone", 0): Position(4, 300)})
    (finding,) = follower_findings_of(tmp_path)
    assert not finding.is_damage
    assert "names queue Gone/0, which is gone" in finding.problem


def test_a_file_that_is_no_followers_is_put_away(tmp_path: Path) -> None:
    with_positions(tmp_path, {})
    stray = tmp_path / "followers" / "notes.txt"
    stray.write_text("mine")
    (finding,) = follower_findings_of(tmp_path)
    assert (finding.path, finding.problem) == (stray, "does not belong to a follower")
    with open_directory(tmp_path, small_settings(tmp_path)) as directory:
        repair(directory, [finding], quiet)
    assert follower_findings_of(tmp_path) == []


@pytest.mark.parametrize("text", [b"{", b'{"T": 3}'])
def test_positions_that_cannot_be_read_are_found(tmp_path: Path, text: bytes) -> None:
    with_positions(tmp_path, {})
    (tmp_path / "followers" / "copies.json").write_bytes(text)
    assert [finding.is_damage for finding in follower_findings_of(tmp_path)] == [True]


# --- users ---------------------------------------------------------------------------------


def _edited(data: bytes) -> bytes:
    return data.replace(b"Topic:a", b"Topic:*")


@pytest.mark.parametrize(
    ("change", "mode", "problem"),
    [
        (_edited, 0o600, "was changed by hand, or damaged: does not match its seal"),
        (lambda data: data[: len(data) // 2], 0o600, "does not match its seal"),
        (lambda data: b"\0" * len(data), 0o600, "was changed by hand, or damaged"),
        (lambda data: data, 0o640, "chmod 600"),
    ],
    ids=["edited", "torn", "zeros", "readable"],
)
def test_users_with_which_no_broker_starts_are_named_with_whom_to_ask(
    root: Path, change: Callable[[bytes], bytes], mode: int, problem: str
) -> None:
    daemon = UsersUnderTest(root / "config")
    daemon.make("alice")
    assert daemon.rule("alice", entry("Topic:a", "Pub"))[0] == 0
    path = daemon.path
    with open_directory(root, small_settings(root)) as opened:
        assert check(opened, quiet).findings == []
        data = change(path.read_bytes())
        path.write_bytes(data)
        path.chmod(mode)
        (finding,) = check(opened, quiet).findings
    assert (finding.path, finding.is_damage, finding.fix) == (path, True, None)
    assert problem in finding.problem
    asked = finding.problem.partition("Ask a Super user of the broker for a copy: ")[2]
    assert asked == ("root" if b"root" in data else "none is readable")
