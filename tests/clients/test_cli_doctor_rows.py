"""Each thing that can be wrong is a row of ``headrace doctor``, and makes it fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import Admin
from headrace.admin.commands.doctor import diagnose
from headrace.admin.health import CHECKS, broker_checks, departed_checks
from headrace.values import now_ms
from headrace_protocol.bodies import BrokerData, ClusterInfo, KVTable
from headrace_protocol.codes import RequestCode
from headrace_protocol.departed import DepartedBroker
from headrace_protocol.serving import Reply
from tests.support.broker import BrokerUnderTest
from tests.support.cli import headrace
from tests.support.documents import ROOT
from tests.support.running_brokers import brokers
from tests.support.scripted import scripted_in_thread

NOW_MS = 1_700_000_000_000
# Role, what the broker says, and words of the row.
WRONG: list[tuple[str, dict[str, str], str]] = [
    (
        "store",
        {"refusesWrites": "95.1 % full", "refusesWritesSince": "1700000000000"},
        "it refuses every send since 2023-11-14T22:13:20.000Z: 95.1 % full",
    ),
    ("store", {"refusesWrites": "a flush failed"}, "it refuses every send: a flush failed"),
    ("disk", {"diskFullInHours": "5.5", "oldestUnconsumed": "group g"}, "full in 5.5 h"),
    (
        "follower",
        {"follower.compaction.behindMessages": "3", "follower.compaction.problem": "no space"},
        "compaction: no space; the log is kept",
    ),
    (
        "follower",
        {"follower.tier.behindMessages": "7", "follower.tier.behindSeconds": "180"},
        "tier: 7 messages behind for 3 minutes",
    ),
    ("tier", {"tierOpen": "false"}, "has not been reached since the start"),
    ("tier", {"tierPlaceProblem": "the folder is not mounted"}, "the folder is not mounted"),
    ("tier", {"tierProblem": "permission denied"}, "reads fail: permission denied"),
    (
        "tier",
        {"tierStuckQueues": "10", "tierStuckReason": "damaged"},
        "uploads of 10 queues are given up, and the log is kept for them: damaged",
    ),
    ("tier", {"tierForeignQueues": "1"}, "in 1 queue the tier has other messages"),
    (
        "compaction",
        {"compactionLostQueues": "3", "compactionLostReason": "mount it"},
        "3 compaction logs are lost, such as this one: mount it",
    ),
    ("audit", {"auditProblem": "a.log: no space"}, "audit log is not written: a.log: no space"),
    ("clock", {"currentTimestamp": str(NOW_MS + 60_000)}, "60 s ahead of this machine's"),
    ("clock", {"currentTimestamp": str(NOW_MS - 7_000)}, "7 s behind this machine's"),
    (
        "static",
        {"staticQueuesUndecidedCount": "1", "staticQueuesUndecided": "T/0 for 12 s"},
        "nobody can read yet (T/0 for 12 s)",
    ),
    (
        "group",
        {"queuesWithoutPulls": "2", "groupsWithoutPulls": "g,h"},
        "`headrace group describe g`",
    ),
]
FINE = {
    "refusesWrites": "no",
    "diskFullInHours": "100.0",
    "follower.tier.behindMessages": "9",
    "follower.tier.behindSeconds": "20",
    "tierOpen": "true",
    "tierProblem": "",
    "tierStuckQueues": "0",
    "tierForeignQueues": "0",
    "compactionLostQueues": "0",
    "auditProblem": "",
    "currentTimestamp": str(NOW_MS + 900),
    "staticQueuesUndecidedCount": "0",
    "queuesWithoutPulls": "0",
}


@pytest.mark.parametrize(("role", "info", "words"), WRONG)
def test_what_is_wrong_is_a_row(role: str, info: dict[str, str], words: str) -> None:
    (row,) = broker_checks("a:0", "10.0.0.1:1", FINE | info, NOW_MS)
    assert (row.role, row.name) == (role, "a:0")
    assert words in str(row.problem)


def test_a_broker_that_is_fine_has_no_row() -> None:
    assert broker_checks("a:0", "10.0.0.1:1", FINE, NOW_MS) == []
    # Apache's brokers say less.
    assert broker_checks("a:0", "10.0.0.1:1", {}, NOW_MS) == []


def test_nonsense_is_no_error() -> None:
    texts = {"refusesWrites": "no", "tierProblem": "", "auditProblem": ""}
    nonsense = dict.fromkeys(FINE, "nan") | texts
    assert broker_checks("a:0", "10.0.0.1:1", nonsense, NOW_MS) == []


def test_each_check_is_tried_and_documented() -> None:
    assert {role for role, _, _ in WRONG} == CHECKS.keys()
    page = (ROOT / "docs" / "operations.md").read_text()
    _, _, text = page.partition("## What doctor finds\n")
    table = text.split("\n\n## ")[0].splitlines()
    roles = {line.split("`")[1] for line in table if line.startswith("| `")}
    assert roles == {"nameserver", "broker", "certificate", *CHECKS, "departed", "rights", "topic"}


def test_the_command_prints_all_rows_and_fails() -> None:
    with scripted_in_thread(2) as (nameserver, broker):
        data = BrokerData(cluster="c", broker_name="a", broker_addrs={0: broker.address})
        cluster = ClusterInfo(
            broker_addr_table={"a": data},
            cluster_addr_table={"c": ["a"]},
            departed_brokers=[
                DepartedBroker(broker_name="b", how="SILENT", since=NOW_MS, topics=["T"]),
                DepartedBroker(broker_name="a", how="SILENT", since=NOW_MS),
            ],
        )
        found = Reply(body=(cluster.encode(strict=True),))
        nameserver.answer(RequestCode.GET_BROKER_CLUSTER_INFO, found)
        info = FINE | {"refusesWrites": "full", "tierOpen": "false"}
        info["currentTimestamp"] = str(now_ms())
        answer = Reply(body=(KVTable(table=info).encode(),))
        broker.answer(RequestCode.GET_BROKER_RUNTIME_INFO, answer)
        outcome = headrace("doctor", "--json", "--nameserver", nameserver.address)
    assert [(row["role"], row["name"], row["ok"]) for row in outcome.json()] == [
        ("nameserver", "-", True),
        ("broker", "a:0", True),
        ("store", "a:0", False),
        ("tier", "a:0", False),
        ("departed", "b", False),
        ("topic", "T", False),
    ]
    assert outcome.exit_code == 1


def test_a_broker_that_left_and_still_runs_says_why() -> None:
    with scripted_in_thread(2) as (nameserver, broker):
        left = DepartedBroker(
            broker_name="b", how="SILENT", since=NOW_MS, topics=["T"], broker_addr=broker.address
        )
        cluster = ClusterInfo(departed_brokers=[left])
        found = Reply(body=(cluster.encode(strict=True),))
        nameserver.answer(RequestCode.GET_BROKER_CLUSTER_INFO, found)
        info = FINE | {"refusesWrites": "the store has begun anew"}
        info["currentTimestamp"] = str(now_ms())
        broker.answer(
            RequestCode.GET_BROKER_RUNTIME_INFO, Reply(body=(KVTable(table=info).encode(),))
        )
        outcome = headrace("doctor", "--json", "--nameserver", nameserver.address)
    rows = {row["role"]: row for row in outcome.json()}
    assert list(rows) == ["nameserver", "departed", "topic", "store"]
    assert rows["store"]["problem"] == "it refuses every send: the store has begun anew"
    assert rows["store"]["address"] == broker.address


def test_many_topics_are_a_few_names() -> None:
    names = [f"T{number}" for number in range(12)] + ["%RETRY%g"]
    gone = DepartedBroker(broker_name="b", how="later than this client", since=1, topics=names)
    departed, topics, groups = departed_checks(gone)
    assert str(departed.problem).startswith("it left at 1970-")
    assert topics.name == "T0, T1, T10, T11, T2, T3, T4, T5, and 4 more"
    assert groups.name == "g"


async def test_a_store_that_a_failed_flush_has_closed_is_a_row(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    info = KVTable.decode(broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body).table
    assert broker_checks("a:0", "10.0.0.1:1", info, broker.clock.ms) == []
    broker.store.flusher.stop_writing("a flush failed")
    broker.clock.ms += 10_000
    info = KVTable.decode(broker.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body).table
    store, clock = broker_checks("a:0", "10.0.0.1:1", info, broker.clock.ms - 10_000)
    assert (store.role, clock.role) == ("store", "clock")
    assert "it refuses every send since " in str(store.problem)
    assert "a flush failed" in str(store.problem)
    broker.close()


async def problems(nameserver: str, ahead_ms: int = 0) -> dict[str, tuple[str, str]]:
    """The findings of doctor: by role, the name and the problem. ahead_ms: of its clock."""
    checks = await diagnose([nameserver], wall_ms=lambda: now_ms() + ahead_ms)
    return {each.role: (each.name, each.problem) for each in checks if each.problem}


@pytest.mark.slow
async def test_against_running_brokers(tmp_path: Path) -> None:
    async with brokers(tmp_path, ["a", "b"], memory=False) as mq:
        assert await problems(mq.nameserver) == {}
        async with Admin(nameserver=mq.nameserver) as admin:
            await admin.create_topic("Orders", queues=2)
            # A group's retry topic is on the brokers that it has asked.
            await admin.create_topic("%RETRY%shop", queues=1)
            nodes = await admin.cluster()
            said = await admin.runtime_info(nodes[0].address)
        always = {"refusesWrites", "currentTimestamp", "staticQueuesUndecidedCount"}
        assert {*always, "queuesWithoutPulls"} <= said.keys()
        assert (await problems(mq.nameserver, ahead_ms=60_000)).keys() == {"clock"}
        (tmp_path / "file").touch()
        await mq.start(
            "c",
            message_store_plug_in="tieredstore",
            tiered_backend_service_provider="posix",
            tiered_store_file_path=tmp_path / "file" / "tier",
        )
        found = await problems(mq.nameserver)
        assert found["tier"][0] == "c:0"
        await mq.stop("c")
        await mq.stop("b")
        found = await problems(mq.nameserver)
        assert found.keys() == {"departed", "topic", "group"}
        assert found["departed"][1].startswith("it was shut down at ")
        assert found["topic"] == ("Orders", "broker b is missing with its queues")
        assert found["group"][0] == "shop"
