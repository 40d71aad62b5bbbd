"""Key indexes that are made in the background, and the requests that wait for them."""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import trio

from headrace_broker.compaction.index_builds import IndexLimits
from headrace_broker.compaction.key_hash import KeyHash
from headrace_broker.compaction.key_index import KeyIndex
from headrace_broker.compaction.key_index_build import enter_all
from headrace_broker.compaction.lookups import LookupLimits
from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.throttle import RunStopped
from headrace_broker.compaction.worker import IndexTask, index_here, index_in_process
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.files.page_cache import PageCache
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import GetByKeyHeader, GetByKeyResponseHeader, GetMaxOffsetHeader
from headrace_protocol.key_lookup import NoRecord, WantedKey, decode_found, encode_keys
from headrace_protocol.message import decode_record
from tests.broker.compaction.test_compaction_lookups import flip_bit, get, index_file, key
from tests.broker.compaction.test_compaction_source import C, compact, create, fill, follow, start
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.compaction import SIZES as LOG_SIZES
from tests.support.compaction import block, open_log
from tests.support.faulty_files import FaultyFiles, PowerCut
from tests.support.running import in_background
from tests.support.stores import crash

COUNT = 100
HASH = KeyHash(bytes(32))


class Client(MemoryChannel):
    """A client that waits for answers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_answered = trio.Event()

    def write(self, *buffers: bytes | bytearray | memoryview) -> None:
        super().write(*buffers)
        self.is_answered.set()

    def ask(self, broker: BrokerUnderTest, *keys: WantedKey) -> None:
        header = GetByKeyHeader(topic=C, count=len(keys), max_msg_bytes=1 << 20)
        broker.send(RequestCode.GET_BY_KEY, header, encode_keys(keys), channel=self)

    def bodies(self) -> list[bytes | NoRecord]:
        """Bodies in the answer."""
        ((command, body),) = self.replies()
        assert command.code == ResponseCode.SUCCESS, command.remark
        count = command.header(GetByKeyResponseHeader).count
        return [
            found if isinstance(found, NoRecord) else decode_record(found).body
            for found in decode_found(count, body)
        ]

    def refusal(self) -> tuple[int, str]:
        """Code and remark of the answer."""
        ((command, _body),) = self.replies()
        return command.code, command.remark or ""


def serve(broker: BrokerUnderTest, *clients: Client) -> None:
    """Run the builds until all clients are answered."""

    async def run() -> None:
        async with in_background(broker.compaction.index_builds.run):
            with trio.fail_after(60):
                for client in clients:
                    await client.is_answered.wait()

    trio.run(run)


def use(broker: BrokerUnderTest, indexer: Callable[..., None]) -> None:
    broker.compaction.index_builds.indexer = indexer


def open_broker(folder: Path) -> BrokerUnderTest:
    broker = start(folder)
    use(broker, index_here)
    broker.compaction.index_builds.limits = IndexLimits(few_messages=10)
    broker.compaction.lookups.limits = LookupLimits(answer_s=60.0)
    return broker


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    """A compacted queue that has no index, and more messages than are entered at once."""
    broker = open_broker(tmp_path)
    create(broker)
    fill(broker, 0, COUNT)
    follow(broker)
    return broker


def test_a_request_waits_for_the_index_and_others_do_not(broker: BrokerUnderTest) -> None:
    client, other = Client(), Client()
    client.ask(broker, key("k5"), key("never"), key(f"k{COUNT - 1}"))
    other.ask(broker, key("k6"))
    assert not client.written
    assert client.charged_bytes > 0
    header = GetMaxOffsetHeader(topic=C, queue_id=0)
    assert broker.ask(RequestCode.GET_MAX_OFFSET, header, channel=Client()).code == 0
    info = broker.compaction.runtime_info()
    assert info["keyIndexProgress"] == "C/0 0 %"
    serve(broker, client, other)
    assert client.bodies() == [b"5", NoRecord.NEVER, b"%d" % (COUNT - 1)]
    assert other.bodies() == [b"6"]
    assert client.charged_bytes == other.charged_bytes == 0
    info = broker.compaction.runtime_info()
    assert (info["keyIndexBuilds"], info["keyIndexProgress"]) == ("1", "")


def test_a_late_request_gets_the_progress(broker: BrokerUnderTest) -> None:
    is_answered = threading.Event()
    builds = broker.compaction.index_builds
    builds.limits = IndexLimits(few_messages=10, hold_s=0.0)
    segments = broker.compaction.queues.open(C, 0).log.segments
    total_bytes = sum(segment.log_end for segment in segments)

    def half(task: IndexTask, pace: Callable[[int], None]) -> None:
        pace(total_bytes // 2 + 1)
        trio.from_thread.run_sync(client.ask, broker, key("k5"))
        assert is_answered.wait(60)
        index_here(task, pace)

    use(broker, half)
    client, again = Client(), Client()
    progress: list[str] = []
    builds.prepare((C, 0))

    async def run() -> None:
        async with in_background(builds.run):
            await client.is_answered.wait()
            progress.append(builds.runtime_info()["keyIndexProgress"])
            builds.limits = IndexLimits(few_messages=10, hold_s=60.0)
            again.ask(broker, key("k5"))
            is_answered.set()
            await again.is_answered.wait()

    trio.run(run)
    assert progress == ["C/0 50 %"]
    code, remark = client.refusal()
    assert code == ResponseCode.SYSTEM_BUSY
    assert "queue 0 of topic C" in remark
    assert "50 %" in remark
    assert again.bodies() == [b"5"]


def test_sealed_files_are_entered_without_a_request(broker: BrokerUnderTest) -> None:
    builds, entered = broker.compaction.index_builds, trio.Event()

    def index(task: IndexTask, pace: Callable[[int], None]) -> None:
        index_here(task, pace)
        trio.from_thread.run_sync(entered.set)

    use(broker, index)

    async def run() -> None:
        async with in_background(builds.run):
            await entered.wait()

    trio.run(run)
    segments = broker.compaction.queues.open(C, 0).log.segments
    (position,) = struct.unpack_from("<q", index_file(broker.store.root.parent).read_bytes(), 40)
    assert position == segments[-2].last_queue_offset + 1
    builds.limits = IndexLimits(few_messages=COUNT)
    assert get(broker, key("k5"), key(f"k{COUNT - 1}")) == [b"5", b"%d" % (COUNT - 1)]
    assert builds.runtime_info()["keyIndexBuilds"] == "1", "a request enters the rest"


def test_a_request_makes_a_build_urgent(broker: BrokerUnderTest) -> None:
    """The build of sealed files is given up for one that also has the last file."""
    client, tasks = Client(), list[IndexTask]()

    def index(task: IndexTask, pace: Callable[[int], None]) -> None:
        if not tasks:
            trio.from_thread.run_sync(client.ask, broker, key(f"k{COUNT - 1}"))
        tasks.append(task)
        index_here(task, pace)

    use(broker, index)
    serve(broker, client)
    assert client.bodies() == [b"%d" % (COUNT - 1)]
    assert [task.is_wanted for task in tasks] == [False, True]


@pytest.mark.parametrize("part", ["head", "entry"])
def test_a_damaged_index_is_made_again(tmp_path: Path, broker: BrokerUnderTest, part: str) -> None:
    client = Client()
    client.ask(broker, key("k5"))
    serve(broker, client)
    broker.topics.saved.finish()
    broker.close()
    path = index_file(tmp_path)
    data = path.read_bytes()
    slots = [*struct.iter_unpack("<QQ", data[64:])]
    used = [number for number, (_hash, value) in enumerate(slots) if value]
    bits = [8 * (64 + 16 * number) + 70 for number in used]
    for at in bits if part == "entry" else [8 * 41]:
        flip_bit(path, at)
    again = open_broker(tmp_path)
    clients = [Client(), Client()]
    for number, client in enumerate(clients):
        client.ask(again, key(f"k{number}"), key("never"))
        assert not client.written
    serve(again, *clients)
    for number, client in enumerate(clients):
        assert client.bodies() == [b"%d" % number, NoRecord.NEVER]
    assert again.compaction.runtime_info()["keyIndexBuilds"] == "1"


def test_two_indexes_are_made(broker: BrokerUnderTest) -> None:
    broker.create_topic(C, 2, attributes={"cleanup.policy": "COMPACTION"})
    for number in range(COUNT):
        broker.store_message(C, 1, b"%d" % -number, KEYS=f"k{number}")
    follow(broker)
    clients = [Client(), Client(), Client()]
    for queue_id, client in enumerate(clients[:2]):
        client.ask(broker, key("k5", queue_id))
    clients[2].ask(broker, key("k5", -1))
    assert broker.compaction.runtime_info()["keyIndexProgress"] == "C/0 0 %, C/1 0 %"
    serve(broker, *clients)
    assert [client.bodies() for client in clients] == [[b"5"], [b"-5"], [b"-5"]]


def test_a_run_during_the_build_has_it_read_the_new_files(broker: BrokerUnderTest) -> None:
    tries = 0

    def index(task: IndexTask, pace: Callable[[int], None]) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            trio.from_thread.run_sync(compact, broker)
        index_here(task, pace)

    use(broker, index)
    for number in range(COUNT // 2):  # so that the run drops some
        broker.store_message(C, 0, b"new", KEYS=f"k{number}")
    follow(broker)
    client = Client()
    client.ask(broker, key("k5"), key(f"k{COUNT - 1}"))
    serve(broker, client)
    assert client.bodies() == [b"new", b"%d" % (COUNT - 1)]
    assert tries == 2


def test_a_topic_deleted_during_the_build_leaves_no_index(broker: BrokerUnderTest) -> None:
    def index(task: IndexTask, pace: Callable[[int], None]) -> None:
        def delete() -> None:
            header = DeleteTopicHeader(topic=C)
            assert broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, header).code == 0
            follow(broker)

        trio.from_thread.run_sync(delete)
        index_here(task, pace)

    use(broker, index)
    client = Client()
    client.ask(broker, key("k5"))
    serve(broker, client)
    assert client.refusal()[0] == ResponseCode.TOPIC_NOT_EXIST
    create(broker)
    broker.store_message(C, 0, b"new", KEYS="k6")
    follow(broker)
    assert get(broker, key("k5"), key("k6")) == [NoRecord.NEVER, b"new"]


def test_a_failed_build_is_reported_and_tried_again(broker: BrokerUnderTest) -> None:
    broker.faults = 1

    def fail(task: IndexTask, pace: Callable[[int], None]) -> None:
        raise OSError(errno.ENOSPC, "no space left on the disk")

    use(broker, fail)
    client, again = Client(), Client()
    client.ask(broker, key("k5"))
    serve(broker, client)
    code, remark = client.refusal()
    assert code == ResponseCode.SYSTEM_ERROR
    assert "no space left" in remark
    assert broker.compaction.runtime_info()["keyIndexFailures"] == "1"
    use(broker, index_here)
    again.ask(broker, key("k5"))
    serve(broker, again)
    assert again.bodies() == [b"5"]


def test_a_stop_ends_a_build_and_the_next_start_resumes(
    tmp_path: Path, broker: BrokerUnderTest
) -> None:
    began = trio.Event()

    def stop(task: IndexTask, pace: Callable[[int], None]) -> None:
        trio.from_thread.run_sync(began.set)
        raise RunStopped

    use(broker, stop)
    client = Client()
    client.ask(broker, key("k5"))

    async def run() -> None:
        async with in_background(broker.compaction.index_builds.run):
            await began.wait()

    trio.run(run)
    assert not client.written
    broker.topics.saved.finish()
    crash(broker.store)
    again = open_broker(tmp_path)
    client.ask(again, key("k5"))
    serve(again, client)
    assert client.bodies() == [b"5"]


def test_many_keys_in_one_request(broker: BrokerUnderTest) -> None:
    client = Client()
    client.ask(broker, key("k5"))
    serve(broker, client)
    wanted = [key(f"k{number % (2 * COUNT)}") for number in range(10_000)]
    expected = [
        b"%d" % (number % (2 * COUNT)) if number % (2 * COUNT) < COUNT else NoRecord.NEVER
        for number in range(10_000)
    ]
    assert get(broker, *wanted) == expected


# -- the files -------------------------------------------------------------------------------------


def make_log(root: Path, count: int) -> QueueLog:
    log = open_log(root)
    for first in range(0, count, 10):
        numbers = range(first, first + 10)
        log.append(block(first, [b"x"] * 10, keys=[f"key {number}" for number in numbers]))
    return log


def load(root: Path, fs: Files) -> KeyIndex:
    return KeyIndex(root / "keys", fs, HASH, PageCache(fs), trusts_count=False, slots_min=8)


def require_all(root: Path, log: QueueLog, count: int, moment: str) -> None:
    """Resume an index, and find each key in it."""
    index = load(root, Files())
    enter_all(index, log.segments, log.end_offset, lambda _bytes: None)
    found = [index.find(b"key %d" % number) for number in range(count)]
    assert found == [*range(count)], moment
    index.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_cut", [False, True], ids=["kill", "power cut"])
def test_an_index_survives_an_end_at_each_operation(tmp_path: Path, *, is_cut: bool) -> None:
    """The table grows several times."""
    log, seed = make_log(tmp_path / "log", 120), Random().getrandbits(32)
    number, is_done = 0, False
    while not is_done:
        root = tmp_path / str(number)
        fs = FaultyFiles(root, Random(seed + number))
        fs.end_in(number, is_cut=is_cut)
        try:
            index = load(root, fs)
            enter_all(index, log.segments, log.end_offset, lambda _bytes: None)
            index.sync()
            is_done = True
        except PowerCut:
            if fs.image is not None:
                fs.image.write_to(root)
        require_all(root, log, 120, f"seed {seed}, operation {number}")
        number += 1
    assert number > 30


@pytest.mark.slow
def test_a_killed_process_leaves_an_index_that_is_resumed(tmp_path: Path) -> None:
    log = make_log(tmp_path, 300)
    log.sync()
    task = IndexTask(
        log.folders.texts,
        LOG_SIZES,
        [(segment.base, segment.count) for segment in log.segments],
        log.end_offset,
        str(tmp_path / "keys"),
        HASH.seed,
        trusts_count=True,
        is_wanted=True,
    )

    class Killed(Exception):
        pass

    def kill_at(count: int) -> Callable[[int], None]:
        asked = iter(range(count))

        def pace(_bytes: int) -> None:
            if next(asked, None) is None:
                raise Killed

        return pace

    for count in (0, 1, 7):
        with pytest.raises(Killed):
            index_in_process(task, kill_at(count))
    index_in_process(task, lambda _bytes: None)
    path = next((tmp_path / "keys").iterdir())
    whole = path.read_bytes()
    require_all(tmp_path, log, 300, "after kills")
    path.unlink()
    index_here(task, lambda _bytes: None)
    assert path.read_bytes() == whole
