"""One suite for all drivers, and the failures that belong to one of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from obstore.store import MemoryStore

from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_broker.tiered.driver.metered import Metered, Operations
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.tier.driver import AppendDriver, Entry, Failure, FailureKind, PutDriver
from headrace_protocol.tier.location import Location
from headrace_protocol.tier.objects import ObjectDriver, open_objects
from headrace_protocol.tier.time_limits import TimeLimits
from tests.support.faulty_files import FaultRates, FaultyFiles, PowerCut
from tests.support.object_server import SECRET_KEY, below
from tests.support.seeds import seeds
from tests.support.simulated_store import SimulatedStore, StoreClient, StoreWeather
from tests.support.stores import SetClock

PATH = "a/%RETRY%group/0/one object"


def make(name: str, request: pytest.FixtureRequest) -> Any:
    if name.startswith("limited "):
        inner = make(name.partition(" ")[2], request)
        return Metered(inner, Operations(), TimeLimits())
    if name == "posix":
        return PosixDriver(request.getfixturevalue("tmp_path"))
    if name == "memory":
        return MemoryDriver()
    if name == "objects":
        return ObjectDriver(MemoryStore())
    if name == "simulated":
        weather = StoreWeather(Random(1), SetClock())
        return StoreClient(SimulatedStore(), weather, lambda: None)
    location = request.getfixturevalue("bucket")
    return open_objects(below(location, request.node.name))


SERVER = pytest.param("s3", marks=pytest.mark.slow)


@pytest.fixture(params=["posix", "memory", "objects", "limited posix", "simulated", SERVER])
def driver(request: pytest.FixtureRequest) -> Any:
    return make(request.param, request)


@pytest.fixture(params=["posix", "memory", "limited posix"])
def files(request: pytest.FixtureRequest) -> Any:
    return make(request.param, request)


def fails(result: object, kind: FailureKind) -> bool:
    assert isinstance(result, Failure), result
    assert result.reason
    assert str(result).startswith(result.path)
    return result.kind is kind


def contents(driver: Any, path: str) -> bytes:
    size = driver.size(path)
    (data,) = driver.read(path, [(0, size)])
    return bytes(data)


def both_kinds(append: AppendDriver, put: PutDriver) -> tuple[AppendDriver, PutDriver]:
    return append, put


def test_types_of_drivers(tmp_path: Path) -> None:
    posix, memory = PosixDriver(tmp_path), MemoryDriver()
    assert both_kinds(posix, posix)
    assert both_kinds(memory, memory)
    assert both_kinds(memory, ObjectDriver(MemoryStore()))


# -- all drivers -----------------------------------------------------------------------------------


def test_ranges_are_read(driver: Any) -> None:
    data = Random(1).randbytes(3 << 20)
    assert not isinstance(driver.put(PATH, data), Failure)
    assert driver.size(PATH) == len(data)
    ranges = [(5, 9), (2 << 20, (2 << 20) + 100), (7, 8), (0, len(data))]
    assert [bytes(part) for part in driver.read(PATH, ranges)] == [data[s:e] for s, e in ranges]
    assert driver.read(PATH, []) == []


@pytest.mark.parametrize("wanted", [(3, 9), (0, 6), (5, 6), (90, 91)])
def test_a_range_that_ends_behind_the_data_is_short(driver: Any, wanted: tuple[int, int]) -> None:
    driver.put(PATH, b"12345")
    assert fails(driver.read(PATH, [(0, 1), wanted]), FailureKind.SHORT)
    assert fails(driver.read(PATH, [wanted]), FailureKind.SHORT)


def test_a_missing_path_is_missing(driver: Any) -> None:
    assert fails(driver.read("a/b", [(0, 1)]), FailureKind.MISSING)
    assert fails(driver.size("a/b"), FailureKind.MISSING)
    assert fails(driver.etag("a/b"), FailureKind.MISSING)
    assert driver.entries("a") == []


def test_entries_are_sorted_and_below_the_folder(driver: Any) -> None:
    for number in (3, 10, 1):
        driver.put(f"a/b/{number}", b"x" * number)
    driver.put("a/bc", b"")
    driver.put("a/c/d/e", b"yy")
    assert driver.entries("a/b") == [Entry("a/b/1", 1), Entry("a/b/10", 10), Entry("a/b/3", 3)]
    assert [entry.path for entry in driver.entries("a")][-2:] == ["a/bc", "a/c/d/e"]


def test_deleting_twice_is_no_failure(driver: Any) -> None:
    paths = [f"a/{number}" for number in range(5)]
    for path in (*paths, "a/kept"):
        driver.put(path, b"x")
    assert driver.delete([paths[0]]) is None
    assert driver.delete(paths) is None
    assert driver.delete(paths) is None
    assert driver.delete([]) is None
    assert driver.entries("a") == [Entry("a/kept", 1)]


def test_a_put_creates_only(driver: Any) -> None:
    tag = driver.put(PATH, b"first")
    assert tag == driver.etag(PATH)
    assert fails(driver.put(PATH, b"second"), FailureKind.EXISTS)
    assert contents(driver, PATH) == b"first"


def test_a_put_replaces_only_what_its_etag_names(driver: Any) -> None:
    first = driver.put(PATH, b"first")
    second = driver.put(PATH, b"second", replaces=first)
    assert second not in {first, ""}
    assert fails(driver.put(PATH, b"third", replaces=first), FailureKind.CHANGED)
    assert contents(driver, PATH) == b"second"
    driver.delete([PATH])
    assert isinstance(driver.put(PATH, b"fourth", replaces=second), Failure)


def test_one_of_many_puts_wins(driver: Any) -> None:
    tag = driver.put(PATH, b"before")
    with ThreadPoolExecutor(8) as threads:
        for after in ("", tag):
            path = PATH if after else f"{PATH} new"
            texts = [f"{number} {after}".encode() for number in range(8)]
            results = list(threads.map(lambda text: driver.put(path, text, after), texts))  # noqa: B023
            winners = [i for i, got in enumerate(results) if not isinstance(got, Failure)]
            assert len(winners) == 1
            assert contents(driver, path) == texts[winners[0]]


# -- files that grow -------------------------------------------------------------------------------


def test_a_file_grows_at_its_end_only(files: Any) -> None:
    assert fails(files.append(PATH, 3, b"later"), FailureKind.MISSING)
    assert files.append(PATH, 0, b"first") is None
    assert files.append(PATH, 5, b"") is None
    assert files.append(PATH, 5, memoryview(b"second")) is None
    for position in (0, 5, 12):
        assert fails(files.append(PATH, position, b"x"), FailureKind.CHANGED)
    assert contents(files, PATH) == b"firstsecond"


def test_a_file_is_cut(files: Any) -> None:
    assert fails(files.cut(PATH, 0), FailureKind.MISSING)
    files.append(PATH, 0, b"firstsecond")
    assert fails(files.cut(PATH, 12), FailureKind.SHORT)
    assert files.cut(PATH, 11) is None
    assert files.cut(PATH, 5) is None
    assert contents(files, PATH) == b"first"
    assert files.append(PATH, 5, b"!") is None
    assert contents(files, PATH) == b"first!"


def test_a_file_is_rewritten(files: Any) -> None:
    assert fails(files.rewrite(PATH, 0), FailureKind.MISSING)
    files.append(PATH, 0, b"firstsecond")
    assert fails(files.rewrite(PATH, 12), FailureKind.SHORT)
    for start in (0, 5, 11):
        assert files.rewrite(PATH, start) is None
        assert contents(files, PATH) == b"firstsecond"


# -- posix -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_failed_append_is_repeated_after_a_cut(tmp_path: Path, seed: int) -> None:
    disk = FaultyFiles(tmp_path, Random(seed), FaultRates(write=0.3, sync=0.3))
    disk.make_directories(tmp_path / "tier")
    driver, written = PosixDriver(tmp_path / "tier", disk), b""
    for number in range(20):
        data = bytes([number]) * 100
        while driver.append("a/b", len(written), data) is not None:
            if isinstance(driver.size("a/b"), int):
                driver.cut("a/b", len(written))
        written += data
    assert contents(driver, "a/b") == written
    disk.cut_power()
    assert disk.image is not None
    assert disk.image.files[Path("tier/a/b")] == written, f"seed {seed}"


@pytest.mark.parametrize("start", [0, 5])
def test_a_rewrite_saves_what_a_failed_sync_has_dropped(tmp_path: Path, start: int) -> None:
    more = bytes(5 << 20)  # more than is rewritten at once
    disk = FaultyFiles(tmp_path, Random(1))
    disk.make_directories(tmp_path / "tier")
    driver = PosixDriver(tmp_path / "tier", disk)
    assert driver.append("a/b", 0, b"first") is None
    disk.rates = FaultRates(sync=1.0)
    assert driver.append("a/b", 5, b"second" + more) is not None
    disk.rates = FaultRates()
    assert driver.rewrite("a/b", start) is None
    disk.cut_power()
    assert disk.image is not None
    assert disk.image.files[Path("tier/a/b")] == b"firstsecond" + more


@pytest.mark.parametrize("seed", seeds(20))
def test_a_put_is_whole_after_a_power_cut(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    disk = FaultyFiles(tmp_path, rng)
    disk.make_directories(tmp_path / "tier")
    driver = PosixDriver(tmp_path / "tier", disk)
    texts = [bytes([number]) * rng.randrange(1, 9000) for number in range(6)]
    tag, done = "", -1
    disk.cut_after = rng.randrange(60)
    try:
        for number, text in enumerate(texts):
            put = driver.put("a/manifest", text, replaces=tag)
            assert isinstance(put, str)
            tag, done = put, number
    except PowerCut:
        pass
    disk.cut_power()
    assert disk.image is not None
    found = disk.image.files.get(Path("tier/a/manifest"))
    assert found in [*texts[max(done, 0) : done + 2], *([None] if done < 0 else [])], f"seed {seed}"


@pytest.mark.parametrize("kill_after", range(12))
def test_a_folder_made_by_a_killed_process_keeps_its_name(tmp_path: Path, kill_after: int) -> None:
    disk = FaultyFiles(tmp_path, Random(kill_after))
    disk.make_directories(tmp_path / "tier")
    disk.kill_after = kill_after
    with suppress(PowerCut):
        PosixDriver(tmp_path / "tier", disk).append("a/b", 0, b"x")
    disk.kill()
    again = FaultyFiles(tmp_path, Random(kill_after), before=disk)
    driver = PosixDriver(tmp_path / "tier", again)
    assert driver.append("a/c", 0, b"x") is None
    assert isinstance(driver.put("d/e", b"x"), str)
    again.cut_power()
    assert again.image is not None
    assert {Path("tier/a/c"), Path("tier/d/e")} <= again.image.files.keys()


def test_what_a_folder_refuses_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not a folder")
    driver = PosixDriver(tmp_path / "file")
    assert fails(driver.append("a", 0, b"x"), FailureKind.UNREACHABLE)
    assert fails(driver.put("a", b"x"), FailureKind.UNREACHABLE)
    assert fails(driver.size("a"), FailureKind.UNREACHABLE)
    assert fails(driver.entries("a"), FailureKind.UNREACHABLE)
    assert fails(driver.delete(["a"]), FailureKind.UNREACHABLE)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    driver = PosixDriver(tmp_path)
    before = open_files()
    tag = driver.put("a", b"x")
    assert isinstance(tag, str)
    driver.put("a", b"y")
    driver.put("a", b"y", replaces=tag)
    driver.append("b", 0, b"x")
    driver.append("b", 0, b"x")
    driver.read("b", [(0, 9)])
    driver.cut("b", 0)
    assert open_files() == before


# -- object stores ---------------------------------------------------------------------------------


class CuttingStore(MemoryStore):
    """A store behind a proxy that cuts answers."""

    def get_ranges(self, *args: Any, **named: Any) -> Any:
        return [memoryview(part)[:-1] for part in super().get_ranges(*args, **named)]


def test_a_cut_answer_is_no_short_object() -> None:
    driver = ObjectDriver(CuttingStore())
    driver.put(PATH, b"12345")
    failure = driver.read(PATH, [(1, 4)])
    assert fails(failure, FailureKind.UNREACHABLE)
    assert "2 bytes at 1 instead of 3" in str(failure)
    assert fails(driver.read(PATH, [(3, 9)]), FailureKind.SHORT)


def test_a_store_that_does_not_answer_is_unreachable() -> None:
    keys = ("access_key_id", "access"), ("secret_access_key", "hidden-secret")
    driver = open_objects(Location("s3://bucket", "http://127.0.0.1:1", config=keys))
    failure = driver.size("a")
    assert fails(failure, FailureKind.UNREACHABLE)


@pytest.mark.slow
def test_secrets_are_in_no_text(bucket: Location) -> None:
    keys = ("access_key_id", "an-access-key"), ("secret_access_key", "a-secret-key")
    wrong = open_objects(bucket._replace(config=keys))
    for result in (wrong.size("a"), wrong.put("a", b"x"), wrong.entries("a"), wrong.etag("a")):
        assert fails(result, FailureKind.UNREACHABLE)
        assert "an-access-key" not in str(result)
        assert "a-secret-key" not in str(result)
    assert SECRET_KEY not in repr(bucket)


@pytest.mark.slow
def test_a_missing_bucket_is_not_a_missing_object(bucket: Location) -> None:
    driver = open_objects(bucket._replace(url="s3://another"))
    for result in (driver.size("a"), driver.read("a", [(0, 1)]), driver.etag("a")):
        assert fails(result, FailureKind.UNREACHABLE)
        assert "NoSuchBucket" in str(result)


AZURE = Location("az://bucket", config=(("account_name", "account"), ("account_key", "a2V5")))


@pytest.mark.parametrize("location", [Location("gs://bucket"), AZURE])
def test_other_providers_are_opened(location: Location) -> None:
    assert isinstance(open_objects(location), ObjectDriver)


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"[Ee]ndpoint|[Uu][Rr][Ll]"):
        open_objects(AZURE._replace(endpoint="no url"))
