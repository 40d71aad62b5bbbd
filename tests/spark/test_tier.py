"""Reads of a tier without its broker: what is planned, and what tasks make of it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.embedded import Embedded
from headrace.spark.chains import Item
from headrace.spark.cluster import Cluster, Topics
from headrace.spark.errors import DataLoss, OptionError, TierGone, TierUnreachable, TopicNotFound
from headrace.spark.options import ReadOptions, read_options
from headrace.spark.plan.direct import tasks_for
from headrace.spark.plan.filters import Predicates, Span
from headrace.spark.plan.ranges import Range, extent, narrow
from headrace.spark.plan.tasks import ReadPlan, ReadTask
from headrace.spark.read.columns import arrow_schema
from headrace.spark.read.schema import source_schema
from headrace.spark.read.task import read_range
from headrace.spark.retry import AT_ONCE
from headrace.spark.tier import direct, plans
from headrace.spark.tier.locations import TaskDriver, TierAccess, expect, open_location
from headrace.spark.tier.manifest import open_tier
from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_protocol.blocks import encode_records
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.codes import RequestCode
from headrace_protocol.message import encode_properties
from headrace_protocol.message_ids import encode_host
from headrace_protocol.tier import stored_queue
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.location import Location
from headrace_protocol.tier_bodies import TierStatus
from headrace_protocol.tier_headers import TierStatusHeader
from tests.spark.brokers import broker
from tests.support.bulk import store_block
from tests.support.hanging import Hanging, Patience
from tests.support.until import wait_until

COUNT = 3000
UPLOADS = 3
TOPIC = "T"
QUEUE = MessageQueue(TOPIC, "tiered", 0)
HOST = encode_host("10.0.0.9", 4711)
SCHEMA = arrow_schema(source_schema())


class Tiered:
    """A broker with a tier: three uploads of a thousand messages, and some that only it has."""

    def __init__(self, mq: Embedded, folder: Path) -> None:
        self.mq = mq
        self.folder = folder
        self.cluster = Cluster([mq.nameserver])
        self.address = self.cluster.masters()["tiered"]

    def fill(self) -> None:
        for first in range(0, COUNT, COUNT // UPLOADS):
            self.send(range(first, first + COUNT // UPLOADS))
            self.wait_for_upload()

    def send(self, numbers: range) -> None:
        raws = [encode_properties({"TAGS": "few" if n % 50 == 0 else "many"}) for n in numbers]
        bodies = [b"%d " % n + b"x" * (n % 700) for n in numbers]
        block = encode_records(TOPIC, bodies, raws, born_timestamp=0, born_host=HOST)
        store_block(self.address, TOPIC, block)

    def wait_for_upload(self) -> None:
        def is_uploaded() -> bool:
            request = RequestCode.TIER_STATUS, TierStatusHeader(max_num=1), b""
            status = self.cluster.ask(self.address, [request])[0].expect().decode(TierStatus)
            return bool(status.queues) and not status.queues[0].behind_messages

        wait_until(is_uploaded)

    def options(self, **given: str) -> ReadOptions:
        return read_options({"nameserver": self.mq.nameserver, "topic": TOPIC, **given})

    def tasks(self, start: int, end: int, **given: str) -> list[ReadTask]:
        options = self.options(**({"tier": "direct"} | given))
        queues = self.cluster.queues(options.topics)
        return tasks_for(self.cluster, queues, {QUEUE: Range(start, end)}, options)

    @property
    def manifest(self) -> str:
        found = [*self.folder.rglob("manifest.json")]
        return found[0].as_uri() if found else self.folder.as_uri()


@pytest.fixture(scope="module", params=["file", "posix"])
def tiered(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Tiered]:
    folder = tmp_path_factory.mktemp(request.param)
    settings = {
        "message_store_plug_in": "tieredstore",
        "tiered_backend_service_provider": request.param,
        "tiered_store_file_path": folder / "tier",
        "tiered_store_group_commit_timeout": 10,
        "tiered_store_commit_log_max_size": 200_000,
        "tiered_store_consume_queue_max_size": 20 * 700,
        "tiered_store_index_file_max_hash_slot_num": 13,
        "tiered_store_index_file_max_index_num": 50,
    }
    with (
        headrace.embedded() as mq,
        broker(mq, folder / "store", "tiered", **settings),
        headrace.blocking.Admin(nameserver=mq.nameserver) as admin,
    ):
        admin.create_topic(TOPIC, queues=1, broker="tiered")
        found = Tiered(mq, folder / "tier")
        found.fill()
        yield found
        found.cluster.close()


def without_broker(tasks: list[ReadTask]) -> list[ReadTask]:
    """The same tasks, which can't reach the broker."""
    for task in tasks:
        task.ranges = tuple(replace(part, address="127.0.0.1:1") for part in task.ranges)
    return tasks


def numbers(tasks: list[ReadTask], plan: ReadPlan | None = None) -> list[int]:
    """The numbers in the bodies, which are in order, as tasks in other processes read them."""
    plan = plan or ReadPlan(slice_bytes=50_000, patience=AT_ONCE)
    return [
        int(body.split()[0])
        for task in pickle.loads(pickle.dumps(tasks))
        for part in task.ranges
        for batch in read_range(plan, part, SCHEMA)
        for body in batch["value"].to_pylist()
    ]


def test_a_range_is_read_without_its_broker(tiered: Tiered) -> None:
    for start, end in ((0, COUNT), (17, 2517), (2999, 3000)):
        assert numbers(without_broker(tiered.tasks(start, end))) == [*range(start, end)]


def test_all_columns_are_those_of_the_broker(tiered: Tiered) -> None:
    ((part,),) = (task.ranges for task in tiered.tasks(990, 1010))
    by_broker = replace(part, tier=None)
    plan = ReadPlan()
    one, other = (
        [row for batch in read_range(plan, each, SCHEMA) for row in batch.to_pylist()]
        for each in (part, by_broker)
    )
    # Places in the tier are not those in the log, and ids without a producer's name places.
    for row in (*one, *other):
        del row["physical_offset"], row["message_id"]
    assert one == other
    assert len(one) == 20


def test_tasks_have_about_equal_bytes(tiered: Tiered) -> None:
    tasks = without_broker(tiered.tasks(0, COUNT, splitBytes="200000"))
    parts = [part for task in tasks for part in task.ranges]
    assert numbers(tasks) == [*range(COUNT)]
    sizes = [
        sum(n % 700 + 150 for n in range(part.start_offset, part.end_offset)) for part in parts
    ]
    assert len(parts) >= 6
    assert max(sizes) < 2 * min(sizes)
    # A task gets only what it needs.
    assert all(part.tier is not None for part in parts)
    if tiered.manifest.endswith(".json"):
        assert {len(part.tier.units) for part in parts if part.tier} <= {1, 2}


def test_only_matching_records_are_read(tiered: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    read = TaskDriver.read

    def count(self: Any, path: str, ranges: Any) -> Any:
        found = read(self, path, ranges)
        sizes.extend(map(len, expect(found)))
        return found

    monkeypatch.setattr(TaskDriver, "read", count)
    monkeypatch.setattr(stored_queue, "_GAP_BYTES_MAX", 0)
    tasks = without_broker(tiered.tasks(0, COUNT))
    for plan in (ReadPlan(tags="few"), ReadPlan(predicates=Predicates(tags=frozenset({"few"})))):
        sizes.clear()
        assert numbers(tasks, plan) == [*range(0, COUNT, 50)]
        assert sum(sizes) < 20 * COUNT + 60 * 700


def test_newer_messages_come_from_the_broker(tiered: Tiered) -> None:
    """The broker is asked for what no span has, and for nothing else."""
    tasks = tiered.tasks(0, COUNT + 10)
    parts = [part for task in tasks for part in task.ranges]
    assert [part.tier is None for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].start_offset, parts[-1].end_offset) == (COUNT, COUNT + 10)


class Moving:
    """A place from which objects vanish while a task reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, plans_help: bool) -> None:
        self.reads = 0
        self.plans = 0
        self._read = TaskDriver.read
        monkeypatch.setattr(TaskDriver, "read", self.read)
        ask = plans.ask_range
        self._plans_help = plans_help

        def asked(*args: Any) -> Any:
            self.plans += 1
            return ask(*args)

        monkeypatch.setattr(direct, "ask_range", asked)

    def read(self, *args: Any) -> Any:
        self.reads += 1
        if self.reads > 4 and not (self._plans_help and self.plans):
            return Failure(FailureKind.MISSING, args[0], "is not there any more")
        return self._read(open_location(Location(str(self.folder))), *args)

    folder: Path


@pytest.mark.parametrize("plans_help", [True, False])
def test_what_moved_is_read_elsewhere(
    tiered: Tiered, monkeypatch: pytest.MonkeyPatch, plans_help: bool
) -> None:
    """A task asks for another plan, and reads from the broker if that does not help."""
    tasks = tiered.tasks(0, COUNT)
    moving = Moving(monkeypatch, plans_help=plans_help)
    moving.folder = tiered.folder
    assert numbers(tasks) == [*range(COUNT)]
    assert moving.plans == 1


def test_a_manifest_is_enough(tiered: Tiered) -> None:
    access = TierAccess(tiered.manifest)
    stored = open_tier(access)
    queues = stored.queues(Topics((TOPIC,)))
    assert queues == {QUEUE: ""}
    has = extent(stored, queues)
    assert (has.min[QUEUE], has.max[QUEUE]) == (0, COUNT)
    options = tiered.options(manifest=tiered.manifest)
    ranges = {QUEUE: Range(5, 2900)}
    assert numbers(tasks_for(stored, queues, ranges, options)) == [*range(5, 2900)]
    with pytest.raises(TopicNotFound, match="no messages of Nothing"):
        stored.queues(Topics(("Nothing",)))


def test_times_choose_offsets(tiered: Tiered) -> None:
    stored = open_tier(TierAccess(tiered.manifest))
    queues = stored.queues(Topics((TOPIC,)))
    (times,) = (
        [row["store_timestamp"].timestamp() * 1000 for row in rows]
        for rows in [
            [
                row
                for task in tiered.tasks(0, COUNT)
                for part in task.ranges
                for batch in read_range(ReadPlan(), part, SCHEMA)
                for row in batch.select(["store_timestamp"]).to_pylist()
            ]
        ]
    )
    for ms in {0, round(times[0]), round(times[1500]), round(times[-1]), round(times[-1]) + 1}:
        expected = next((n for n, time_ms in enumerate(times) if round(time_ms) >= ms), COUNT)
        assert stored.offsets_at(queues, ms) == {QUEUE: expected}
    later = Predicates(store_ms=Span(start=round(times[-1]) + 20_000))
    assert narrow({QUEUE: Range(0, COUNT)}, later, stored, queues) == {QUEUE: Range(COUNT, COUNT)}


def test_messages_that_expired_are_reported_without_a_broker(
    tiered: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = open_tier(TierAccess(tiered.manifest))
    options = tiered.options(manifest=tiered.manifest)
    tasks = tasks_for(stored, {QUEUE: ""}, {QUEUE: Range(0, COUNT)}, options)
    moving = Moving(monkeypatch, plans_help=False)
    moving.folder = tiered.folder
    moving.reads = 99
    monkeypatch.setattr(direct, "open_tier", lambda _: stored)
    with pytest.raises(DataLoss, match="T/tiered/0 no longer has a message at offset 0"):
        numbers(tasks)
    assert numbers(tasks, ReadPlan(fail_on_data_loss=False)) == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tier": "indirect"}, "the only value is direct"),
        ({"tier.access_key_id": "k"}, "only with option tier or manifest"),
        ({"tier": "direct", "table": "true"}, "does not apply to tables"),
        ({"manifest": "/m", "filter": "a > 1"}, "is SQL92"),
    ],
)
def test_options_that_do_not_fit(given: dict[str, str], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        read_options({"topic": TOPIC, **given})


def test_secrets_are_not_shown() -> None:
    given = {"topic": TOPIC, "tier": "direct", "tier.Secret_Access_Key": "hidden"}
    options = read_options(given)
    assert options.tier == TierAccess(None, (("secret_access_key", "hidden"),))
    assert "hidden" not in repr(options) + repr(Location("s3://b", config=options.tier.config))


def test_brokers_without_a_tier(tiered: Tiered) -> None:
    part = Item(QUEUE, tiered.mq.broker, 0, 0, 1)
    with pytest.raises(OptionError, match=r"broker tiered at .* can't say where its tier is"):
        tiered.cluster.tier_range(part, TierAccess())


def test_a_folder_that_is_not_mounted(tmp_path: Path) -> None:
    store = open_location(Location((tmp_path / "away").as_uri()))
    with pytest.raises(TierUnreachable, match="is not there: mount its file system"):
        expect(store.read("x", [(0, 1)]))
    with pytest.raises(OptionError, match=r"neither a manifest\.json nor a folder"):
        open_tier(TierAccess(str(tmp_path / "away")))


@pytest.mark.parametrize(
    "path", ["/etc/hostname", "../outside", "a/../../outside", "link", "a//b", ".", ""]
)
def test_only_names_below_the_place_are_read(tmp_path: Path, path: str) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    (place / "a").mkdir(parents=True)
    outside.write_bytes(b"secret")
    (place / "link").symlink_to(outside)
    store = open_location(Location(place.as_uri()))
    found = store.read(path, [(0, 5)])
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.DAMAGED
    assert ("leads out of" in found.reason) == (path == "link")
    assert isinstance(store.read_all(path), Failure)


def test_devices_are_not_read(tmp_path: Path) -> None:
    store = open_location(Location("file:///dev"))
    for found in (store.read("zero", [(0, 5)]), store.read_all("zero")):
        with pytest.raises(TierGone, match="no regular file"):
            expect(found)


@pytest.mark.parametrize(
    "ranges", [[(0, 1 << 31)], [(0, 100 << 20), (0, 100 << 20)], [(5, 4)], [(-1, 4)]]
)
def test_ranges_of_unreasonable_sizes_are_not_read(
    tmp_path: Path, ranges: list[tuple[int, int]]
) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2 << 30)
    store = open_location(Location(tmp_path.as_uri()))
    with pytest.raises(TierGone, match=r"at most 134217728 are read|no file has"):
        expect(store.read("sparse", ranges))
    with pytest.raises(TierGone, match="at most 67108864 are read"):
        expect(store.read_all("sparse"))


def test_a_folder_that_hangs() -> None:
    place, patience = Hanging(MemoryDriver()), Patience()
    place.hang("read", "size")
    store = TaskDriver(place, patience.limits)
    for read in (lambda: store.read("segment", [(0, 5)]), lambda: store.read_all("segment")):
        with pytest.raises(TierUnreachable, match=r"no answer to (read|size) in 1000 s"):
            expect(patience.abandon(place, read))
    place.release_all()


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headrace_protocol.tier.objects", raising=False)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(OptionError, match="needs obstore: pip install obstore"):
        open_location(Location("s3://bucket/prefix"))


@pytest.mark.slow
def test_a_task_imports_no_daemon() -> None:
    code = "import sys, headrace.spark.read.task; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found = {name.partition(".")[0] for name in run.stdout.split()}
    assert {"headrace", "headrace_protocol", "numpy"} <= found
    assert not found & {"headrace_broker", "headrace_daemon", "obstore", "structlog", "trio"}
