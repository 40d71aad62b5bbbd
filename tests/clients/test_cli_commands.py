"""Every command against a real broker: what it prints, and its exit code."""

from __future__ import annotations

import json
import signal
import subprocess
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import Thread

import pytest

from headrace import Message, blocking
from headrace.admin.failures import report
from headrace.admin.options import Patience
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError
from headrace_protocol.codes import RequestCode
from headrace_protocol.headers import SendMessageResponseHeader
from headrace_protocol.serving import Reply
from tests.support.cli import fail, headrace, succeed
from tests.support.processes import HEADRACE, TIMEOUT_S
from tests.support.scripted import route, scripted_in_thread

pytestmark = pytest.mark.usefixtures("environment")


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


def test_short_options_and_properties_of_a_message(topic: str) -> None:
    succeed("send", topic, "hello", "-k", "4711", "-t", "new", "-p", "a=1", "-p", "b=x=y")
    (message,) = succeed("consume", topic, "--json").json_lines()
    assert (message["key"], message["tag"]) == ("4711", "new")
    assert message["properties"].items() >= {"a": "1", "b": "x=y"}.items()


def test_a_message_is_delivered_later(topic: str) -> None:
    succeed("send", topic, "later", "--delay-level", "1")
    succeed("send", topic, "now")
    late = ("consume", topic, "--max", "2", "--follow", "--json")
    messages = succeed(*late).json_lines()
    assert [message["body"] for message in messages] == ["now", "later"]
    assert messages[1]["system_properties"]["DELAY"] == "1"


@pytest.mark.parametrize(
    ("option", "text", "reason"),
    [
        ("--delay", "5", "'5' is not a duration: write 500ms"),
        ("--delay", "9" * 30 + "d", "is not a duration"),
        ("--at", "noon", "'noon' is not a time"),
        ("--delay-level", "19", "19 is not in the range"),
    ],
)
def test_delays_that_cannot_be(topic: str, option: str, text: str, reason: str) -> None:
    assert reason in fail(2, "send", topic, "later", option, text)
    assert "require BODY" in fail(2, "send", topic, "--delay", "5s")
    two = ("--delay", "5s", "--at", "2026-11-21")
    assert "set only one of them" in fail(2, "send", topic, "later", *two)


def test_errors_name_the_options_of_the_command(topic: str) -> None:
    assert fail(1, "send", topic, "later", "--delay", "400d").endswith(
        "Choose an earlier time or a --delay-level\n"
    )
    reserved = fail(2, "send", topic, "x", "--property", "KEYS=key=5")
    assert "use --key, --tag, --delay or --delay-level" in reserved


def test_delays_are_properties_of_the_message() -> None:
    with scripted_in_thread(2) as (nameserver, broker):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(broker))
        header = SendMessageResponseHeader(
            msg_id="0" * 32, queue_id=0, queue_offset=0, recall_handle="handle"
        )
        broker.answer_sends(Reply(header))
        server = ("--nameserver", nameserver.address, "--json")
        assert succeed("send", "T", "x", "--delay", "1500ms", *server).json()["recall_handle"]
        succeed("send", "T", "x", "--at", "2026-11-21T06:00:00.5+01:00", *server)
        texts = [asked.ext["i"] for asked in broker.sends]
    assert "TIMER_DELAY_MS\x011500\x02" in texts[0]
    assert "TIMER_DELIVER_MS\x011795237200500\x02" in texts[1]


def test_a_whole_file_is_a_body(topic: str, tmp_path: Path) -> None:
    file = tmp_path / "apple.txt"
    file.write_bytes(b"two\nlines\n")
    succeed("send", topic, "--body-file", str(file), "-k", "k")
    succeed("send", topic, "--body-file", "-", stdin=b"a\nb")
    bodies = [message["body"] for message in succeed("consume", topic, "--json").json_lines()]
    assert bodies == ["two\nlines\n", "a\nb"]


def test_a_format_is_a_line_for_each_message(topic: str) -> None:
    succeed("send", topic, "tab\tand\nbackslash \\ ü", "-k", "k\t1", "-t", "new")
    succeed("send", topic, "--body-file", "-", stdin=b"\xff")
    lines = succeed("consume", topic, "--format", r"%t %b %q %o %k\t%g\t100%% %s\n").stdout
    assert lines.splitlines() == [
        rf"{topic} broker-a 0 0 k\t1" + "\tnew\t100% " + r"tab\tand\nbackslash \\ ü",
        f"{topic} broker-a 0 1 \t\t100% " + r"\xff",
    ]
    assert succeed("consume", topic, "--max", "1", "--format", "%T").stdout.endswith("Z")


def test_consume_by_key_and_until_a_time(topic: str) -> None:
    for key, body in (("a", "1"), ("b", "2"), ("a b", "3")):
        succeed("send", topic, body, "--key", key)
    assert succeed("consume", topic, "--key", "a").stdout == "1\n3\n"
    assert succeed("consume", topic, "--key", "a b").stdout == "3\n"
    assert succeed("consume", topic, "--key", "a", "--max", "1").stdout == "1\n"
    times = [message["store_time"] for message in succeed("consume", topic, "--json").json_lines()]
    assert times[1] < times[2], "each send is a program of its own"
    assert succeed("consume", topic, "--until", times[1]).stdout == "1\n2\n"
    assert succeed("consume", topic, "--until", "1h").stdout == ""


def test_the_last_messages_of_all_queues() -> None:
    name = "two_queues"
    succeed("topic", "create", name, "--queues", "2")
    for body in "1234":
        succeed("send", name, body, "--key", body)
    assert succeed("consume", name, "--tail", "3").stdout == "2\n3\n4\n"
    assert succeed("consume", name, "--tail", "9").stdout == "1\n2\n3\n4\n"
    assert succeed("consume", name, "--tail", "2", "--follow", "--max", "2").stdout == "3\n4\n"


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
    assert len(succeed("consume", topic, "--tag", "paid,other").stdout.splitlines()) == 1


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
    assert "Messages sent before this row: 2, none after it" in message
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
def test_a_group_takes_messages_out(topic: str) -> None:
    group = f"popping_{topic}"
    succeed("send", topic, stdin=b"0\n1\n2\n3\n")
    take = ("consume", topic, "--group", group, "--pop")
    assert succeed(*take, "--max", "3").stdout == "0\n1\n2\n"
    # The rest was given back, for a second.
    assert succeed(*take).stdout == "3\n"
    assert succeed(*take).stdout == ""
    assert "--pop requires --group" in fail(2, "consume", topic, "--pop")
    assert "--from must be earliest or latest" in fail(2, *take, "--from", "15m")


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
    name = "not_for_long"
    made = succeed("topic", "create", name, "--queues", "3", "--perm", "r", "--json").json()
    assert made == {"topic": name, "queues": 3, "perm": "r"}
    description = succeed("topic", "describe", name, "--json").json()
    assert description["brokers"] == [
        {"broker": "broker-a", "write_queues": 3, "read_queues": 3, "perm": "r", "attributes": {}}
    ]
    assert [queue["queue"] for queue in description["queues"]] == [0, 1, 2]
    assert description["groups"] == []
    assert [name, "3", "0", "0", "-"] in succeed("topic", "list").rows()
    succeed("topic", "delete", name, "--yes")
    assert name not in [row["topic"] for row in succeed("topic", "list", "--json").json()]
    assert f"topic {name} does not exist" in fail(3, "topic", "delete", name, "--yes")


def test_create_refuses_an_existing_topic_and_shows_it(topic: str) -> None:
    succeed("topic", "alter", topic, "--queues", "8")
    message = fail(1, "topic", "create", topic)
    assert f"topic {topic} exists, with 8 queues, perm rw on broker-a; `headrace topic" in message
    fail(1, "topic", "create", topic, "--if-not-exists")
    fail(1, "topic", "create", topic, "--attribute", "message.type=FIFO")
    succeed("topic", "create", topic, "--queues", "8", "--if-not-exists")
    (broker,) = succeed("topic", "describe", topic, "--json").json()["brokers"]
    assert (broker["write_queues"], broker["read_queues"], broker["attributes"]) == (8, 8, {})


def test_alter_changes_what_it_names_and_warns_that_keys_move(topic: str) -> None:
    outcome = succeed("topic", "alter", topic, "--queues", "3", "--json")
    (row,) = outcome.json()
    assert (row["write_queues"], row["read_queues"], row["perm"]) == (3, 3, "rw")
    assert "keys go to other queues" in outcome.stderr
    outcome = succeed("topic", "alter", topic, "--perm", "r", "--json")
    (row,) = outcome.json()
    assert (row["write_queues"], row["read_queues"], row["perm"]) == (3, 3, "r")
    assert outcome.stderr == ""


def fill(mq: Embedded, topic: str, queues: int) -> None:
    """A message in each queue."""
    with blocking.Producer(nameserver=mq.nameserver) as producer:
        for _ in range(queues):
            producer.send(Message(topic, b"x"))
    stats = succeed("topic", "describe", topic, "--json").json()["queues"]
    assert [queue["messages"] for queue in stats] == [1] * queues


@pytest.mark.slow
def test_alter_refuses_to_remove_queues_that_are_not_consumed(mq: Embedded, topic: str) -> None:
    succeed("topic", "alter", topic, "--queues", "4")
    fill(mq, topic, 4)
    message = fail(1, "topic", "alter", topic, "--queues", "2")
    assert "queue 2 of broker-a holds 1 message that no group has consumed (and 1 more)" in message
    assert "--shrink" in message
    succeed("consume", topic, "--group", f"half_{topic}", "--max", "1")
    assert f"that group half_{topic} has not" in fail(1, "topic", "alter", topic, "--queues", "2")
    assert len(succeed("consume", topic).stdout.splitlines()) == 4
    succeed("consume", topic, "--group", f"half_{topic}")
    (row,) = succeed("topic", "alter", topic, "--queues", "2", "--json").json()
    assert (row["write_queues"], row["read_queues"]) == (2, 2)


@pytest.mark.slow
def test_shrink_waits_until_the_queues_are_consumed(mq: Embedded, topic: str) -> None:
    succeed("topic", "alter", topic, "--queues", "4")
    fill(mq, topic, 4)
    succeed("consume", topic, "--group", f"g_{topic}", "--max", "1")
    command = [HEADRACE, "topic", "alter", topic, "--queues", "2", "--shrink", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as shrinking:
        assert shrinking.stderr is not None
        assert "keys go to other queues" in shrinking.stderr.readline()
        assert f"holds 1 message that group g_{topic} has not" in shrinking.stderr.readline()
        (row,) = succeed("topic", "describe", topic, "--json").json()["brokers"]
        assert (row["write_queues"], row["read_queues"]) == (2, 4)
        succeed("consume", topic, "--group", f"g_{topic}")
        out, _ = shrinking.communicate(timeout=TIMEOUT_S)
    (row,) = json.loads(out)
    assert (row["write_queues"], row["read_queues"]) == (2, 2)


def test_list_shows_what_a_topic_holds(topic: str) -> None:
    succeed("topic", "alter", topic, "--queues", "2")
    succeed("send", topic, stdin=b"1\n2\n3\n")
    last = max(
        message["store_time"] for message in succeed("consume", topic, "--json").json_lines()
    )
    (row,) = (row for row in succeed("topic", "list", "--json").json() if row["topic"] == topic)
    assert 3 * 90 < row.pop("bytes") < 3 * 120
    assert row == {"topic": topic, "queues": 2, "messages": 3, "last_message": last}


def test_purge_empties_a_topic_and_keeps_its_settings(topic: str) -> None:
    succeed("topic", "alter", topic, "--queues", "3", "--attribute", "message.type=NORMAL")
    before = succeed("topic", "describe", topic, "--json").json()["brokers"]
    succeed("send", topic, stdin=b"1\n2\n3\n")
    assert "add --yes" in fail(2, "topic", "purge", topic)
    assert len(succeed("consume", topic).stdout.splitlines()) == 3
    succeed("topic", "purge", topic, "--yes")
    assert succeed("consume", topic).stdout == ""
    assert succeed("topic", "describe", topic, "--json").json()["brokers"] == before
    fail(3, "topic", "purge", "nowhere", "--yes")


@pytest.mark.slow
def test_a_group_is_described_and_deleted(topic: str) -> None:
    group = f"group_{topic}"
    succeed("send", topic, stdin=b"1\n2\n3\n")
    member = ("consume", topic, "--group", group, "--tag", "*")
    succeed(*member, "--max", "2")
    description = succeed("group", "describe", group, "--json").json()
    assert (description["group"], description["members"]) == (group, [])
    assert description["settings"]["retries_max"] == 16
    (row,) = [row for row in description["topics"] if row["topic"] == topic]
    assert (row["queues"], row["lag"]) == (1, 1)
    assert "group" in succeed("group", "describe", group).stdout

    with subprocess.Popen([HEADRACE, *member, "--follow"], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"3\n"
        description = succeed("group", "describe", group, "--json").json()
        (row,) = [row for row in description["topics"] if row["topic"] == topic]
        assert (len(description["members"]), row["tag"]) == (1, "*")
        assert "has connected members" in fail(1, "group", "delete", group, "--yes")
        running.terminate()
    succeed("group", "delete", group, "--yes")
    for command in ("describe", "delete", "lag"):
        options = ("--yes",) if command == "delete" else ()
        assert f"group {group} does not exist" in fail(3, "group", command, group, *options)


@pytest.mark.slow
def test_lag_has_a_total_and_is_watched(topic: str) -> None:
    group = f"group_{topic}"
    succeed("send", topic, stdin=b"1\n2\n3\n")
    succeed("consume", topic, "--group", group, "--max", "1")
    watch = ("group", "lag", group, "--topic", topic)
    assert succeed(*watch).stderr == "total lag 2 in 1 queue\n"
    with subprocess.Popen([HEADRACE, *watch, "--watch"], stderr=subprocess.PIPE) as watching:
        assert watching.stderr is not None
        assert watching.stderr.readline() == b"total lag 2 in 1 queue\n"
        succeed("consume", topic, "--group", group)
        while (line := watching.stderr.readline()) != b"total lag 0 in 1 queue\n":
            assert line
        watching.send_signal(signal.SIGINT)
        assert watching.wait(TIMEOUT_S) == 130


def test_settings_of_a_running_broker() -> None:
    (row,) = succeed("broker", "config", "get", "fileReservedTime", "--json").json()
    assert row == {"broker": "broker-a", "id": 0, "name": "fileReservedTime", "value": "72"}
    assert len(succeed("broker", "config", "get").rows()) > 20
    (row,) = succeed("broker", "config", "set", "fileReservedTime=48", "--json").json()
    assert row["value"] == "48"
    succeed("broker", "config", "set", "fileReservedTime=72", "--broker", "broker-a")
    assert "no setting nonsense" in fail(3, "broker", "config", "get", "nonsense")
    assert "no broker named b" in fail(3, "broker", "config", "get", "--broker", "b")
    fail(1, "broker", "config", "set", "storePathRootDir=/elsewhere")
    assert "write NAME=VALUE" in fail(2, "broker", "config", "set", "fileReservedTime")


def test_describe_warns_of_queues_that_are_only_written(mq: Embedded, topic: str) -> None:
    with blocking.Admin(nameserver=mq.nameserver) as admin:
        admin.alter_topic(topic, queues=4, read_queues=2)
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


def test_contexts(mq: Embedded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HEADRACE_NAMESERVER")
    assert "no contexts" in succeed("context", "list").stderr
    succeed("context", "add", "here", mq.nameserver)
    succeed("context", "add", "away", "127.0.0.1:1;127.0.0.1:2")
    succeed("context", "use", "away")
    assert "cannot connect to 127.0.0.1:1" in fail(3, "cluster")
    succeed("context", "use", "here")
    assert succeed("cluster").rows()
    assert succeed("context", "list", "--json").json() == [
        {
            "context": "away",
            "in_use": False,
            "nameserver": "127.0.0.1:1;127.0.0.1:2",
            "tls": False,
            "user": None,
        },
        {
            "context": "here",
            "in_use": True,
            "nameserver": mq.nameserver,
            "tls": False,
            "user": None,
        },
    ]
    assert "has no context other" in fail(3, "context", "use", "other")
    assert "is not a name for a context" in fail(2, "context", "add", "a b", "a:1")
    assert "is not an address" in fail(2, "context", "add", "c", "nowhere")


def test_contexts_with_users(mq: Embedded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HEADRACE_NAMESERVER")
    password = tmp_path / "alice.pw"
    password.write_text("hidden")
    password.chmod(0o644)
    named = ("context", "add", "here", mq.nameserver, "--user", "alice")
    assert "chmod 600" in fail(2, *named, "--password-file", str(password))
    password.chmod(0o600)
    succeed(*named, "--password-file", str(password))
    succeed("context", "use", "here")
    # This cluster has no users, so that everybody is welcome.
    assert succeed("cluster").rows()
    listed = succeed("context", "list", "--json")
    assert [row["user"] for row in listed.json()] == ["alice"]
    assert "needs --user" in fail(2, "context", "add", "c", "a:1", "--password-file", str(password))


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
        (("message", "query", "t", "k", "--since", "5"), 2, "'5' is not a time: write a time"),
        (("message", "query", "t", "k", "--since", "2h", "--until", "3h"), 2, "swap them"),
        (("send", "t", "body", "--file", "x"), 2, "cannot be combined with options for rows"),
        (("send", "t", "body", "--body-file", "x"), 2, "BODY cannot be combined"),
        (("send", "t", "body", "-p", "name"), 2, "property 'name': write NAME=VALUE"),
        (("consume", "t", "--from", "1h", "--tail", "1"), 2, "--tail cannot be combined"),
        (("consume", "t", "--follow", "--until", "1h"), 2, "--until cannot be combined"),
        (("consume", "t", "--group", "g", "--key", "k"), 2, "cannot be combined with --group"),
        (("consume", "t", "--format", "%z"), 2, "format '%z' has '%z'; known are %t topic"),
        (("consume", "t", "--format", "a\\"), 2, "has '\\\\'"),
        (("send", "t", "--key", "k"), 2, "for rows, use --key-column"),
        (("send", "t", "--file", "/nowhere/x.csv"), 3, "/nowhere/x.csv: No such file"),
        (("send", "t", "--key-column", "k"), 2, "lines have no columns"),
        (("send", "t", ""), 2, "0 bytes"),
        (("send", "a b"), 2, "'a b' is not a valid topic name"),
        (("topic", "create", "t", "--perm", "x"), 2, "'x' is not one of 'r', 'w', 'rw'"),
        (("topic", "create", "t", "--attribute", "x"), 2, "NAME=VALUE"),
        (("topic", "create", "t", "--broker", "no"), 2, "no broker named no"),
        (("topic", "alter", "nowhere", "--perm", "r"), 3, "topic nowhere"),
        (("topic", "alter", "t"), 2, "nothing to change"),
        (("topic", "alter", "t", "--perm", "r", "--shrink"), 2, "--shrink requires --queues"),
        (("cluster", "--nameserver", "http://ns:1"), 2, "write ns:1, without http://"),
        (("cluster", "--nameserver", "a:1,b:2"), 2, "separate addresses by semicolons"),
        (("consume", "t", "--from", "first"), 2, "'first' is not a position"),
        (("group", "reset", "g", "t", "--to", "last"), 2, "'last' is not a position"),
        (("cluster", "--nameserver", "nowhere"), 2, "'nowhere' is not an address"),
        (("cluster", "--nameserver", "127.0.0.1:1"), 3, "cannot connect to 127.0.0.1:1"),
        (("send", "t", "x", "-n", "127.0.0.1:1"), 3, "cannot connect to 127.0.0.1:1"),
        (("broker", "-c", "/nowhere/broker.conf"), 2, "/nowhere/broker.conf"),
        (("broker",), 2, "Missing option '--config'"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(
    arguments: tuple[str, ...], exit_code: int, words: str
) -> None:
    # A young nameserver expects more brokers.
    assert words in fail(exit_code, *arguments, patience=Patience(give_up_s=0))


def test_only_a_key_of_a_compacted_topic_has_spaces() -> None:
    succeed("topic", "create", "spaced")
    assert "query one of the parts: 'a' or 'b'" in fail(2, "message", "query", "spaced", "a b")


@pytest.mark.parametrize(
    "arguments",
    [
        ("topic", "list"),
        ("cluster",),
        ("send", "t", "x"),
        ("consume", "t"),
        ("consume", "t", "--group", "g"),
    ],
)
def test_a_broker_in_place_of_a_nameserver_is_named(
    arguments: tuple[str, ...], mq: Embedded
) -> None:
    message = fail(3, *arguments, "--nameserver", mq.broker)
    assert message == (
        f"headrace: {mq.broker}: this is not a nameserver, but perhaps a broker; fix the address\n"
    )


class _WebServer(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class _OneByOne(HTTPServer):
    """A server of one client at a time."""

    def handle_error(self, *_: object) -> None:
        pass  # a client that has gone


class _AllAtOnce(ThreadingMixIn, _OneByOne):
    daemon_threads = True


@pytest.mark.slow
@pytest.mark.parametrize("kind", [_OneByOne, _AllAtOnce])
def test_a_web_server_in_place_of_a_nameserver_is_named(kind: type[HTTPServer]) -> None:
    with kind(("127.0.0.1", 0), _WebServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        message = fail(3, "topic", "list", "--nameserver", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert "this port speaks HTTP, so it is not a nameserver" in message


def test_wrong_usage_is_exit_code_2() -> None:
    outcome = headrace("topic", "create")
    assert outcome.exit_code == 2
    assert "Missing argument 'TOPIC'" in outcome.stderr
    assert headrace("no-such-command").exit_code == 2
    assert "Did you mean '--json'? See `headrace consume -h`" in fail(2, "consume", "t", "--jsn")


def test_a_reader_without_a_group_is_no_group_to_list(topic: str) -> None:
    succeed("send", topic, "one")
    succeed("consume", topic)
    names = [group["group"] for group in succeed("group", "list", "--json").json()]
    assert not [name for name in names if name.startswith("headrace_")]
    assert "headrace_reader" in succeed("group", "list", "--system").stdout


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
    checked = succeed("nameserver", "--log-level", "INFO", "--check-config").stderr
    warning, told = checked.splitlines()
    assert warning.startswith("headrace: kvConfigPath is not set: a restart forgets which brokers")
    assert told == "default settings: valid, nameserver on 127.0.0.1:9876"


def test_a_bug_keeps_its_traceback() -> None:
    bug = ExceptionGroup("tasks", [ConfigurationError("bad"), ZeroDivisionError()])
    with pytest.raises(ExceptionGroup) as raised:
        report(bug)
    assert raised.value is bug


def test_check_config_names_file_line_and_key(tmp_path: Path) -> None:
    good = tmp_path / "good.conf"
    good.write_text(f"brokerName=b\nstorePathRootDir={tmp_path}/store\n")
    outcome = succeed("broker", "-c", str(good), "--check-config")
    assert f"{good} is valid: broker b on 127.0.0.1:10911, store {tmp_path}/store" in outcome.stderr
    assert "namesrvAddr is not set, so no client will find this broker" in outcome.stderr
    good.write_text("brokerName=b\nnamesrvAddr=127.0.0.1:9876\n")
    assert "namesrvAddr" not in succeed("broker", "-c", str(good), "--check-config").stderr
    bad = tmp_path / "bad.conf"
    bad.write_text("brokerName=b\nbrokerNmae=c\nlistenPort=many\n")
    outcome = headrace("broker", "-c", str(bad), "--check-config")
    assert (outcome.exit_code, outcome.stderr.splitlines()) == (
        2,
        [
            f"headrace: {bad}:2: unknown key brokerNmae: did you mean brokerName?",
            f"headrace: {bad}:3: listenPort=many: expected a whole number",
        ],
    )
    assert not (tmp_path / "store").exists()
    namesrv = tmp_path / "namesrv.conf"
    namesrv.write_text("listenPort=9876\nlisten=1\n")
    assert f"{namesrv}:2" in fail(2, "nameserver", "-c", str(namesrv), "--check-config")
