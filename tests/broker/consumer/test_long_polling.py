"""Held pulls: answered once, in slices when they are many, and paid for by their client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from headrace_broker.consumer.long_polling import NEXT_STATE, Event, HeldRequest, LongPolling, State
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.store_queue import StoreQueue
from headrace_protocol.command import Command
from headrace_protocol.serving import Request
from tests.support.channel import MemoryChannel
from tests.support.running import in_background
from tests.support.stores import SetClock, open_store

HELD_BYTES = 3000


class Held:
    """Pulls that were held, and what they were told."""

    def __init__(self) -> None:
        self.polling = LongPolling()
        self.told: list[tuple[int, bool]] = []
        self.has_found = True

    def hold(self, queue: StoreQueue, number: int, channel: MemoryChannel, s: float = 15) -> None:
        self.polling.hold(Numbered(self, number, channel), (queue,), s)


class Numbered(HeldRequest):
    """A request that tells of each look."""

    def __init__(self, held: Held, number: int, channel: MemoryChannel) -> None:
        super().__init__(Request(channel, 0, Command(code=11), b"", 0), 0, HELD_BYTES)
        self.held = held
        self.number = number

    def try_answer(self, *, may_wait: bool) -> bool:
        self.held.told.append((self.number, may_wait))
        return self.held.has_found or not may_wait


@pytest.fixture
def store(tmp_path: Path) -> MessageStore:
    return open_store(tmp_path, SetClock())


@pytest.fixture
def queue(store: MessageStore) -> StoreQueue:
    return store.queue("t", 0)


async def test_an_arrival_answers_all_that_wait_in_their_order(queue: StoreQueue) -> None:
    held, channel = Held(), MemoryChannel()
    for number in range(5):
        held.hold(queue, number, channel)
    assert channel.charged_bytes == 5 * HELD_BYTES
    held.polling.arrived([queue])
    assert held.told == [(number, True) for number in range(5)]
    assert held.polling.held_count == channel.charged_bytes == 0
    held.polling.arrived([queue])
    assert len(held.told) == 5


async def test_who_finds_nothing_waits_on(queue: StoreQueue) -> None:
    held, channel = Held(), MemoryChannel()
    held.has_found = False
    held.hold(queue, 1, channel)
    held.polling.arrived([queue])
    held.polling.arrived([queue])
    assert held.told == [(1, True), (1, True)]
    assert held.polling.held_count == 1


async def test_thousands_at_one_queue_are_answered_in_slices(queue: StoreQueue) -> None:
    held, channel = Held(), MemoryChannel()
    works: list[Iterator[None]] = []
    held.polling.run_long = works.append
    for number in range(5000):
        held.hold(queue, number, channel)
    held.polling.arrived([queue])
    assert held.told == []
    (work,) = works
    for _ in range(100):
        next(work)
    assert len(held.told) == 100
    # One that comes meanwhile waits for the next message.
    held.hold(queue, 5000, channel)
    assert sum(1 for _ in work) == 4900
    assert held.polling.held_count == 1
    assert channel.charged_bytes == HELD_BYTES


async def test_a_deadline_ends_the_wait_even_amid_slices(
    queue: StoreQueue, autojump_clock: object
) -> None:
    held, channel = Held(), MemoryChannel()
    works: list[Iterator[None]] = []
    held.polling.run_long = works.append
    async with in_background(held.polling.run):
        await trio.testing.wait_all_tasks_blocked()
        for number in range(100):
            held.hold(queue, number, channel, 2)
        held.polling.arrived([queue])
        arrival = works.pop()
        next(arrival)
        await trio.sleep(3)
        (deadline,) = works
        assert sum(1 for _ in deadline) == 99
        assert sum(1 for _ in arrival) == 99
    assert held.told == [(0, True), *((number, False) for number in range(1, 100))]
    assert held.polling.held_count == channel.charged_bytes == 0
    assert not queue.waiting


async def test_a_client_that_is_gone_holds_nothing(queue: StoreQueue) -> None:
    held, gone, there = Held(), MemoryChannel(), MemoryChannel()
    for number in range(10):
        held.hold(queue, number, gone if number % 2 else there)
    held.polling.channel_closed(gone)
    assert held.polling.held_count == 5
    assert gone.charged_bytes == 0
    held.polling.arrived([queue])
    assert [number for number, _ in held.told] == [0, 2, 4, 6, 8]


async def test_nobody_waits_for_a_deleted_queue_or_a_broker_that_stops(
    store: MessageStore, queue: StoreQueue
) -> None:
    held, channel = Held(), MemoryChannel()
    held.hold(queue, 1, channel)
    held.hold(store.queue("t", 1), 2, channel)
    list(held.polling.queue_gone(queue))
    assert held.told == [(1, False)]
    held.polling.answer_all()
    assert held.told == [(1, False), (2, False)]
    assert held.polling.held_count == 0


# -- several queues --------------------------------------------------------------------------------


@pytest.fixture
def queues(store: MessageStore) -> tuple[StoreQueue, ...]:
    return tuple(store.queue("t", number) for number in range(3))


async def test_who_waits_at_several_queues_is_answered_once(
    queues: tuple[StoreQueue, ...],
) -> None:
    held, channel = Held(), MemoryChannel()
    held.polling.hold(Numbered(held, 1, channel), queues, 15)
    assert (held.polling.held_count, channel.charged_bytes) == (1, HELD_BYTES)
    held.polling.arrived(queues)
    assert held.told == [(1, True)]
    assert held.polling.held_count == channel.charged_bytes == 0
    assert not any(queue.waiting for queue in queues)


async def test_who_finds_nothing_in_one_queue_waits_on_at_all(
    queues: tuple[StoreQueue, ...],
) -> None:
    held, channel = Held(), MemoryChannel()
    held.has_found = False
    held.polling.hold(Numbered(held, 1, channel), queues, 15)
    for queue in queues:
        held.polling.arrived([queue])
    held.polling.arrived(queues)
    assert held.told == [(1, True)] * 6
    held.has_found = True
    held.polling.arrived(queues[2:])
    held.polling.arrived(queues)
    assert len(held.told) == 7
    assert held.polling.held_count == channel.charged_bytes == 0


@pytest.mark.parametrize("end", ["deadline", "deleted queue", "client gone", "stop"])
async def test_who_waits_at_several_queues_leaves_all(
    queues: tuple[StoreQueue, ...], end: str, autojump_clock: object
) -> None:
    held, channel = Held(), MemoryChannel()
    held.polling.hold(Numbered(held, 1, channel), queues, 2)
    async with in_background(held.polling.run):
        if end == "deadline":
            await trio.sleep(3)
        elif end == "deleted queue":
            list(held.polling.queue_gone(queues[1]))
        elif end == "client gone":
            held.polling.channel_closed(channel)
        else:
            held.polling.answer_all()
        await trio.sleep(10)
    assert held.told == ([] if end == "client gone" else [(1, False)])
    assert not any(queue.waiting for queue in queues)
    assert held.polling.held_count == channel.charged_bytes == 0


# -- states ----------------------------------------------------------------------------------------

# The shortest way to each state.
WAYS = {
    State.WAITING: (),
    State.ANSWERED: (Event.ANSWER,),
    State.ABANDONED: (Event.CLIENT_GONE,),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_leads_on_or_is_a_fault(state: State, event: Event) -> None:
    request = Numbered(Held(), 1, MemoryChannel())
    for step in WAYS[state]:
        request.apply(step)
    assert request.state is state
    if (state, event) in NEXT_STATE:
        request.apply(event)
        assert request.state is NEXT_STATE[state, event]
    else:
        with pytest.raises(KeyError):
            request.apply(event)
        assert request.state is state


class Closing(Numbered):
    """A pull whose client closes when something is written to it."""

    def try_answer(self, *, may_wait: bool) -> bool:
        super().try_answer(may_wait=may_wait)
        channel = self.request.channel
        assert isinstance(channel, MemoryChannel)
        channel.is_open = False
        self.held.polling.channel_closed(channel)
        return self.held.has_found


@pytest.mark.parametrize("has_found", [True, False])
async def test_a_client_that_its_answer_closes_is_let_go_once(
    queue: StoreQueue, has_found: bool
) -> None:
    held, channel = Held(), MemoryChannel()
    held.has_found = has_found
    request = Closing(held, 1, channel)
    held.polling.hold(request, (queue,), 15)
    held.polling.arrived([queue])
    assert request.state is State.ABANDONED
    assert held.polling.held_count == channel.charged_bytes == 0
    assert not queue.waiting
