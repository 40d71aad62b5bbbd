"""``headrace bench`` against a real broker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Self

import pytest
import trio

import headrace as library
from headrace.admin.workloads import WORKLOADS, Setup
from headrace.embedded import Embedded
from headrace.errors import ConnectFailed
from headrace.messages import Message
from tests.support.cli import Outcome, headrace


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    with library.embedded() as mq:
        yield mq


@pytest.fixture(autouse=True)
def environment(mq: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)


def bench(*arguments: str) -> Outcome:
    return headrace("bench", "--seconds", "0.03", "--rate", "200", *arguments)


def topics() -> list[str]:
    return [row[0] for row in headrace("topic", "list").rows()]


def test_each_work_has_a_row_and_the_topic_is_gone() -> None:
    outcome = bench("--size", "100", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    rows = {row["work"]: row for row in outcome.json()}
    assert list(rows) == ["send", "pipeline", "send-many", "receive", "latency"]
    for row in rows.values():
        assert row["per_second"] > 0
        assert row["errors"] == 0
        assert row["client_cpu_us"] > 0
        assert row["mb_per_second"] == pytest.approx(row["per_second"] / 1e4, abs=0.01)
    for name in ("send", "pipeline", "send-many", "latency"):
        assert 0 < rows[name]["p50_ms"] <= rows[name]["p99_ms"] <= rows[name]["p999_ms"]
    assert rows["receive"]["p50_ms"] is None
    assert topics() == []


def test_receive_alone_has_something_to_receive() -> None:
    (row,) = bench("--work", "receive", "--json").json()
    assert row["per_second"] > 1000
    assert topics() == []


def test_works_are_done_in_their_order() -> None:
    rows = bench("--work", "receive", "--work", "send", "--json").json()
    assert [row["work"] for row in rows] == ["send", "receive"]


def test_a_topic_that_is_named_stays() -> None:
    bench("--work", "send", "--topic", "mine", "--queues", "2")
    assert topics() == ["mine"]
    assert len(headrace("topic", "describe", "mine", "--json").json()["queues"]) == 2
    headrace("topic", "delete", "mine", "--yes")


def test_messages_of_others_do_not_count_as_late_ones() -> None:
    headrace("topic", "create", "shared", "--queues", "1")
    for _ in range(2):
        (row,) = bench("--work", "latency", "--topic", "shared", "--size", "16", "--json").json()
        assert row["errors"] == 0
    headrace("topic", "delete", "shared", "--yes")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("--size", "1GiB"), 2, "--size 1GiB: must be 16B to 4MiB"),
        (("--size", "5MiB"), 2, "--size 5MiB: must be 16B to 4MiB"),
        (("--size", "big"), 2, "--size big: must be 16B to 4MiB"),
        (("--work", "sleep"), 2, "'sleep' is not one of 'send', 'pipeline'"),
        (("-n", "127.0.0.1:1"), 3, "cannot connect to 127.0.0.1:1"),
        (("--topic", "a b"), 2, "'a b' is not a valid topic name"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(
    arguments: tuple[str, ...], exit_code: int, words: str
) -> None:
    outcome = bench(*arguments)
    assert outcome.exit_code == exit_code, outcome
    assert words in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_a_topic_that_cannot_be_written_is_named() -> None:
    headrace("topic", "create", "closed", "--perm", "r")
    outcome = bench("--topic", "closed")
    assert outcome.exit_code == 1
    assert "topic closed has no queue to write" in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert topics() == ["closed"]
    headrace("topic", "delete", "closed", "--yes")


def test_nothing_to_receive_is_said() -> None:
    headrace("topic", "create", "empty")
    outcome = bench("--work", "receive", "--topic", "empty")
    assert outcome.exit_code == 1
    assert "topic empty has no messages" in outcome.stderr
    headrace("topic", "delete", "empty", "--yes")


def test_only_a_broker_that_makes_no_topics_is_helped_by_one_that_is_there() -> None:
    outcome = bench("--queues", "100000")
    assert outcome.exit_code == 1
    assert "readQueueNums 100000" in outcome.stderr
    assert "--topic" not in outcome.stderr


def test_what_was_measured_before_a_failure_is_printed() -> None:
    headrace("topic", "create", "writeonly", "--perm", "w")
    outcome = bench("--work", "send", "--work", "receive", "--topic", "writeonly", "--json")
    assert outcome.exit_code == 1
    assert [row["work"] for row in outcome.json()] == ["send"]
    assert "topic writeonly has no queue to read" in outcome.stderr
    headrace("topic", "delete", "writeonly", "--yes")


class Flaky:
    """A pipeline, and its producer, whose second send fails."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self._sent = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def pipeline(self, **options: Any) -> Flaky:
        return Flaky(self._wrapped.pipeline(**options))

    async def send(self, message: Message) -> None:
        if next(self._sent) == 1:
            raise ConnectFailed("10.0.0.1:1", "Connection refused")
        await self._wrapped.send(message)

    async def __aenter__(self) -> Self:
        await self._wrapped.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._wrapped.__aexit__(*error)


class FlakySetup(Setup):
    def producer(self) -> Any:
        return Flaky(super().producer())


@pytest.mark.parametrize("work", ["pipeline", "latency"])
def test_messages_that_fail_for_a_while_are_counted(work: str, mq: Embedded) -> None:
    headrace("topic", "create", "flaky")
    setup = FlakySetup("flaky", 1024, 0.03, 1000, 200, mq.nameserver, stall_s=1)
    outcome = trio.run(WORKLOADS[work], setup)
    assert outcome.errors == 1
    assert outcome.messages > 0
    headrace("topic", "delete", "flaky", "--yes")
