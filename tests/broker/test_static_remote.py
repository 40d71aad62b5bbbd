"""Requests to other brokers: in order, over one connection each, within time and memory."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from headrace_broker.statictopic import remote
from headrace_broker.statictopic.remote import Answer, MalformedField, OtherBrokers
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.drivers.errors import ConnectFailed, HeadraceError, RequestTimeout
from headrace_protocol.headers import OffsetResponseHeader
from headrace_protocol.serving import Reply
from tests.support.scripted import Scripted, close, scripted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CODE = 30
TIMEOUT_MS = 3000


class Peer:
    """Another broker, and what is asked of it."""

    def __init__(self, network: MemoryNetwork, server: Scripted) -> None:
        self.network = network
        self.server = server
        self.lookups: list[str] = []
        self.outcomes: list[tuple[str, Answer | HeadraceError]] = []
        self.brokers = OtherBrokers(network, self.find, lambda: TIMEOUT_MS)

    async def find(self, name: str) -> str:
        self.lookups.append(name)
        if name != "b":
            raise ConnectFailed(name, "no nameserver knows it")
        return self.server.address

    def ask(self, mark: str, name: str = "b", **more: Any) -> None:
        self.brokers.ask(
            name, CODE, {"n": mark}, lambda outcome: self.outcomes.append((mark, outcome)), **more
        )

    async def until(self, count: int) -> None:
        with trio.fail_after(60):
            while len(self.outcomes) < count:  # noqa: ASYNC110 - the mock clock jumps
                await trio.sleep(0.01)


@asynccontextmanager
async def asking() -> AsyncIterator[Peer]:
    network = MemoryNetwork()
    async with scripted(network) as (server,), trio.open_nursery() as nursery:
        peer = Peer(network, server)
        nursery.start_soon(peer.brokers.run)
        yield peer
        nursery.cancel_scope.cancel()


async def test_answers_come_in_order_over_one_connection(autojump_clock: object) -> None:
    async with asking() as peer:
        peer.server.answer(CODE, Reply(OffsetResponseHeader(offset=7), (b"body",)))
        for mark in "abc":
            peer.ask(mark)
        await peer.until(3)
        peer.ask("d")
        await peer.until(4)
        assert [mark for mark, _ in peer.outcomes] == list("abcd")
        assert [asked.ext["n"] for asked in peer.server.asked] == list("abcd")
        assert len({asked.channel for asked in peer.server.asked}) == 1
        assert peer.lookups == ["b"]
        answer = peer.outcomes[0][1]
        assert isinstance(answer, Answer)
        assert (answer.number("offset"), b"".join(answer.body)) == (7, b"body")
        assert peer.brokers.answered_bytes == 16


async def test_a_broker_that_does_not_answer_costs_its_time_only(autojump_clock: object) -> None:
    async with asking() as peer:
        peer.server.answer(CODE, None)
        began = trio.current_time()
        peer.ask("slow")
        await peer.until(1)
        assert TIMEOUT_MS / 1000 <= trio.current_time() - began < TIMEOUT_MS / 1000 + 0.1
        assert isinstance(peer.outcomes[0][1], RequestTimeout)
        peer.server.answer(CODE, Reply())
        peer.ask("next")
        await peer.until(2)
        assert isinstance(peer.outcomes[1][1], Answer)


async def test_a_broker_that_nobody_knows(autojump_clock: object) -> None:
    async with asking() as peer:
        peer.ask("x", "nobody")
        peer.ask("y")
        await peer.until(2)
        outcomes = dict(peer.outcomes)
        assert isinstance(outcomes["x"], ConnectFailed)
        assert isinstance(outcomes["y"], Answer)


async def test_a_broker_that_comes_back_is_connected_again(autojump_clock: object) -> None:
    async with asking() as peer:
        peer.ask("a")
        await peer.until(1)
        peer.server.answer(CODE, close)
        peer.ask("lost")
        await peer.until(2)
        assert isinstance(peer.outcomes[1][1], HeadraceError)
        peer.server.answer(CODE, Reply())
        peer.ask("b")
        await peer.until(3)
        assert isinstance(peer.outcomes[2][1], Answer)
        assert peer.lookups == ["b", "b"]


async def test_answers_have_room_or_wait(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RELAYED_BYTES_MAX", 100)
    async with asking() as peer:
        peer.server.answer(CODE, None)
        peer.ask("fills", answer_bytes=80)
        peer.ask("waits", answer_bytes=80)
        await trio.sleep(1)
        assert [asked.ext["n"] for asked in peer.server.asked] == ["fills"]
        peer.ask("too late", answer_bytes=1)
        await peer.until(2)
        assert [mark for mark, _ in peer.outcomes] == ["fills", "waits"]
        peer.server.answer(CODE, Reply())
        await peer.until(3)
        peer.ask("larger than all", answer_bytes=1000)
        await peer.until(4)
        assert isinstance(peer.outcomes[3][1], Answer)


async def test_others_know_while_an_answer_is_awaited(autojump_clock: object) -> None:
    async with asking() as peer:
        waits: list[bool] = []
        peer.brokers.on_waiting = waits.append
        for mark in "ab":
            peer.ask(mark)
        assert waits == [True]
        await peer.until(2)
        assert waits == [True, False]


def test_a_field_that_is_not_a_number() -> None:
    assert Answer(0, fields={"offset": 5}).number("offset") == 5
    for fields in ({}, {"offset": "x"}, {"offset": None}):
        with pytest.raises(MalformedField, match="offset="):
            Answer(0, fields=fields).number("offset")
