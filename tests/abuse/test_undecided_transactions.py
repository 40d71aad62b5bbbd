"""Undecided transactions count for the hosts of their producers, which may leave only so many."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from headrace_broker.host_budget import Host, HostBudget
from headrace_broker.transaction.table import HALF_BYTES, HalfTable, OpenHalf
from headrace_protocol.codes import ResponseCode
from headrace_protocol.message import TRANSACTION_ROLLBACK
from tests.support.channel import MemoryChannel
from tests.support.ledger import Ledger, checks
from tests.support.memory import HOST, kept_bytes
from tests.support.stores import crash


@pytest.mark.parametrize(("copies", "ended"), [(0, 0), (0, 10), (15, 0), (15, 10)])
def test_a_host_is_charged_what_open_halves_take(copies: int, ended: int) -> None:
    budget, offsets = HostBudget(), count(1 << 33)
    table = HalfTable(budget, 1 << 33)

    def fill() -> None:
        for _ in range(400):
            first = next(offsets)
            texts = f"group{first}", f"topic{first}"
            half = OpenHalf(first, [first], first << 8, HOST, *texts, 0, first << 7, first << 6)
            table.add(half)
            for _ in range(copies):
                table.copied(half, next(offsets), first << 9)
            for _ in range(ended):
                table.ended([next(offsets)], None)
        table.superseded = []

    assert 0 < kept_bytes(fill) <= budget.kept_bytes(HOST) / 2


async def test_many_new_halves_count_at_once(tmp_path: Path, autojump_clock: object) -> None:
    ledger = Ledger(tmp_path)
    ledger.transactions.unseen_max = 20
    ledger.broker.create_topic("T")
    budget = ledger.broker.budget
    async with ledger.running():
        half = ledger.send(b"first")
        for _ in range(20):
            assert budget.kept_bytes(HOST) == 0
            ledger.send(b"x")
        await ledger.until(lambda: len(ledger.transactions.table.open) == 21)
        assert budget.kept_bytes(HOST) > 21 * HALF_BYTES
        before = budget.kept_bytes(HOST)
        ledger.end(half, TRANSACTION_ROLLBACK)
        assert budget.kept_bytes(HOST) < before


async def test_halves_that_a_host_leaves_undecided_are_bounded(
    tmp_path: Path, autojump_clock: object
) -> None:
    ledger = Ledger(tmp_path)
    broker = ledger.broker
    broker.create_topic("T")
    other = MemoryChannel()
    other.host_bytes = b"\x0a\0\0\1" + bytes(4)
    async with ledger.running():
        half = ledger.send(b"x")
        await ledger.check_later()
        kept = broker.budget.kept_bytes(HOST)
        assert kept > 0
        broker.budget.bytes_max = kept
        refused = ledger.answer(b"x")
        assert refused.code == ResponseCode.NO_PERMISSION
        assert "undecided transactions" in refused.remark
        assert ledger.answer(b"x", channel=other).code == ResponseCode.SUCCESS
        channel = ledger.join()
        await ledger.check_later()
        assert broker.budget.kept_bytes(HOST) > kept, "its copy is stored whatever the bound is"
        assert len(checks(channel)) == 2
    crash(broker.store)
    again = Ledger(tmp_path, ledger.clock.ms)
    async with again.running():
        assert again.broker.budget.kept_bytes(HOST) > kept, "a record names the host"
        again.end(half, TRANSACTION_ROLLBACK)
        assert again.broker.budget.kept_bytes(HOST) == 0
        assert again.broker.budget.kept_bytes(Host.of(other)) > 0
