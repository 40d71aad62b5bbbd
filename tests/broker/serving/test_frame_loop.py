"""The frame loop: clients that disconnect, and those that send faster than queues follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from headrace_broker.serving.frame_loop import FrameLoop
from headrace_broker.store.message_store import MessageStore
from tests.support.channel import MemoryChannel
from tests.support.stores import open_store, put


class Client(MemoryChannel):
    """A client with functions to call for what it was not sent."""

    def __init__(self, notices: Iterable[Callable[[], None]] = ()) -> None:
        super().__init__()
        self.notices = notices

    def take_notices(self) -> Iterable[Callable[[], None]]:
        return self.notices


class Served:
    """A frame loop whose requests store a message each. works: long work that was begun."""

    def __init__(self, store: MessageStore, closed: list[Any] | None = None) -> None:
        self.store = store
        self.works: list[Iterator[None]] = []
        self.held_back: list[tuple[Any, bool]] = []
        self.loop = FrameLoop(store, [closed.append] if closed is not None else [])
        registry: Any = self
        self.loop.connect(registry, self.hold_back, lambda: False)

    def run_long(self, work: Iterator[None]) -> None:
        self.works.append(work)

    def handle(self, _channel: Any, _frames: list[Any]) -> list[Any]:
        put(self.store, self.store.queue("T", 0), dispatch=False)
        return []

    def hold_back(self, channel: Any, *, is_held_back: bool) -> None:
        self.held_back.append((channel, is_held_back))

    def send(self, client: Any) -> None:
        """A turn with a request of a client."""
        self.loop.handle(client, [])
        self.loop.finish_turn()
        self.loop.replied()


def test_a_client_that_disconnects_gives_back_what_it_was_not_sent(tmp_path: Path) -> None:
    closed: list[Any] = []
    served = Served(open_store(tmp_path), closed)
    lost: list[int] = []
    client: Any = Client([lambda: lost.append(1), lambda: lost.append(2)])
    served.loop.closed(client)
    assert closed == [client]
    (work,) = served.works
    # Others have their turns in between.
    assert [[*lost] for _ in work] == [[1], [1, 2]]
    served.loop.closed(Client())  # type: ignore[arg-type]
    assert len(served.works) == 1


@pytest.mark.parametrize("behind_s", [0.5, 60])
async def test_producers_are_read_again_once_the_queues_have_followed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: object,
    behind_s: float,
) -> None:
    """Or after a while, for the queues may never follow."""
    served, client = Served(open_store(tmp_path)), Client()
    served.send(client)
    assert served.held_back == []
    ends = trio.current_time() + behind_s
    monkeypatch.setattr(
        served.store.write_path,
        "pressure",
        lambda: "a taker" if trio.current_time() < ends else None,
    )
    served.send(client)
    assert served.held_back == [(client, True)]
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as tasks:
            tasks.start_soon(served.loop.relieve_pressure)
            await trio.sleep(behind_s - 0.1 if behind_s < 1 else 1.9)
            assert served.held_back == [(client, True)]
            await trio.sleep(0.2)
            assert served.held_back == [(client, True), (client, False)]
            tasks.cancel_scope.cancel()
    expected = [] if behind_s < 1 else ["dispatch is behind, sends will be rejected"]
    assert [each["event"] for each in logs] == expected
