"""``headrace kv`` against a real broker."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import headrace
from headrace.embedded import Embedded
from tests.support.cli import fail, succeed
from tests.support.cli import headrace as run
from tests.support.processes import HEADRACE, TIMEOUT_S

pytestmark = pytest.mark.usefixtures("environment")


@pytest.mark.parametrize("option", [[], ["--compacted"]], ids=["plain", "compacted"])
def test_what_was_put_is_there_until_it_is_deleted(option: list[str]) -> None:
    topic = f"kv{len(option)}"
    succeed("topic", "create", topic, "--queues", "1", *option)
    put = succeed("kv", "put", topic, "colour", "blue", "--json").json()
    assert put == {
        "topic": topic,
        "key": "colour",
        "broker": "broker-a",
        "queue": 0,
        "queue_offset": 0,
    }
    assert succeed("kv", "get", topic, "colour").stdout == "blue\n"
    succeed("kv", "put", topic, "colour", stdin=b"light\nblue")
    assert succeed("kv", "get", topic, "colour", "--json").json() == {
        "key": "colour",
        "value": "light\nblue",
    }
    succeed("kv", "delete", topic, "colour")
    assert f"table {topic} has no key 'colour'" in fail(3, "kv", "get", topic, "colour")


def test_a_dump_can_be_loaded(topic: str, tmp_path: Path) -> None:
    succeed("kv", "put", topic, "b", "2")
    succeed("kv", "put", topic, "a", stdin=b"\xff")
    succeed("kv", "put", topic, "gone", "3")
    succeed("kv", "delete", topic, "gone")
    dump = succeed("kv", "dump", topic).stdout
    assert [json.loads(line) for line in dump.splitlines()] == [
        {"key": "a", "value_base64": "/w=="},
        {"key": "b", "value": "2"},
    ]
    copy = f"{topic}-copy"
    succeed("topic", "create", copy)
    file = tmp_path / "dump.ndjson"
    file.write_text(dump + '\n{"key": "b", "value": null}\n')
    assert succeed("kv", "load", copy, str(file), "--json").json() == {"topic": copy, "keys": 3}
    assert succeed("kv", "dump", copy).json_lines() == [{"key": "a", "value_base64": "/w=="}]
    succeed("kv", "load", copy, stdin=dump.encode())
    assert succeed("kv", "dump", copy).stdout == dump


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "Input data was truncated"),
        ("[]", 'expected {"key": "...", "value": "..."}'),
        ('{"key": "a"}', 'expected {"key": "...", "value": "..."}'),
        ('{"key": " ", "value": "x"}', "blank"),
        ('{"key": 1, "value": "x"}', "not a text"),
        ('{"key": "a", "value": ""}', "null deletes the key"),
        ('{"key": "a", "value": 1}', "neither a text nor null"),
        ('{"key": "a", "value_base64": "?"}', "is not base64"),
        ('{"key": "a\\u0001", "value": "x"}', "byte 1 or 2"),
    ],
)
def test_an_invalid_line_ends_the_load(topic: str, row: str, reason: str) -> None:
    lines = f'{{"key": "a", "value": "1"}}\n{row}\n{{"key": "b", "value": "2"}}\n'
    error = fail(1, "kv", "load", topic, stdin=lines.encode())
    assert "standard input:2: " in error
    assert reason in error
    assert "Lines loaded before it: 1" in error
    assert succeed("kv", "dump", topic).json_lines() == [{"key": "a", "value": "1"}]


def test_watch_prints_values_and_changes(topic: str) -> None:
    succeed("kv", "put", topic, "a", "1\t2")
    succeed("kv", "put", topic, "b", "2")
    succeed("kv", "delete", topic, "b")
    lines = succeed("kv", "watch", topic, "--all", "--max", "2").stdout.splitlines()
    assert [line.split("\t")[1:] for line in lines] == [["put", "a", "1\\t2"], ["delete", "b", ""]]
    first, second = succeed("kv", "watch", topic, "--all", "--max", "2", "--json").json_lines()
    assert (first["key"], first["value"]) == ("a", "1\t2")
    assert first["store_time"].endswith("Z")
    assert (second["key"], second["value"]) == ("b", None)


@pytest.mark.slow
def test_watch_begins_with_the_next_change(topic: str, mq: Embedded) -> None:
    succeed("kv", "put", topic, "a", "old")
    command = [HEADRACE, "kv", "watch", topic, "--max", "1", "-n", mq.nameserver]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        with headrace.blocking.Table(topic, nameserver=mq.nameserver) as table:
            number = 0
            while watching.poll() is None:
                table.put("b", b"%d" % (number := number + 1))
        assert watching.stdout is not None
        assert watching.stdout.read().split("\t")[1:3] == ["put", "b"]
        assert watching.wait(TIMEOUT_S) == 0


def test_a_missing_topic_is_named() -> None:
    for words in (["get", "a"], ["put", "a", "1"], ["dump"], ["watch"]):
        outcome = run("kv", words[0], "no-such-topic", *words[1:])
        # For a young nameserver the topic may exist, and so may the key.
        is_unknown = words[0] == "get" and "may yet register" in outcome.stderr
        assert outcome.exit_code == (1 if is_unknown else 3)
        assert "no-such-topic" in outcome.stderr
