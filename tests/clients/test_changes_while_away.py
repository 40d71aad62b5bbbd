"""Changes of topics and groups that brokers which left have a part of."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace import Admin
from headrace.errors import NotEverywhere, PartialAnswer, RouteNotFound
from headrace_protocol.bodies import SubscriptionGroupConfig
from tests.support.cli import fail, succeed
from tests.support.fixtures import brokers_named
from tests.support.running_brokers import Brokers, running_in_thread

LEFT = r"broker b \(queues 0 to 1\) was shut down .* ago"
FORGET = "or run `headrace broker forget b` if it won't come back"


mq = pytest.fixture(brokers_named(["a", "b"]))


@pytest.fixture
async def admin(mq: Brokers) -> AsyncIterator[Admin]:
    """Brokers a and b, of which b has stopped, with a plain and a static topic on both."""
    async with Admin(**mq.at) as admin:
        await admin.create_topic("T", queues=2)
        await admin.create_static_topic("S", 4)
        await mq.stop("b")
        yield admin


def changes() -> dict[str, Callable[[Admin], Awaitable[Any]]]:
    return {
        "altered": lambda admin: admin.alter_topic("T", queues=3),
        "purged": lambda admin: admin.purge_topic("T"),
    }


@pytest.mark.parametrize("change", changes())
async def test_a_change_that_does_not_reach_all_is_not_begun(admin: Admin, change: str) -> None:
    before = await admin.topic("T", problems=[])
    told = f"topic T is not {change}, since brokers left with a part of it: {LEFT}.*{FORGET}"
    with pytest.raises(NotEverywhere, match=told) as error:
        await changes()[change](admin)
    assert [part.broker for part in error.value.parts] == ["b"]
    assert await admin.topic("T", problems=[]) == before
    await admin.forget_broker("b")
    await changes()[change](admin)


async def test_a_static_topic_is_not_purged_in_part(admin: Admin) -> None:
    with pytest.raises(NotEverywhere, match=r"topic S is not purged, .* broker b \(queues 1, 3\)"):
        await admin.purge_topic("S")
    assert await admin.is_static("S")


async def test_one_broker_is_altered_by_its_name(admin: Admin) -> None:
    await admin.alter_topic("T", queues=3, broker="a")
    assert (await admin.topic("T", problems=[]))["a"].read_queue_nums == 3


@pytest.mark.parametrize("topic", ["T", "S"])
async def test_a_topic_that_comes_back_is_announced(mq: Brokers, admin: Admin, topic: str) -> None:
    told = f"topic {topic} is deleted on the brokers that are there, not on those that left: .*"
    with pytest.raises(NotEverywhere, match=f"{told} b .*delete it again then, {FORGET}"):
        await admin.delete_topic(topic)
    # Broker a may not have registered without it yet.
    with pytest.raises((RouteNotFound, PartialAnswer), match=r"broker b .* was shut down"):
        await admin.topic(topic)
    await mq.start("b")
    await admin.delete_topic(topic)
    with trio.fail_after(5):
        while topic in await admin.topics():  # noqa: ASYNC110 - no event crosses the wire
            await trio.sleep(0.01)


async def test_a_group_that_comes_back_is_announced(mq: Brokers, admin: Admin) -> None:
    await mq.start("b")
    await admin.create_group(SubscriptionGroupConfig(group_name="g"))
    await admin.create_topic("%RETRY%g", queues=1)
    await mq.stop("b")
    with pytest.raises(NotEverywhere, match="group g is deleted on the brokers that are there"):
        await admin.delete_group("g")
    assert "g" not in {each.group_name for each in await admin.groups()}
    await mq.start("b")
    await admin.delete_group("g")


def test_commands_name_the_broker_and_fail(tmp_path: Path) -> None:
    with running_in_thread(tmp_path, ["a", "b"]) as running:
        where = ("--nameserver", running.nameserver)
        succeed("topic", "create", "T", "--queues", "2", *where)
        assert "topic none does not exist" in fail(3, "topic", "delete", "none", "--yes", *where)
        succeed("topic", "create", "only", "--broker", "b", *where)
        running.stop("b")
        altered = ("topic", "alter", "T", "--queues", "3", *where)
        assert "topic T is not altered" in fail(3, *altered)
        rows = succeed(*altered, "--broker", "a", "--json").json()
        assert [(row["broker"], row["read_queues"]) for row in rows] == [("a", 3)]
        told = fail(3, "topic", "delete", "only", "--yes", *where)
        assert re.search(r"topic only \(.*broker b .* was shut down", told)
        told = fail(3, "topic", "delete", "T", "--yes", *where)
        assert "not on those that left: broker b (queues 0 to 1) was shut down" in told
