"""How changes by pops come to disk: one flush at a time, outages, and answers that wait for it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from headrace_broker.store.files.filesystem import Files
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import header_fields
from headrace_protocol.frame import Frame, FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.pop.handle import Handle
from tests.support.broker import Answer, broker_config
from tests.support.channel import MemoryChannel
from tests.support.pop_broker import PopBroker, answers, messages_of, restarted
from tests.support.stores import FaultyFiles


def popped(broker: PopBroker, count: int) -> list[Handle]:
    for number in range(count):
        broker.store_message("T", 0, b"%d" % number)
    return [handle for _, handle in broker.taken(queue_id=0)]


# -- outages ----------------------------------------------------------------------------------


def test_a_disk_without_room_refuses_pops_by_name(tmp_path: Path, broker: PopBroker) -> None:
    broker.store_message("T", 0)
    broker.disk.is_full = True
    answer = broker.pop()
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert str(tmp_path / "store/pop") in answer.remark
    assert list((tmp_path / "store/pop").iterdir()) == []
    broker.disk.is_full = False
    assert len(broker.taken()) == 1


def test_a_turn_that_can_not_be_written_is_an_outage(tmp_path: Path, broker: PopBroker) -> None:
    """Requests are refused until what is missing is written."""
    first, *_ = popped(broker, 2)
    broker.disk.is_unwritable = True
    assert broker.ack(first).code == ResponseCode.SUCCESS
    for answer in (broker.pop(), broker.ack(first)):
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert os.strerror(errno.EIO) in answer.remark
    broker.offsets.reset("g", "T", 1, 0)
    with pytest.raises(OSError, match="not saved"):
        broker.offsets.persist()
    broker.disk.is_unwritable = False
    broker.pop_parts.progress.write_out()
    assert (broker.pop().code, broker.progress()) == (ResponseCode.POLLING_TIMEOUT, 1)
    assert restarted(broker, tmp_path).pop_parts.pops.out_count == 1


async def test_a_pop_that_waits_takes_nothing_in_an_outage(broker: PopBroker) -> None:
    first, *_ = popped(broker, 2)
    channel = broker.hold()
    broker.disk.is_unwritable = True
    broker.ack(first)
    broker.disk.is_unwritable = False
    broker.store_message("T", 0)
    (answer,) = answers(channel)
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert broker.pop_parts.pops.out_count == 1


async def test_an_outage_ends_by_itself(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """With synchronous flush answers wait for its end."""
    broker = sync_broker(tmp_path)
    stored_and_flushed(broker)
    channel = MemoryChannel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broker.pop_parts.progress.run)
        await trio.testing.wait_all_tasks_blocked()
        broker.disk.is_unwritable = True
        broker.send(RequestCode.POP_MESSAGE, broker.pop_header(), channel=channel)
        await trio.testing.wait_all_tasks_blocked()
        assert answers(channel) == []
        broker.disk.is_unwritable = False
        answer = await answered(channel)
        assert len(messages_of(answer)) == 1
        nursery.cancel_scope.cancel()


class FullOfPops(FaultyFiles):
    """A disk with room for anything but pops."""

    def __init__(self) -> None:
        super().__init__()
        self.has_room = False

    def open(self, path: Path, flags: int = os.O_RDWR) -> int:
        if path.parent.name == "pop" and flags & os.O_CREAT and not self.has_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, flags)


def test_starts_without_room_keep_what_is_out(tmp_path: Path, broker: PopBroker) -> None:
    first, *_ = popped(broker, 3)
    broker.ack(first)
    for _ in range(2):
        files = FullOfPops()
        broker = restarted(broker, tmp_path, files)
        assert broker.pop_parts.pops.out_count == 2
        assert broker.pop().code == ResponseCode.SERVICE_NOT_AVAILABLE
    files.has_room = True
    broker.pop_parts.progress.write_out()
    assert broker.pop().code == ResponseCode.POLLING_TIMEOUT
    assert len(list((tmp_path / "store/pop").iterdir())) == 2  # what was left, and room for more
    assert restarted(broker, tmp_path).pop_parts.pops.out_count == 2


def test_a_stop_needs_no_room(tmp_path: Path, broker: PopBroker) -> None:
    popped(broker, 3)
    broker.disk.is_full = True
    broker.pop_parts.finish()
    assert restarted(broker, tmp_path).pop_parts.pops.out_count == 3


def test_a_stop_fails_for_nothing_that_only_another_broker_reads(
    tmp_path: Path, broker: PopBroker
) -> None:
    broker.store_message("T", 0)
    broker.taken(order=True)
    broker.disk.is_full = broker.disk.is_unwritable = True
    broker.pop_parts.finish()
    assert restarted(broker, tmp_path).pop_parts.pops.out_count == 1


def test_a_stop_that_loses_something_says_so(broker: PopBroker) -> None:
    first, *_ = popped(broker, 2)
    broker.disk.is_unwritable = True
    broker.ack(first)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        broker.pop_parts.finish()
    broker.disk.is_unwritable = False


# -- flush ------------------------------------------------------------------------------------


def sync_broker(folder: Path, files: Files | None = None) -> PopBroker:
    config = broker_config(folder, flush_disk_type="SYNC_FLUSH")
    return PopBroker(folder, config, flush="sync", files=files, commit_log_file_bytes=1 << 16)


def stored_and_flushed(broker: PopBroker) -> None:
    """A message, for a group that is known."""
    broker.pop()
    broker.store_message("T", 0)
    broker.store.flusher.flush_now()
    broker.store.write_path.publish()


async def answered(channel: MemoryChannel) -> Answer:
    """The answer that a thread has to bring about."""
    with trio.fail_after(30):
        while not channel.written:  # noqa: ASYNC110 - no event tells
            await trio.sleep(0.01)
    (answer,) = answers(channel)
    return answer


async def test_with_synchronous_flush_answers_wait_for_the_disk(tmp_path: Path) -> None:
    broker = sync_broker(tmp_path)
    parts = broker.pop_parts
    stored_and_flushed(broker)
    channel = MemoryChannel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.progress.run)
        await trio.testing.wait_all_tasks_blocked()
        broker.send(RequestCode.POP_MESSAGE, broker.pop_header(), channel=channel)
        assert answers(channel) == []
        answer = await answered(channel)
        assert len(messages_of(answer)) == 1
        assert parts.log.flushed == parts.log.written
        nursery.cancel_scope.cancel()


async def test_the_first_pop_of_all_is_flushed_in_its_turn(tmp_path: Path) -> None:
    """The service that flushes has not begun then."""
    broker = sync_broker(tmp_path)
    stored_and_flushed(broker)
    broker.server.begin_turn()
    channel = MemoryChannel()
    broker.core.serving.frames.handle(channel, frames_of(broker))  # type: ignore[arg-type]
    broker.server.end_turn()
    (answer,) = answers(channel)
    assert len(messages_of(answer)) == 1


def frames_of(broker: PopBroker) -> list[Frame]:
    fields = header_fields(broker.pop_header())
    frame = encode_frame(SerializeType.JSON, RequestCode.POP_MESSAGE, 7, fields=fields)
    return FrameReader().feed(frame)


@pytest.mark.parametrize("is_ordered", [False, True])
async def test_a_flush_that_fails_is_answered_and_stops_writing(
    tmp_path: Path, is_ordered: bool
) -> None:
    broker = sync_broker(tmp_path)
    stored_and_flushed(broker)
    channel = MemoryChannel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broker.pop_parts.progress.run)
        await trio.testing.wait_all_tasks_blocked()
        broker.send(RequestCode.POP_MESSAGE, broker.pop_header(order=is_ordered), channel=channel)
        broker.disk.is_broken = True
        answer = await answered(channel)
        broker.disk.is_broken = False
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert not broker.store.commit_log.life.is_writable
        nursery.cancel_scope.cancel()
    # Nobody got the message, so it does not wait for the end of its time.
    broker.clock.ms += 20
    broker.pop_parts.progress.write_out()
    later = restarted(broker, tmp_path)
    await later.pop_parts.revive.revive_due()
    ((message, _),) = later.taken(order=is_ordered)
    assert message.reconsume_times == 0


async def test_after_a_failed_flush_nothing_is_taken_out(tmp_path: Path) -> None:
    """Answers could only be replaced, and their messages given back, without end."""
    broker = sync_broker(tmp_path)
    stored_and_flushed(broker)
    ((_, handle),) = broker.taken()
    broker.store_message("T", 0)
    broker.store.flusher.stop_writing("broken")
    events = broker.pop_parts.log.written
    for answer in (broker.pop(), broker.ack(handle)):
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert "see the log of this broker" in answer.remark
    assert (broker.pop_parts.log.written, broker.pop_parts.pops.out_count) == (events, 1)


class SlowFiles(FaultyFiles):
    """A disk that waits for ``may_sync``."""

    def __init__(self) -> None:
        super().__init__()
        self.may_sync = threading.Event()

    def fdatasync(self, descriptor: int) -> None:
        assert self.may_sync.wait(5)
        super().fdatasync(descriptor)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_flushes_do_not_overlap(tmp_path: Path, is_cancelled: bool) -> None:
    """A second one would count as on disk what the first has yet to bring there."""
    files = SlowFiles()
    files.may_sync.set()
    broker = sync_broker(tmp_path, files)
    progress, log = broker.pop_parts.progress, broker.pop_parts.log
    stored_and_flushed(broker)
    files.may_sync.clear()
    before = log.flushed
    channel = MemoryChannel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(progress.run)
        await trio.testing.wait_all_tasks_blocked()
        broker.send(RequestCode.POP_MESSAGE, broker.pop_header(), channel=channel)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(progress.bring_to_disk)
        await trio.testing.wait_all_tasks_blocked()
        if is_cancelled:
            nursery.cancel_scope.cancel()
        assert (answers(channel), log.flushed) == ([], before)
        files.may_sync.set()
        if not is_cancelled:
            assert len(messages_of(await answered(channel))) == 1
            nursery.cancel_scope.cancel()
    assert log.flushed == log.written


async def test_what_a_failed_flush_lost_never_counts_as_on_disk(tmp_path: Path) -> None:
    broker = sync_broker(tmp_path)
    stored_and_flushed(broker)
    parts = broker.pop_parts
    broker.disk.is_broken = True
    answer = broker.pop()
    broker.disk.is_broken = False
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert await parts.progress.bring_to_disk() is not None
    assert broker.pop().code == ResponseCode.SERVICE_NOT_AVAILABLE
    parts.finish()
    assert parts.log.flushed < parts.log.written


async def test_offsets_are_saved_behind_what_they_count(
    broker: PopBroker, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    for handle in popped(broker, 2):
        broker.ack(handle)
    steps = []
    flusher, log = broker.store.flusher, broker.pop_parts.log

    async def flush_log() -> None:
        steps.append("log")
        flusher.flush_log_now()

    def start_flush() -> Callable[[], None]:
        return lambda: steps.append("pops")

    monkeypatch.setattr(flusher, "flush_log", flush_log)
    monkeypatch.setattr(log, "start_flush", start_flush)
    monkeypatch.setattr(broker.offsets, "save_snapshot", lambda *_: steps.append("offsets"))
    with trio.move_on_after(1.5):
        await broker.offsets.run(lambda: 1)
    assert steps == ["log", "pops", "offsets"]


def test_a_stop_brings_everything_to_disk(tmp_path: Path, broker: PopBroker) -> None:
    popped(broker, 2)
    parts = broker.pop_parts
    parts.finish()
    assert parts.log.flushed == parts.log.written
    broker.close()
    again = PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    assert again.pop_parts.pops.out_count == 2
