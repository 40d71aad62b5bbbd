"""A registered broker that does not answer, or sends malformed answers, does not hide the others.

It is what anybody can leave behind in a nameserver.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import trio

import headrace as library
from headrace import Admin, Message, blocking
from headrace.admin.requests import BrokerProblem
from headrace.embedded import Embedded
from headrace.errors import ConnectFailed, MalformedAnswer
from headrace_protocol.bodies import TopicConfig, TopicConfigSerializeWrapper
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.nameserver_headers import RegisterBrokerHeader
from headrace_protocol.registration import RegisterBrokerBody
from headrace_protocol.serving import Reply
from tests.support.cli import headrace
from tests.support.scripted import Asked, Scripted, scripted_in_thread

pytestmark = pytest.mark.slow
NAME = "a-ghost"


@contextlib.contextmanager
def registered(nameserver: str, address: str, *topics: str) -> Iterator[None]:
    """A broker at ``address`` with ``topics`` and one more, registered for the length of the
    block."""
    table = {name: TopicConfig(topic_name=name, read_queue_nums=1) for name in (*topics, "ghostly")}
    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigSerializeWrapper(topic_config_table=table)
    ).encode()
    header = RegisterBrokerHeader(
        broker_name=NAME, broker_addr=address, cluster_name="c", ha_server_addr="", broker_id=0
    )
    with BlockingConnection.connect(nameserver) as connection:
        connection.request(RequestCode.REGISTER_BROKER, header, body, timeout_ms=5000).expect()
        yield


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    with library.embedded() as mq:
        with blocking.Admin(nameserver=mq.nameserver) as admin:
            admin.create_topic("T", queues=1)
        with (
            blocking.Producer(nameserver=mq.nameserver) as producer,
            blocking.Consumer("g", "T", nameserver=mq.nameserver, start="earliest") as consumer,
        ):
            producer.send(Message("T", b"one", key="k"))
            assert next(iter(consumer)).body == b"one"
            consumer.commit()
        yield mq


@pytest.fixture(scope="module")
def dead_address() -> Iterator[str]:
    """A port that nothing listens on."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


@pytest.fixture
def ghost(mq: Embedded, dead_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)
    with registered(mq.nameserver, dead_address, "T"):
        yield dead_address


def rows_of(name: str, printed: Any) -> list[Any]:
    return printed["brokers"] if name == "describe" else printed


@pytest.mark.parametrize(
    "command",
    [
        ("topic", "describe", "T", "--allow-partial"),
        ("group", "list"),
        ("group", "lag", "g", "--allow-partial"),
        ("message", "query", "T", "k", "--allow-partial"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_dead_broker_is_a_row_with_a_problem(ghost: str, command: tuple[str, ...]) -> None:
    outcome = headrace(*command, "--json")
    assert outcome.exit_code == 0
    good, *_, bad = rows_of(command[1], outcome.json())
    told = f"broker {NAME} at {ghost}: cannot connect to {ghost}"
    assert good["problem"] is None
    assert bad["problem"].startswith(told)
    assert bad.get("broker", NAME) == NAME
    assert good.keys() == bad.keys()
    assert outcome.stderr.startswith(f"headrace: skipped: {told}")
    assert outcome.stderr.count("\n") == 1
    in_columns = headrace(*command)
    assert in_columns.exit_code == 0
    assert told in in_columns.stdout


def test_without_problems_there_is_no_such_column(
    mq: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)
    headrace("broker", "forget", NAME, "--yes")  # if it was in another test
    rows = headrace("group", "list", "--json").json()
    assert "g" in {row["group"] for row in rows}
    assert not any("problem" in row for row in rows)


def test_answers_of_the_others_are_printed(ghost: str) -> None:
    consumed = headrace("consume", "T", "--allow-partial")
    assert (consumed.exit_code, consumed.stdout) == (0, "one\n")
    assert f"not read: T/{NAME}/0: cannot connect" in consumed.stderr
    message_id = headrace("message", "query", "T", "k", "--allow-partial", "--json").json()[0][
        "message_id"
    ]
    got = headrace("message", "get", message_id, "--topic", "T", "--allow-partial")
    assert got.exit_code == 0
    assert "body\tone\n" in got.stdout
    assert headrace("message", "query", "T", "other", "--allow-partial").exit_code == 3


def test_cluster_and_doctor_say_what_is_wrong_with_it(ghost: str) -> None:
    cluster = headrace("cluster", "--json")
    assert cluster.exit_code == 0
    assert [bool(row["problem"]) for row in cluster.json() if row["broker"] == NAME] == [True]
    doctor = headrace("doctor", "--json")
    assert doctor.exit_code == 1
    assert [row["ok"] for row in doctor.json() if row["name"] == f"{NAME}:0"] == [False]


@pytest.mark.parametrize("address", ["", "no address", "\x00:1", "a" * 70 + ":1"])
def test_a_malformed_address_is_a_problem_too(
    mq: Embedded, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)
    with scripted_in_thread() as (nameserver,):
        _repeat(mq.nameserver, nameserver, b"127.0.0.1:7", address)
        with registered(mq.nameserver, "127.0.0.1:7", "T"):
            monkeypatch.setenv("HEADRACE_NAMESERVER", nameserver.address)
            assert headrace("group", "list", "--json").exit_code == 0
            assert headrace("doctor").exit_code == 1
            assert headrace("cluster").exit_code == 0


def _repeat(nameserver: str, script: Scripted, old: bytes, address: str) -> None:
    """Have ``script`` answer as the nameserver does, except for one address."""

    def answer(asked: Asked) -> Reply:
        with BlockingConnection.connect(nameserver) as connection:
            response = connection.request(asked.code, timeout_ms=5000)
        return Reply(body=(bytes(response.body).replace(old, _json_text(address)),))

    script.answer(RequestCode.GET_BROKER_CLUSTER_INFO, answer)
    unknown = Reply(code=ResponseCode.TOPIC_NOT_EXIST)
    script.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, unknown)


def _json_text(text: str) -> bytes:
    return text.encode("unicode_escape").replace(b"\\x", b"\\u00")


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff\x00" * 40], ids=["cut", "list", "bytes"])
def test_malformed_answers_are_a_problem_too(
    mq: Embedded, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)
    with scripted_in_thread() as (broker,), registered(mq.nameserver, broker.address, "T"):
        for code in RequestCode:
            broker.answer(code, Reply(body=(body,)))
        for command in (
            ("topic", "describe", "T", "--allow-partial"),
            ("group", "list"),
            ("group", "lag", "g", "--allow-partial"),
            ("message", "query", "T", "k", "--allow-partial"),
            ("cluster",),
        ):
            outcome = headrace(*command)
            assert outcome.exit_code == 0
            assert f"the answer from {broker.address} cannot be read" in outcome.stdout, command


def test_malformed_figures_are_a_problem_of_their_broker(
    mq: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)
    info = b'{"table":{"putTps":"many","getTransferredTps":"  "}}'
    with scripted_in_thread() as (broker,), registered(mq.nameserver, broker.address, "T"):
        broker.answer(RequestCode.GET_BROKER_RUNTIME_INFO, Reply(body=(info,)))
        outcome = headrace("cluster")
    assert outcome.exit_code == 0
    assert f"{broker.address} sent a malformed number: could not convert" in outcome.stdout


# -- in Python -------------------------------------------------------------------------------------


async def test_admin_raises_unless_it_is_given_a_list_for_problems(ghost: str) -> None:
    async with Admin() as admin:
        with pytest.raises(ConnectFailed):
            await admin.groups()
        problems: list[BrokerProblem] = []
        assert "g" in [group.group_name for group in await admin.groups(problems=problems)]
        assert [(each.broker_name, each.address) for each in problems] == [(NAME, ghost)]
        assert len(await admin.lag("g", "T", problems=problems)) == 1
        assert len(await admin.topic_stats("T", problems=problems)) == 1
        assert len(problems) == 1, "it is not asked again"


async def test_changes_reach_all_live_brokers_before_the_error_is_raised(ghost: str) -> None:
    async with Admin() as admin:
        with pytest.raises(ConnectFailed):
            await admin.create_topic("new", queues=3)
        stats = await admin.topic_stats("new")
        assert len(stats) == 3


async def test_an_error_is_raised_if_no_broker_answers(mq: Embedded) -> None:
    with scripted_in_thread() as (broker,), registered(mq.nameserver, broker.address, "only"):
        broker.answer(RequestCode.GET_TOPIC_STATS_INFO, Reply(body=(b"[",)))
        async with Admin(nameserver=mq.nameserver) as admin:
            with trio.fail_after(5), pytest.raises(MalformedAnswer, match=broker.address):
                await admin.topic_stats("only", problems=[])
