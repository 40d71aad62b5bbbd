"""Transactions after a start: what was decided before it, and what Apache's broker has left."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace_protocol import fastjson
from headrace_protocol.codes import ResponseCode
from headrace_protocol.message import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK
from headrace_protocol.system_topics import (
    CHECK_MAX_TIME_TOPIC,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    TRANSACTION_GROUP,
)
from tests.support.channel import MemoryChannel
from tests.support.golden import CONFIG, copy_golden_store
from tests.support.ledger import Half, Ledger, checks
from tests.support.seeds import seeds
from tests.support.stores import crash

COMMIT, ROLLBACK = TRANSACTION_COMMIT, TRANSACTION_ROLLBACK
DISCARDED = -1
_GOLDEN_SIZES = {
    "commit_log_file_bytes": 262_144,
    "consume_queue_file_bytes": 2000,
    "index_slot_count": 100,
    "index_entry_count": 300,
    "ring_rows": 1024,
}


async def test_both_offsets_are_saved_together(
    ledger: Ledger, tmp_path: Path, autojump_clock: object
) -> None:
    def saved() -> tuple[int | None, int | None]:
        offsets = ledger.broker.offsets
        topics = (HALF_TOPIC, OP_HALF_TOPIC)
        half, op = (offsets.query(TRANSACTION_GROUP, topic, 0) for topic in topics)
        return half, op

    async with ledger.running():
        ledger.end(ledger.send(b"a"), COMMIT)
        half = ledger.send(b"b")
        ledger.end(ledger.send(b"c"), ROLLBACK)
        await ledger.transactions.save()
        assert saved() == (1, 1)
        ledger.end(half, COMMIT)
        await ledger.transactions.save()
        assert saved() == (3, 3)
        store = ledger.broker.store
        assert store.commit_log.flushed_offset == store.commit_log.max_offset
    path = ledger.broker.config.store_path_root_dir / "config" / "transactionMetrics"
    assert fastjson.loads(path.read_bytes())["transactionCount"]["T"]["count"] == 0
    ledger.broker.topics.delete("T")
    ledger.transactions.finish()
    assert fastjson.loads(path.read_bytes())["transactionCount"] == {}


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_start_knows_what_was_decided(
    ledger: Ledger, tmp_path: Path, autojump_clock: object, is_killed: bool
) -> None:
    async with ledger.running():
        committed, dropped = ledger.send(b"a"), ledger.send(b"b")
        half = ledger.send(b"c")
        channel = ledger.join()
        await ledger.check_later()
        halves = {check.message.body: check.half for check in checks(channel)}
        ledger.end(halves[b"a"], COMMIT)
        ledger.end(halves[b"b"], ROLLBACK)
    if is_killed:
        crash(ledger.broker.store)
    else:
        ledger.transactions.finish()
        ledger.broker.offsets.persist()
        ledger.broker.close()
    again = Ledger(tmp_path, ledger.clock.ms)
    async with again.running():
        for late in (committed, halves[b"a"], dropped, halves[b"b"]):
            for decision in (COMMIT, ROLLBACK):
                assert again.end(late, decision).code == ResponseCode.ILLEGAL_OPERATION
        channel = again.join()
        await again.check_later()
        (check,) = checks(channel)
        assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "2"
        assert again.end(half, COMMIT).code == ResponseCode.SUCCESS
    assert again.bodies() == [b"a", b"c"]


async def test_a_commit_without_its_op_record_gets_it_at_the_start(
    ledger: Ledger, tmp_path: Path, autojump_clock: object
) -> None:
    async with ledger.running():
        half = ledger.send(b"paid")
        ledger.transactions.is_naming = True
        ledger.end(half, COMMIT)
        assert ledger.named() == []
    crash(ledger.broker.store)
    again = Ledger(tmp_path, ledger.clock.ms)
    async with again.running():
        channel = again.join()
        await again.check_later()
        assert checks(channel) == []
        assert again.end(half, COMMIT).code == ResponseCode.SUCCESS
        assert again.named() == [0]
    assert again.bodies() == [b"paid"]


@pytest.mark.parametrize("seed", seeds(12))
async def test_once_across_kills(tmp_path: Path, autojump_clock: object, seed: int) -> None:
    print(f"seed {seed}")  # noqa: T201
    chance = random.Random(seed)
    ms, sent = 1_700_000_000_000, 0
    decided: dict[bytes, int] = {}
    known: dict[bytes, list[Half]] = {}
    for life in range(5):
        ledger = Ledger(tmp_path, ms)
        ledger.sent = sent
        ledger.broker.config.transaction_check_max = chance.choice([3, 1000])
        if not life:
            ledger.broker.create_topic("T")
        async with ledger.running():
            channel = ledger.join()
            for _ in range(chance.randrange(40)):
                _act(chance, ledger, decided, known)
                if chance.random() < 0.15:
                    await ledger.check_later(chance.choice([1, 10, 30]))
                    _note_checks(ledger, channel, decided, known)
                if chance.random() < 0.1:
                    await ledger.transactions.save()
                if chance.random() < 0.2:
                    ledger.broker.offsets.persist()
        ms, sent = ledger.clock.ms, ledger.sent
        if chance.random() < 0.7:
            crash(ledger.broker.store)
        else:
            ledger.transactions.finish()
            ledger.broker.offsets.persist()
            ledger.broker.close()
    ledger = Ledger(tmp_path, ms)
    ledger.broker.config.transaction_check_max = 1000
    async with ledger.running():
        channel = ledger.join()
        await ledger.check_later()
        _note_checks(ledger, channel, decided, known)
        discarded = ledger.bodies(CHECK_MAX_TIME_TOPIC, 0)
        refused = {body for body, decision in decided.items() if decision == DISCARDED}
        assert refused <= set(discarded)
        assert not set(discarded) & (decided.keys() - refused)
        decided |= dict.fromkeys(discarded, DISCARDED)
        for body in known.keys() - decided.keys():
            assert ledger.end(known[body][-1], COMMIT).code == ResponseCode.SUCCESS
            decided[body] = COMMIT
        await ledger.check_later()
        assert checks(channel) == []
    committed = [body for body, decision in decided.items() if decision == COMMIT]
    assert sorted(ledger.bodies(), key=int) == sorted(committed, key=int)
    assert ledger.transactions.table.is_settled
    assert ledger.transactions.next_offset(0) == len(ledger.stored(HALF_TOPIC, 0))


def _act(
    chance: random.Random, ledger: Ledger, decided: dict[bytes, int], known: dict[bytes, list[Half]]
) -> None:
    ledger.clock.ms += chance.randrange(3000)
    if not known or chance.random() < 0.5:
        body = b"%d" % ledger.sent
        known[body] = [ledger.send(body)]
        return
    body = chance.choice(list(known))
    decision = chance.choice([COMMIT, ROLLBACK])
    answer = ledger.end(chance.choice(known[body]), decision)
    assert answer.code in {ResponseCode.SUCCESS, ResponseCode.ILLEGAL_OPERATION}, answer.remark
    if body not in decided:
        decided[body] = DISCARDED if answer.code else decision
    elif not answer.code:
        assert decided[body] == decision


def _note_checks(
    ledger: Ledger,
    channel: MemoryChannel,
    decided: dict[bytes, int],
    known: dict[bytes, list[Half]],
) -> None:
    for check in checks(channel):
        assert check.message.body not in decided
        known[check.message.body].append(check.half)


# --- stores of Apache RocketMQ ---------------------------------------------------------------


def _golden(folder: Path, name: str, half: int, op: int) -> Ledger:
    """Apache's store with progress as it was earlier, since only the end was kept."""
    root = copy_golden_store(name, folder / "store")
    path = root / "config" / "consumerOffset.json"
    table = fastjson.loads(path.read_bytes())
    table["offsetTable"][f"{HALF_TOPIC}@{TRANSACTION_GROUP}"] = {0: half}
    table["offsetTable"][f"{OP_HALF_TOPIC}@{TRANSACTION_GROUP}"] = {0: op}
    path.write_bytes(fastjson.dumps(table))
    path.with_suffix(".json.bak").unlink(missing_ok=True)
    return Ledger(folder, 1_795_236_000_000, CONFIG, **_GOLDEN_SIZES)


@pytest.mark.parametrize("name", ["clean", "kill9"])
async def test_apaches_halves_are_taken_up(
    tmp_path: Path, autojump_clock: object, name: str
) -> None:
    ledger = _golden(tmp_path, name, 0, 0)
    async with ledger.running():
        (left,) = ledger.transactions.table.open.values()
        assert (left.first, left.newest, left.times) == (6, 22, 15)
        assert ledger.transactions.next_offset(0) in {5, 22}
        channel = ledger.join()
        ledger.broker.config.transaction_check_max = 16
        await ledger.check_later()
        (check,) = checks(channel)
        assert check.message.body == b"never decided"
        assert ledger.end(check.half, ROLLBACK).code == ResponseCode.SUCCESS
        assert 5 in ledger.named()  # of which Apache had stored a copy
        stored = ledger.stored(HALF_TOPIC, 0)
        for half in (stored[0], stored[5], stored[7]):
            place = Half(half.queue_offset, half.physical_offset, "")
            answer = ledger.end(place, COMMIT)
            assert answer.code == ResponseCode.ILLEGAL_OPERATION


async def test_commits_whose_op_records_apache_lost_are_found(
    tmp_path: Path, autojump_clock: object
) -> None:
    ledger = _golden(tmp_path, "kill9", 0, 2)  # as if the op records did not count
    async with ledger.running():
        open_bodies = set()
        channel = ledger.join()
        ledger.broker.config.transaction_check_max = 16
        await ledger.check_later()
        open_bodies = {check.message.body for check in checks(channel)}
    # What was rolled back left no other trace.
    assert open_bodies == {b"rolled back 0", b"rolled back 1", b"never decided"}
