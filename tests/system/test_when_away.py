"""Each row of docs/when-something-is-away.md names a test that shows it; the rest are run here."""

from __future__ import annotations

import ast
import re
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

import pytest
import trio

from headrace import Consumer, Message, Producer, ReceivedMessage, blocking
from headrace.admin.client import Admin
from headrace.errors import NameserverUnavailable, RouteNotFound
from tests.support.cli import IMPATIENT, fail, headrace, succeed
from tests.support.cluster import Cluster, Daemon
from tests.support.documents import ROOT
from tests.support.processes import HEADRACE
from tests.support.running_brokers import Brokers, BrokersInThread, brokers, running_in_thread
from tests.support.until import until

PAGE = ROOT / "docs/when-something-is-away.md"
COLUMNS = ["who", "sees", "until", "lost", "do"]
NAMED = re.compile(r"<!-- (tests/[^ ]+(?: tests/[^ ]+)*) -->")
TOPIC = "orders"
KEYS = [f"key{number}" for number in range(8)]


# -- the page --------------------------------------------------------------------------------------


def tables() -> Iterator[list[str]]:
    """The rows of each table of the page, the heading included."""
    rows: list[str] = []
    for line in [*PAGE.read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line)
        elif rows:
            yield rows
            rows = []


ROWS = [row for heading, _rule, *rows in tables() for row in rows]


@cache
def functions(path: str) -> set[str]:
    """The tests of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def test_each_table_has_the_same_columns() -> None:
    headings = [rows[0].strip("| ").split(" | ") for rows in tables()]
    assert len(headings) >= 7
    assert all(heading == COLUMNS for heading in headings)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40].split(" | ", maxsplit=1)[0])
def test_a_row_names_tests_that_exist(row: str) -> None:
    found = NAMED.search(row)
    assert found, "no test shows it"
    cells = [cell.strip() for cell in NAMED.sub("", row).strip("| ").split(" | ")]
    assert len(cells) == len(COLUMNS)
    assert all(cells)
    for name in found[1].split():
        path, _, function = name.partition("::")
        assert function in functions(path), name


# -- a broker --------------------------------------------------------------------------------------


@pytest.fixture
async def mq(tmp_path: Path) -> AsyncIterator[Brokers]:
    """The brokers a and b with a topic on both."""
    async with brokers(tmp_path, ["a", "b"]) as running:
        async with Admin(**running.at) as admin:
            await admin.create_topic(TOPIC, queues=1)
        yield running


async def send_each_key(mq: Brokers) -> dict[str, str]:
    """The broker that each key's message went to."""
    async with Producer(**mq.at) as producer:
        sent = [(key, await producer.send(Message(TOPIC, b"x", key=key))) for key in KEYS]
    return {key: result.queue.broker_name for key, result in sent}


async def read(messages: AsyncIterator[ReceivedMessage], count: int) -> list[str]:
    return sorted([(await anext(messages)).key for _ in range(count)])


@pytest.mark.slow
async def test_keys_of_a_plain_topic_go_elsewhere_meanwhile(mq: Brokers) -> None:
    before = await send_each_key(mq)
    assert set(before.values()) == {"a", "b"}
    await mq.stop("b")
    assert set((await send_each_key(mq)).values()) == {"a"}
    await mq.start("b")
    assert await send_each_key(mq) == before


@pytest.mark.slow
async def test_a_group_reads_the_others_and_then_the_broker_that_is_back(
    mq: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    def told(words: str) -> list[str]:
        return [text for text in caplog.messages if text.startswith(f"broker b {words}")]

    await send_each_key(mq)
    async with Consumer("g", TOPIC, start="earliest", **mq.at) as consumer:
        messages = aiter(consumer)
        assert await read(messages, len(KEYS)) == KEYS
        await mq.stop("b")
        await send_each_key(mq)
        assert await read(messages, len(KEYS)) == KEYS
        await until(lambda: bool(told("is unavailable, retrying")))
        await mq.start("b")
        await send_each_key(mq)
        assert await read(messages, len(KEYS)) == KEYS
        await until(lambda: bool(told("is available again")))
    assert len(told("")) == 2


@pytest.mark.slow
async def test_running_clients_need_no_nameserver(mq: Brokers) -> None:
    async with (
        Producer(**mq.at) as producer,
        Consumer("g", TOPIC, start="earliest", **mq.at) as consumer,
    ):
        messages = aiter(consumer)
        for is_away in (False, True):
            if is_away:
                await mq.stop("nameserver")
            for key in KEYS:
                await producer.send(Message(TOPIC, b"x", key=key))
            assert await read(messages, len(KEYS)) == KEYS
        async with Producer(delivery_timeout_ms=0, **mq.at) as new:
            with pytest.raises(NameserverUnavailable, match=mq.nameserver):
                await new.send(Message(TOPIC, b"x"))
        with pytest.raises(NameserverUnavailable, match=mq.nameserver):
            await Consumer("h", TOPIC, **mq.at).__aenter__()
        await mq.start_nameserver()


@pytest.mark.slow
async def test_clients_that_start_without_a_broker(mq: Brokers) -> None:
    for name in "ab":
        await mq.stop(name)
    words = "broker . .* was shut down .*; a broker may yet register it"
    with pytest.raises(RouteNotFound, match=words) as raised:
        await Consumer("h", TOPIC, **mq.at).__aenter__()
    assert raised.value.retryable
    async with Producer(delivery_timeout_ms=100, **mq.at) as producer:
        with pytest.raises(RouteNotFound, match=words):
            await producer.send(Message(TOPIC, b"x"))
    async with Producer(**mq.at) as producer, trio.open_nursery() as nursery:
        nursery.start_soon(mq.start, "a")
        assert (await producer.send(Message(TOPIC, b"x"))).queue.broker_name == "a"


# -- commands --------------------------------------------------------------------------------------


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokersInThread]:
    """The only broker, with a topic and a table."""
    with running_in_thread(tmp_path, ["b"]) as running:
        monkeypatch.setenv("HEADRACE_NAMESERVER", running.nameserver)
        succeed("topic", "create", TOPIC, "--queues", "1")
        succeed("send", TOPIC, "body", "--key", "k")
        yield running


@pytest.mark.slow
def test_commands_while_all_brokers_are_away(one: BrokersInThread) -> None:
    one.stop("b")
    left = r"broker b .*was shut down \d+ s ago"
    commands: list[tuple[int, tuple[str, ...]]] = [
        (3, ("send", TOPIC, "x")),
        (3, ("kv", "put", TOPIC, "k", "v")),
        (1, ("kv", "get", TOPIC, "k")),
        (3, ("kv", "dump", TOPIC)),
        (3, ("consume", TOPIC)),
        (3, ("consume", TOPIC, "--group", "g")),
        (3, ("topic", "describe", TOPIC)),
        (3, ("topic", "create", "new")),
        (3, ("topic", "list")),
        (3, ("group", "lag", "g")),
    ]
    for exit_code, command in commands:
        outcome = headrace(*command, patience=IMPATIENT)
        assert outcome.exit_code == exit_code, command
        assert re.search(left, outcome.stderr), command
        assert ("headrace: waiting: " in outcome.stderr) == (command[0] == "consume")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--group", "g"), ("-f", "--max", "1"), ("-f", "--max", "1", "--group", "g")]
)
def test_consume_waits_for_the_only_broker(one: BrokersInThread, options: tuple[str, ...]) -> None:
    one.stop("b")
    back = threading.Timer(0.3, one.start, ["b"])
    back.start()
    outcome = succeed("consume", TOPIC, *options)
    back.join()
    assert outcome.stdout == "body\n"
    assert "waiting: no broker that the nameserver knows has topic" in outcome.stderr


@pytest.mark.slow
def test_lists_name_a_broker_that_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_in_thread(tmp_path, ["a", "b"]) as running:
        monkeypatch.setenv("HEADRACE_NAMESERVER", running.nameserver)
        running.stop("b")
        here, left = succeed("cluster", "--json").json()
        assert (here["broker"], here["problem"]) == ("a", None)
        assert (left["broker"], left["id"]) == ("b", None)
        assert left["problem"].startswith("was shut down")
        assert "skipped: broker b was shut down" in succeed("topic", "list").stderr


@pytest.mark.parametrize(
    ("exit_code", "command"),
    [
        (3, ("consume", "T")),
        (3, ("consume", "T", "-f", "--group", "g")),
        (3, ("topic", "list")),
        (3, ("group", "lag", "g")),
        (1, ("kv", "get", "T", "k")),
    ],
)
def test_commands_without_a_nameserver(exit_code: int, command: tuple[str, ...]) -> None:
    told = fail(exit_code, *command, "--nameserver", "127.0.0.1:1")
    assert "no nameserver answered: cannot connect to 127.0.0.1:1: " in told
    checked = headrace("doctor", "--nameserver", "127.0.0.1:1", "--json")
    assert checked.exit_code == 1
    assert [row["role"] for row in checked.json() if not row["ok"]] == ["nameserver"]


# -- processes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A nameserver and the brokers a and b, each a process."""
    with Cluster(tmp_path_factory.mktemp("away"), "a", "b") as running:
        yield running


@pytest.fixture
def cluster(processes: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The same, for commands."""
    monkeypatch.setenv("HEADRACE_NAMESERVER", processes.nameserver.address)
    return processes


@pytest.mark.slow
def test_a_killed_broker_loses_nothing(cluster: Cluster) -> None:
    succeed("topic", "create", "killed", "--queues", "1")
    for key in KEYS:
        succeed("send", "killed", key, "--key", key)
    cluster.brokers["b"].kill()
    partly = headrace("consume", "killed", patience=IMPATIENT)
    assert partly.exit_code == 3
    assert "broker b closed its connection" in partly.stderr
    assert 0 < len(partly.stdout.split()) < len(KEYS)
    for _ in range(2):
        succeed("send", "killed", "meanwhile")
    start(cluster, cluster.brokers["b"])
    wanted = [*KEYS, "meanwhile", "meanwhile"]
    assert sorted(succeed("consume", "killed").stdout.split()) == wanted


def start(cluster: Cluster, *daemons: Daemon) -> None:
    for daemon in daemons:
        daemon.start()
        daemon.wait_up()
    cluster.wait_registered()


@pytest.mark.slow
def test_a_broker_that_hangs_is_avoided(cluster: Cluster) -> None:
    succeed("topic", "create", "hangs", "--queues", "1")
    with blocking.Producer(timeout_ms=300) as producer:
        cluster.brokers["b"].pause()
        sent = [producer.send(Message("hangs", b"%d" % number)) for number in range(8)]
        assert {result.queue.broker_name for result in sent} == {"a"}
        cluster.brokers["b"].resume()
    stored = succeed("consume", "hangs").stdout.split()
    assert set(stored) == {str(number) for number in range(8)}
    assert len(stored) <= 8 + 2  # what b had received


@pytest.mark.slow
def test_a_reader_outlives_a_restart_of_everything(cluster: Cluster) -> None:
    succeed("topic", "create", "restarted", "--queues", "1", "--broker", "b")
    succeed("send", "restarted", "before")
    daemons = (cluster.nameserver, cluster.brokers["b"])

    def restart() -> None:
        for daemon in reversed(daemons):
            daemon.stop()
        start(cluster, *daemons)
        with blocking.Producer() as producer:
            producer.send(Message("restarted", b"after"))

    restarting = threading.Timer(0.3, restart)
    restarting.start()
    outcome = succeed("consume", "restarted", "-f", "--max", "2")
    restarting.join()
    assert outcome.stdout.split() == ["before", "after"]


@pytest.mark.slow
def test_what_a_killed_member_did_not_commit_comes_again(one: BrokersInThread) -> None:
    command = [HEADRACE, "consume", TOPIC, "--group", "g", "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as member:
        assert member.stdout is not None
        assert member.stdout.readline() == b"body\n"
        member.kill()
    assert succeed("consume", TOPIC, "--group", "g").stdout == "body\n"
    assert succeed("consume", TOPIC, "--group", "g").stdout == ""
