"""Every command against a real broker: what it prints, and its exit code."""

from __future__ import annotations

import json
from itertools import count
from typing import TYPE_CHECKING

import pytest

import headrace as library
from headrace import Message, blocking
from tests.support.cli import Outcome, headrace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.embedded import Embedded

_numbers = count()


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    with library.embedded() as mq:
        yield mq


@pytest.fixture(autouse=True)
def environment(mq: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)


@pytest.fixture
def topic() -> str:
    """A topic of the test's own, with one queue."""
    name = f"topic_{next(_numbers)}"
    assert headrace("topic", "create", name, "--queues", "1").exit_code == 0
    return name


def succeed(*arguments: str, stdin: bytes = b"") -> Outcome:
    outcome = headrace(*arguments, stdin=stdin)
    assert outcome.exit_code == 0, outcome.stderr
    return outcome


def fail(exit_code: int, *arguments: str, stdin: bytes = b"") -> str:
    """Run a command that fails; returns its message, which is one line."""
    outcome = headrace(*arguments, stdin=stdin)
    assert outcome.exit_code == exit_code, outcome
    assert outcome.stderr.startswith("headrace: ")
    assert outcome.stderr.count("\n") == 1
    assert "Traceback" not in outcome.stderr
    return outcome.stderr


# -- send and consume ------------------------------------------------------------------------------


def test_send_says_where_the_message_is(topic: str) -> None:
    sent = succeed("send", topic, "hello", "--key", "k", "--tag", "t", "--json").json()
    assert sent | {"message_id": 0, "offset_message_id": 0} == {
        "topic": topic,
        "broker": "broker-a",
        "queue": 0,
        "queue_offset": 0,
        "message_id": 0,
        "offset_message_id": 0,
    }
    (message,) = succeed("consume", topic, "--json").json_lines()
    assert (message["body"], message["key"], message["tag"]) == ("hello", "k", "t")
    assert message["message_id"] == sent["message_id"]
    assert message["offset_message_id"] == sent["offset_message_id"]
    assert message["store_time"].endswith("Z")


def test_lines_of_standard_input_there_and_back(topic: str) -> None:
    text = "one\n\nzwei ü\nthree"
    summary = succeed("send", topic, "--json", stdin=text.encode()).json()
    assert summary["messages"] == 3
    assert succeed("consume", topic).stdout == "one\nzwei ü\nthree\n"


def test_csv_with_key_and_tag_by_column(topic: str, tmp_path: Path) -> None:
    file = tmp_path / "orders.csv"
    file.write_text("id,kind,sum\n7,paid,1.5\n8,,2\n")
    succeed("send", topic, "--file", str(file), "--key-column", "id", "--tag-column", "kind")
    messages = succeed("consume", topic, "--json").json_lines()
    assert [(m["key"], m["tag"], json.loads(m["body"])) for m in messages] == [
        ("7", "paid", {"id": "7", "kind": "paid", "sum": "1.5"}),
        ("8", None, {"id": "8", "kind": "", "sum": "2"}),
    ]
    assert len(succeed("consume", topic, "--tags", "paid || other").stdout.splitlines()) == 1


def test_ndjson_with_a_field_as_body(topic: str, tmp_path: Path) -> None:
    file = tmp_path / "in.ndjson"
    file.write_text('{"k":1,"text":"a"}\n{"k":2,"text":"b"}\n')
    arguments = ("--file", str(file), "--key-column", "k", "--body-column", "text")
    succeed("send", topic, *arguments)
    assert succeed("consume", topic).stdout == "a\nb\n"


def test_a_bad_row_is_named_and_what_came_before_is_sent(topic: str, tmp_path: Path) -> None:
    file = tmp_path / "in.ndjson"
    file.write_text('{"k":1}\n{"k":2}\n{"k" 3}\n{"k":4}\n')
    message = fail(1, "send", topic, "--file", str(file))
    assert f"{file}:3:6: invalid JSON: Expecting ':' delimiter" in message
    assert "The 2 messages before this row were sent, none after it" in message
    assert len(succeed("consume", topic).stdout.splitlines()) == 2


@pytest.mark.slow
def test_many_lines_through_the_pipeline(topic: str, tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(20_000)]
    file = tmp_path / "many.txt"
    file.write_text("\n".join(lines))
    assert succeed("send", topic, "--file", str(file), "--json").json()["messages"] == 20_000
    assert succeed("consume", topic).stdout.splitlines() == lines


def test_bodies_that_are_no_text_are_base64_in_json(topic: str) -> None:
    succeed("send", topic, stdin=b"\xff\xfe\n")
    (message,) = succeed("consume", topic, "--json").json_lines()
    assert message["body_base64"] == "//4="
    assert "body" not in message


def test_consume_from_a_place_and_up_to_a_number(topic: str) -> None:
    succeed("send", topic, stdin=b"0\n1\n2\n3\n4\n")
    assert succeed("consume", topic, "--from", "3").stdout == "3\n4\n"
    assert succeed("consume", topic, "--max", "2").stdout == "0\n1\n"
    assert succeed("consume", topic, "--from", "latest").stdout == ""
    assert succeed("consume", topic, "--from", "1h").stdout.count("\n") == 5
    assert succeed("consume", topic, "--from", "2999-01-01").stdout == ""
    assert succeed("consume", topic, "--queue", "0").stdout.count("\n") == 5
    assert succeed("consume", topic, "--follow", "--max", "5").stdout.count("\n") == 5


@pytest.mark.slow
def test_a_group_goes_on_where_it_was(topic: str) -> None:
    group = f"group_{topic}"
    succeed("send", topic, stdin=b"0\n1\n2\n3\n")
    assert succeed("consume", topic, "--group", group, "--max", "3").stdout == "0\n1\n2\n"
    assert succeed("consume", topic, "--group", group).stdout == "3\n"
    assert succeed("consume", topic, "--group", group).stdout == ""

    (lag,) = [
        row for row in succeed("group", "lag", group, "--json").json() if row["topic"] == topic
    ]
    assert (lag["committed_offset"], lag["max_offset"], lag["lag"]) == (4, 4, 0)

    (moved,) = succeed("group", "reset", group, topic, "--to", "earliest", "--json").json()
    assert moved == {"topic": topic, "broker": "broker-a", "queue": 0, "queue_offset": 0}
    assert succeed("consume", topic, "--group", group).stdout == "0\n1\n2\n3\n"
    names = [row["group"] for row in succeed("group", "list", "--json").json()]
    assert group in names


@pytest.mark.slow
def test_a_new_group_may_begin_at_the_end(topic: str) -> None:
    succeed("send", topic, stdin=b"0\n1\n")
    arguments = ("consume", topic, "--group", f"late_{topic}")
    assert succeed(*arguments, "--from", "latest").stdout == ""
    succeed("send", topic, "2")
    assert succeed(*arguments).stdout == "2\n"


@pytest.mark.slow
def test_the_lag_in_a_topic_that_is_not_there(topic: str) -> None:
    succeed("send", topic, "0")
    succeed("consume", topic, "--group", f"group_{topic}")
    lag = ("group", "lag", f"group_{topic}", "--topic")
    assert succeed(*lag, topic).rows()
    assert "knows has topic nowhere" in fail(3, *lag, "nowhere")


# -- topics, messages, cluster ---------------------------------------------------------------------


@pytest.mark.slow
def test_topics_are_made_listed_described_and_deleted() -> None:
    name = f"topic_{next(_numbers)}"
    made = succeed("topic", "create", name, "--queues", "3", "--perm", "r", "--json").json()
    assert made == {"topic": name, "queues": 3, "perm": "r"}
    description = succeed("topic", "describe", name, "--json").json()
    assert description["brokers"] == [
        {"broker": "broker-a", "write_queues": 3, "read_queues": 3, "perm": "r", "attributes": {}}
    ]
    assert [queue["queue"] for queue in description["queues"]] == [0, 1, 2]
    assert description["groups"] == []
    assert {"topic": name} in succeed("topic", "list", "--json").json()
    assert [name] in succeed("topic", "list").rows()
    succeed("topic", "delete", name, "--yes")
    assert {"topic": name} not in succeed("topic", "list", "--json").json()
    assert f"topic {name} does not exist" in fail(3, "topic", "delete", name, "--yes")


def test_describe_warns_of_queues_that_are_only_written(mq: Embedded, topic: str) -> None:
    with blocking.Admin(nameserver=mq.nameserver) as admin:
        admin.create_topic(topic, queues=4, read_queues=2)
    outcome = succeed("topic", "describe", topic)
    assert "has 4 write queues but only 2 read queues" in outcome.stderr


def test_messages_are_found_by_id_and_key(mq: Embedded, topic: str) -> None:
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        results = [producer.send(Message(topic, body, key="k")) for body in (b"one", b"two")]
    one = succeed("message", "get", results[0].offset_message_id, "--json").json()
    assert (one["body"], one["key"], one["topic"]) == ("one", "k", topic)
    by_unique = succeed("message", "get", results[1].message_id, "--topic", topic).stdout
    assert "body\ttwo\n" in by_unique
    found = succeed("message", "query", topic, "k", "--json").json()
    assert [message["body"] for message in found] == ["one", "two"]
    assert [row[-1] for row in succeed("message", "query", topic, "k").rows()] == ["one", "two"]
    assert succeed("message", "query", topic, "k", "--since", "1h").rows()
    fail(3, "message", "query", topic, "k", "--until", "1h")


def test_a_key_with_a_blank_is_found_by_its_parts(topic: str) -> None:
    succeed("send", topic, "one", "--key", "a b")
    for part in ("a", "b"):
        assert [row[-1] for row in succeed("message", "query", topic, part).rows()] == ["one"]


def test_cluster_and_doctor(mq: Embedded) -> None:
    (broker,) = succeed("cluster", "--json").json()
    assert (broker["broker"], broker["id"], broker["address"]) == ("broker-a", 0, mq.broker)
    assert broker["version"].startswith("headrace")
    assert broker["problem"] is None
    checks = succeed("doctor", "--json").json()
    assert [(check["role"], check["address"], check["ok"]) for check in checks] == [
        ("nameserver", mq.nameserver, True),
        ("broker", mq.broker, True),
    ]


def test_doctor_tells_a_broker_from_a_nameserver(mq: Embedded) -> None:
    outcome = headrace("doctor", "--json", "--nameserver", mq.broker)
    assert outcome.exit_code == 1
    assert "this is not a nameserver, but perhaps a broker" in outcome.json()[0]["problem"]


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("consume", "nowhere"), 3, "knows has topic nowhere"),
        (("topic", "describe", "nowhere"), 3, "knows has topic nowhere"),
        (("group", "lag", "nobody"), 3, "group nobody does not exist"),
        (("message", "query", "nowhere", "k"), 3, "topic nowhere"),
        (("consume", "a b"), 2, "'a b' is not a valid topic name"),
        (("consume", "t", "--from", "soon"), 2, "'soon' is not a position"),
        (("consume", "t", "--group", "g", "--queue", "1"), 2, "cannot be combined with --group"),
        (("message", "query", "t", "a b"), 2, "query one of the parts: 'a' or 'b'"),
        (("message", "query", "t", "k", "--since", "5"), 2, "'5' is not a time: write a time"),
        (("message", "query", "t", "k", "--since", "2h", "--until", "3h"), 2, "swap them"),
        (("send", "t", "body", "--file", "x"), 2, "BODY cannot be combined"),
        (("send", "t", "--key", "k"), 2, "for rows, use --key-column"),
        (("send", "t", "--file", "/nowhere/x.csv"), 3, "/nowhere/x.csv: No such file"),
        (("send", "t", "--key-column", "k"), 2, "lines have no columns"),
        (("send", "t", ""), 2, "0 bytes"),
        (("send", "a b"), 2, "'a b' is not a valid topic name"),
        (("topic", "create", "t", "--perm", "x"), 2, "write rw, r or w"),
        (("topic", "create", "t", "--attribute", "x"), 2, "KEY=VALUE"),
        (("topic", "create", "t", "--broker", "no"), 2, "no broker named no"),
        (("cluster", "--nameserver", "nowhere"), 2, "'nowhere' is not an address"),
        (("cluster", "--nameserver", "127.0.0.1:1"), 3, "cannot connect to 127.0.0.1:1"),
        (("send", "t", "x", "-n", "127.0.0.1:1"), 3, "cannot connect to 127.0.0.1:1"),
        (("broker", "-c", "/nowhere/broker.conf"), 2, "/nowhere/broker.conf"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(
    arguments: tuple[str, ...], exit_code: int, words: str
) -> None:
    assert words in fail(exit_code, *arguments)


def test_wrong_usage_is_exit_code_2() -> None:
    outcome = headrace("topic", "create")
    assert outcome.exit_code == 2
    assert "Missing argument 'NAME'" in outcome.stderr
    assert headrace("no-such-command").exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("dev", "--log-level", "foo"),
        ("broker", "--log-level", "foo", "-c", "broker.conf"),
        ("nameserver", "--log-level", "foo"),
        ("dev", "--broker-port", "70000"),
        ("dev", "--nameserver-port", "-1"),
        ("nameserver", "--port", "99999", "--check-config"),
        ("nameserver", "--port", "-1", "--check-config"),
    ],
)
def test_options_of_daemons_are_checked_before_a_start(arguments: tuple[str, ...]) -> None:
    outcome = headrace(*arguments)
    assert outcome.exit_code == 2
    assert f"Invalid value for '{arguments[1]}'" in outcome.stderr


def test_log_levels_may_be_in_capitals() -> None:
    succeed("nameserver", "--log-level", "INFO", "--check-config")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("headrace.admin.commands.cluster.print_rows", broken)
    with pytest.raises(ZeroDivisionError):
        headrace("cluster")


def test_check_config_names_file_line_and_key(tmp_path: Path) -> None:
    good = tmp_path / "good.conf"
    good.write_text(f"brokerName=b\nstorePathRootDir={tmp_path}/store\n")
    succeed("broker", "-c", str(good), "--check-config")
    bad = tmp_path / "bad.conf"
    bad.write_text("brokerName=b\nbrokerNmae=c\nlistenPort=many\n")
    message = fail(2, "broker", "-c", str(bad), "--check-config")
    assert f"{bad}:2" in message
    assert "did you mean brokerName" in message
    assert not (tmp_path / "store").exists()
    namesrv = tmp_path / "namesrv.conf"
    namesrv.write_text("listenPort=9876\nlisten=1\n")
    assert f"{namesrv}:2" in fail(2, "nameserver", "-c", str(namesrv), "--check-config")
