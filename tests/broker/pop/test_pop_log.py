"""The log of pops: what is acked stays acked, and what is out stays out, whatever ends a broker."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import pytest

from headrace_broker.pop.pop_log import PopLog, PopsNotWritable
from headrace_broker.pop.pop_queue import QueueName
from headrace_broker.pop.pops import Pops
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import unsealed
from headrace_broker.store.files.filesystem import Files
from headrace_protocol.pop.handle import Handle
from tests.support.faulty_files import FaultyFiles as SeededFiles
from tests.support.faulty_files import PowerCut
from tests.support.pop_broker import INVISIBLE_MS, PopBroker, bodies, restarted
from tests.support.stores import FaultyFiles, crash

FILE_BYTES = 1 << 20


def popped(broker: PopBroker, count: int) -> list[Handle]:
    for number in range(count):
        broker.store_message("T", 0, b"%d" % number)
    return [handle for _, handle in broker.taken(queue_id=0)]


def test_a_broker_that_nobody_pops_from_has_no_log(tmp_path: Path, broker: PopBroker) -> None:
    broker.store_message("T", 0)
    assert not (tmp_path / "store/pop").exists()


@pytest.mark.parametrize("lives", [1, 2])
def test_a_kill_changes_nothing(tmp_path: Path, broker: PopBroker, lives: int) -> None:
    first, second, third, *_ = popped(broker, 5)
    for handle in (first, third):
        broker.ack(handle)
    broker.change(second, 2 * INVISIBLE_MS)
    for _ in range(lives):
        broker = restarted(broker, tmp_path)
    assert (broker.taken(), broker.pop_parts.pops.out_count) == ([], 3)
    broker.ack(third)
    broker.clock.ms += INVISIBLE_MS
    broker.revive()
    assert bodies(broker.taken()) == [b"3", b"4"]
    broker.clock.ms += 2 * INVISIBLE_MS
    broker.revive()
    assert bodies(broker.taken()) == [b"1", b"3", b"4"]
    assert len(names(tmp_path / "store/pop")) == 2  # what was left, and what is new


def test_offsets_that_were_not_saved_follow_the_log(tmp_path: Path, broker: PopBroker) -> None:
    broker.offsets.persist()
    for handle in popped(broker, 3)[:2]:
        broker.ack(handle)
    crash(broker.store)
    again = PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    assert again.progress() == 2


def test_offsets_that_are_ahead_count(tmp_path: Path, broker: PopBroker) -> None:
    """Those that another broker has saved."""
    popped(broker, 4)
    broker.offsets.on_moved = None
    broker.offsets.commit("g", "T", 0, 3)
    broker.offsets.persist()
    path = broker.store.root / "config/consumerOffset.json"
    path.write_bytes(unsealed(path.read_bytes()))
    broker = restarted(broker, tmp_path)
    assert broker.pop_parts.pops.out_count == 1
    broker.clock.ms += INVISIBLE_MS
    broker.revive()
    assert bodies(broker.taken()) == [b"3"]


def test_messages_that_a_power_cut_took_are_not_out(tmp_path: Path, broker: PopBroker) -> None:
    popped(broker, 3)
    queue = broker.pop_parts.pops.find("g", "T", 0)
    assert queue is not None
    broker.pop_parts.pops.take(queue, range(3, 6), 1 << 40, 1, 1, 0)
    broker.pop_parts.pops.move(queue, 6)
    broker.pop_parts.progress.write_out()
    broker = restarted(broker, tmp_path)
    assert broker.pop_parts.pops.out_count == 3
    broker.store_message("T", 0, b"new")
    assert bodies(broker.taken()) == [b"new"]


def test_what_was_stored_again_and_lost_is_still_out(tmp_path: Path, broker: PopBroker) -> None:
    popped(broker, 1)
    pops = broker.pop_parts.pops
    (checkpoint,) = [each for queue in pops for each in queue]
    pops.revive(checkpoint, 1, broker.store.commit_log.max_offset + 1)
    broker.pop_parts.progress.write_out()
    broker = restarted(broker, tmp_path)
    assert broker.pop_parts.pops.out_count == 1


def test_what_was_stored_again_is_not_out_although_its_event_is_lost(
    tmp_path: Path, broker: PopBroker
) -> None:
    popped(broker, 2)
    (path,) = (tmp_path / "store/pop").iterdir()
    before = path.read_bytes()
    broker.clock.ms += INVISIBLE_MS
    broker.revive()
    crash(broker.store)
    path.write_bytes(before)
    again = PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    assert again.pop_parts.pops.out_count == 0
    again.clock.ms += INVISIBLE_MS
    again.revive()
    assert bodies(again.taken()) == [b"0", b"1"]


def test_a_start_has_little_to_read(tmp_path: Path) -> None:
    ends = [0]
    log = PopLog(tmp_path, Files(), lambda: ends[0], FILE_BYTES)
    log.write_out()
    assert not list(tmp_path.iterdir())
    Pops(log, 20).open("g", "T", 0, 0)
    log.write_out()
    written = []
    for end in (1 << 20, 64 << 20, 65 << 20):
        ends[0] = end
        log.write_out()
        written.append(log.log_end)
    assert written == [0, 64 << 20, 64 << 20]
    log.close()
    again = PopLog(tmp_path, Files(), lambda: 0, FILE_BYTES)
    assert [len(event) for event in again.read()] == [6]
    assert again.log_end == 64 << 20


async def test_offsets_of_a_store_that_failed_are_not_saved(
    tmp_path: Path, broker: PopBroker
) -> None:
    for handle in popped(broker, 2):
        broker.ack(handle)
    broker.store.flusher.stop_writing("broken")
    with pytest.raises(OSError, match="offsets of pops not saved"):
        broker.offsets.persist()
    assert await broker.pop_parts.progress.bring_to_disk() is not None


@pytest.mark.parametrize("kind", ["deleted", "anew"])
def test_pops_of_a_topic_that_is_gone_are_forgotten(
    tmp_path: Path, broker: PopBroker, kind: str
) -> None:
    popped(broker, 2)
    broker.offsets.on_moved = None  # another broker did it
    broker.topics.delete("T")
    if kind == "anew":
        broker.create_topic("T")
    else:
        broker.store.delete_topic("T")
    broker = restarted(broker, tmp_path)
    assert broker.pop_parts.pops.out_count == 0


def test_a_frame_that_is_torn_ends_the_log(tmp_path: Path, broker: PopBroker) -> None:
    first, *_ = popped(broker, 2)
    broker.ack(first)
    (path,) = (tmp_path / "store/pop").iterdir()
    data = bytearray(path.read_bytes())
    end = len(bytes(data).rstrip(b"\0"))
    data[end - 1] ^= 1
    crash(broker.store)
    path.write_bytes(data)
    again = PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    assert again.pop_parts.pops.out_count == 2


@pytest.mark.parametrize("kept", [b"", bytes(8), b"HRPOP\0\0\0", b"\0\0POP\0\0\1"])
def test_a_file_whose_beginning_a_power_cut_took_is_empty(
    tmp_path: Path, broker: PopBroker, kept: bytes
) -> None:
    popped(broker, 3)
    crash(broker.store)
    (tmp_path / "store/pop/00000000000000000009").write_bytes(kept.ljust(4096, b"\0"))
    again = PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    assert again.pop_parts.pops.out_count == 3


def test_a_file_that_is_not_of_the_log_is_refused(tmp_path: Path, broker: PopBroker) -> None:
    popped(broker, 1)
    crash(broker.store)
    (tmp_path / "store/pop/00000000000000000009").write_bytes(b"something else")
    with pytest.raises(StoreFormatError, match="no log of pops"):
        PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)


# -- files ------------------------------------------------------------------------------------


def new_log(folder: Path, files: Files | None = None) -> tuple[PopLog, Pops]:
    log = PopLog(folder, files or Files(), lambda: 0, FILE_BYTES)
    return log, Pops(log, 20)


def replayed(folder: Path) -> Pops:
    log, pops = new_log(folder)
    for event in log.read():
        pops.replay(event, 1 << 60)
    return pops


def names(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.suffix != ".tmp")


@pytest.mark.slow
def test_old_files_go_although_something_stays_out(tmp_path: Path) -> None:
    log, pops = new_log(tmp_path)
    queue = pops.open("g", "T", 0, 0)
    stuck = pops.take(queue, range(2), 0, 1, 1 << 40, 0)
    pops.settle(stuck, 1)
    log.write_out()
    turns = 0
    while log.written < 12 * FILE_BYTES:
        turns += 1
        for number in range(200):
            offset = 2 + 200 * turns + number
            checkpoint = pops.take(queue, [offset, offset + 7], 0, turns, 1000, 0)
            pops.move(queue, offset + 8)
            pops.settle(checkpoint, 3)
        log.check_room()
        log.write_out()
        log.start_flush()()
        log.note_flushed(log.written)
    assert log.flushed == log.written
    assert len(names(tmp_path)) <= 5
    found = replayed(tmp_path)
    (again,) = found
    assert (again.name, again.next_offset, found.out_count) == (queue.name, queue.next_offset, 1)
    (checkpoint,) = again
    assert [offset for offset, _ in checkpoint.out()] == [1]
    log.close()


def test_a_log_of_much_that_is_out_keeps_its_files(tmp_path: Path) -> None:
    log, pops = new_log(tmp_path)
    queue = pops.open("g", "T", 0, 0)
    for turn in range(64):
        for number in range(1000):
            pops.take(queue, range(turn * 1000 + number, turn * 1000 + number + 1), 0, turn, 9, 0)
        log.write_out()
        log.start_flush()()
    assert pops.out_count == 64_000
    assert replayed(tmp_path).out_count == 64_000
    assert len(names(tmp_path)) < 5
    log.close()


def test_starts_keep_what_exceeds_a_file(tmp_path: Path) -> None:
    count = 5_000
    for life in range(4):
        log = PopLog(tmp_path / "pop", Files(), lambda: 0, 1 << 16)
        pops = Pops(log, 20)
        for event in log.read():
            pops.replay(event, 1 << 60)
        assert pops.out_count == (count if life else 0)
        pops.replayed()
        log.write_out()
        if not life:
            queue = pops.open("g", "T", 0, 0)
            for offset in range(count):
                pops.take(queue, range(offset, offset + 1), 0, 1, 9, 0)
            log.write_out()
            log.start_flush()()
        log.close()


@pytest.mark.parametrize("fault", ["is_broken", "is_unwritable"])
def test_a_start_whose_disk_fails_keeps_the_old_files(tmp_path: Path, fault: str) -> None:
    log, pops = new_log(tmp_path)
    pops.open("g", "T", 0, 5)
    log.write_out()
    log.close()
    files = FaultyFiles()
    log, pops = new_log(tmp_path, files)
    for event in log.read():
        pops.replay(event, 0)
    pops.replayed()
    vars(files)[fault] = True
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        log.write_out()
    assert names(tmp_path) == [0]
    vars(files)[fault] = False
    log.write_out()
    assert names(tmp_path) == [1]
    assert [queue.next_offset for queue in replayed(tmp_path)] == [5]


@pytest.mark.parametrize("is_torn", [True, False])
def test_a_start_that_is_killed_anywhere_changes_nothing(tmp_path: Path, *, is_torn: bool) -> None:
    """Also if the newest file ends in a frame that a power cut has torn."""
    folder = tmp_path / "pop"
    torn = several_files(folder)
    if is_torn:
        data = torn.read_bytes()
        torn.write_bytes(data[: len(data.rstrip(b"\0")) - 1].ljust(len(data), b"\0"))
    expected = state_of(replayed(folder))
    assert len(expected) == 2
    killed = 0
    while True:
        files = SeededFiles(tmp_path, Random(0))
        files.kill_after = killed
        try:
            started(folder, files)
        except PowerCut:
            killed += 1
        else:
            break
        finally:
            files.close_all()
        assert state_of(replayed(folder)) == expected
    assert killed > 5
    assert (state_of(replayed(folder)), len(names(folder))) == (expected, 1)


def test_what_a_start_found_lost_stays_out(tmp_path: Path) -> None:
    """A message to replace one is lost; the log may grow past its place before old files go."""
    log, pops = new_log(tmp_path)
    queue = pops.open("g", "T", 0, 0)
    pops.revive(pops.take(queue, range(2), 0, 1, 1000, 0), 1, 100)
    log.write_out()
    log.close()
    files = Irremovable()
    log, pops = new_log(tmp_path, files)
    for event in log.read():
        pops.replay(event, 99)
    pops.replayed()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        log.write_out()
    log.close()
    assert (names(tmp_path), replayed(tmp_path).out_count) == ([0, 1], 2)


class Irremovable(Files):
    """A disk that removes nothing."""

    def unlink(self, path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def several_files(folder: Path) -> Path:
    """What is out of two queues, in three files; returns the newest, where much is acked."""
    folder.mkdir()
    log = PopLog(folder, Files(), lambda: 0, 4096)
    pops = Pops(log, 20)
    queues = [pops.open("g", "T", queue_id, 0) for queue_id in range(2)]
    while len(names(folder)) < 3:
        for queue in queues:
            first = queue.next_offset
            taken = pops.take(queue, range(first, first + 8), 0, 1 + first, 1000, 0)
            pops.move(queue, first + 8)
            pops.settle(taken, 0b1111)
        log.write_out()
    for checkpoint in [each for queue in queues for each in queue]:
        pops.settle(checkpoint, 0b110000)
        log.write_out()
    log.close()
    return max(folder.iterdir())


def started(folder: Path, files: Files) -> None:
    """What a start does with the log, and the kill that follows."""
    log, pops = new_log(folder, files)
    for event in log.read():
        pops.replay(event, 1 << 60)
    pops.replayed()
    log.write_out()


def state_of(pops: Pops) -> dict[QueueName, tuple[int, list[tuple[int, ...]]]]:
    for queue in pops:
        assert queue.out_count == sum(each.bits.bit_count() for each in queue)
    return {
        queue.name: (queue.next_offset, [(*each.key, each.settled) for each in queue])
        for queue in pops
    }


def test_events_that_could_not_be_written_are_written_later(tmp_path: Path) -> None:
    files = FaultyFiles()
    log, pops = new_log(tmp_path, files)
    pops.open("g", "T", 0, 5)
    files.is_unwritable = True
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        log.write_out()
    with pytest.raises(PopsNotWritable, match=os.strerror(errno.EIO)):
        log.check_room()
    files.is_unwritable = False
    log.write_out()
    log.check_room()
    assert [queue.next_offset for queue in replayed(tmp_path)] == [5]
    log.close()


def test_a_request_without_room_changes_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.is_full = True
    log, _ = new_log(tmp_path / "missing/pop", files)
    with pytest.raises(PopsNotWritable, match="free space"):
        log.check_room()
    assert not list((tmp_path / "missing/pop").iterdir())
    log.close()
