"""Static topics whose messages have left the log of their broker for its tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headrace_broker.tiered.driver.interface import Failure, FailureKind
from headrace_broker.tiered.driver.posix import PosixDriver
from tests.broker.test_static_cleanup import chain, clean, expire
from tests.support.static_brokers import Brokers, item

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST, LEADER = item("a", 0, 0), item("b", 1, 4)
BODIES = [b"%d " % number + bytes(900) for number in range(8)]


def start(folder: Path) -> Brokers:
    return Brokers(
        folder,
        message_store_plug_in="tieredstore",
        tiered_backend_service_provider="posix",
        tiered_store_file_path=folder / "tier",
        delete_when="",
    )


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    """A queue with four messages at a, and after its move four at b."""
    brokers = start(tmp_path)
    for chain_now, bodies in (((FIRST,), BODIES[:4]), ((FIRST, LEADER), BODIES[4:])):
        brokers.map(chain_now, only="ab"[: len(chain_now)])
        for body in bodies:
            brokers.send("ab"[len(chain_now) - 1], body)
    yield brokers
    brokers.close()


async def leave_the_log(brokers: Brokers, name: str) -> None:
    """Have a broker's messages only in its tier."""
    store = brokers[name].store
    store.index_tick()
    store.flusher.flush_now()
    for following in store.followers.all:
        following.catch_up()
    await expire(brokers[name])


@pytest.mark.parametrize("names", ["a", "b", "ab"])
async def test_they_are_read_wherever_they_are(brokers: Brokers, names: str) -> None:
    for name in names:
        await leave_the_log(brokers, name)
    assert [body for _, body in brokers.read_all("b")] == BODIES


async def test_an_item_in_the_tier_is_kept(brokers: Brokers) -> None:
    for name in "ab":
        await leave_the_log(brokers, name)
    await clean(brokers, "ab")
    assert [chain(brokers, name) for name in "ab"] == [[0, 1], [0, 1]]


async def test_an_item_is_kept_while_the_tier_is_away(
    brokers: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave_the_log(brokers, "a")
    brokers.close()
    failed = Failure(FailureKind.UNREACHABLE, "tier", "it is away")
    again = start(tmp_path)
    for method in ("entries", "read", "size"):
        monkeypatch.setattr(PosixDriver, method, lambda *_, **__: failed)
    await clean(again, "ab")
    assert [chain(again, name) for name in "ab"] == [[0, 1], [0, 1]]
