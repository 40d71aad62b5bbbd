"""Transactions without a decision are listed."""

from __future__ import annotations

from headrace_protocol.bodies import WaitingList
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import ListTransactionsHeader
from headrace_protocol.message import TRANSACTION_COMMIT
from tests.support.ledger import GROUP, Ledger


async def test_open_transactions_are_listed(ledger: Ledger, autojump_clock: object) -> None:
    def listed(group: str | None = None, count: int = 10) -> tuple[list[int], int]:
        header = ListTransactionsHeader(producer_group=group, max_num=count)
        answer = ledger.broker.ask(RequestCode.LIST_TRANSACTIONS, header)
        found = WaitingList.decode(answer.body)
        return [each.physical_offset for each in found.messages], found.count

    async with ledger.running():
        first, second = ledger.send(b"first"), ledger.send(b"second")
        assert listed() == ([], 0), "nobody has looked"
        ledger.join()
        await ledger.check_later(1)
        assert listed() == ([first.physical_offset, second.physical_offset], 2)
        assert listed(GROUP, 1) == ([first.physical_offset], 2)
        assert listed("other") == ([], 0)
        ledger.end(first, TRANSACTION_COMMIT)
        await ledger.check_later(10)
        (copy,), count = listed()
        assert count == 1
        assert copy > second.physical_offset, "it was stored again for its check"
