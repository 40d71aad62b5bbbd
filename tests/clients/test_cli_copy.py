"""Copies of topics: to another topic, to another cluster, to a file and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace import Message
from headrace import Producer as AsyncProducer
from headrace.admin import copying
from headrace.admin.failures import CommandFailed
from headrace.blocking import Producer
from headrace.consumer.pull import PullConsumer
from headrace.errors import NoQueue
from tests.support.cli import fail, headrace, succeed
from tests.support.running_brokers import brokers_in_thread

_numbers = count()
KEYS = 5


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("copy")
    with (
        brokers_in_thread(folder / "old", ["a", "b"]) as old,
        brokers_in_thread(folder / "new", ["c"]) as new,
    ):
        yield old, new


@pytest.fixture(autouse=True)
def environment(clusters: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, address in zip(("old", "new"), clusters, strict=True):
        succeed("context", "add", name, address)
    succeed("context", "use", "old")


@pytest.fixture
def names(clusters: tuple[str, str]) -> tuple[str, str]:
    """A topic with messages of all kinds, and one without."""
    return with_messages(clusters)


@pytest.fixture(scope="module")
def unchanged(clusters: tuple[str, str]) -> tuple[str, str]:
    """As ``names``, for tests that write to neither."""
    return with_messages(clusters)


def with_messages(clusters: tuple[str, str]) -> tuple[str, str]:
    source, target = create_topics(clusters)
    send(clusters[0], source, range(40))
    return source, target


def create_topics(clusters: tuple[str, str]) -> tuple[str, str]:
    number = next(_numbers)
    source, target = f"source_{number}", f"target_{number}"
    for address in clusters:
        succeed("topic", "create", source, "--queues", "2", "-n", address)
        succeed("topic", "create", target, "--queues", "3", "-n", address)
    return source, target


def send(nameserver: str, topic: str, numbers: range, keys: int = KEYS) -> None:
    with Producer(nameserver=nameserver) as producer:
        for number in numbers:
            key = f"key{number % keys}" if keys and number % 2 else ""
            properties = {"colour": "grün", "number": str(number)}
            producer.send(Message(topic, b"\xff%d" % number, key, f"tag{number % 3}", properties))


def contents(topic: str, *options: str) -> list[dict[str, Any]]:
    return succeed("consume", topic, "--json", *options).json_lines()


def essence(message: dict[str, Any]) -> tuple[Any, ...]:
    return (
        message["properties"]["number"],
        message["properties"]["colour"],
        message["body_base64"],
        message["key"],
        message["tag"],
    )


def check_copies(source: str, target: str, *options: str) -> None:
    """The target has each message once, its key's messages in order, and where they are from."""
    originals, copies = contents(source), contents(target, *options)
    assert sorted(map(essence, copies)) == sorted(map(essence, originals))
    known = {each["message_id"]: each for each in originals}
    for copy in copies:
        original = known[copy["properties"]["origin_message_id"]]
        assert essence(copy) == essence(original)
        assert copy["properties"]["origin_born_time"] == original["born_time"]
        assert copy["properties"]["origin_store_time"] == original["store_time"]
    for key in {each["key"] for each in copies} - {None}:
        of_key = [each for each in copies if each["key"] == key]
        numbers = [int(each["properties"]["number"]) for each in of_key]
        assert numbers == sorted(numbers)


def test_a_copy_has_all_fields_and_continues(names: tuple[str, str], clusters: Any) -> None:
    source, target = names
    outcome = succeed("topic", "copy", source, target, "--json")
    assert outcome.json()["messages"] == 40
    assert f"headrace group delete copy_{source}_{target}" in outcome.stderr
    check_copies(source, target)
    assert succeed("topic", "copy", source, target, "--json").json()["messages"] == 0
    send(clusters[0], source, range(40, 45))
    assert succeed("topic", "copy", source, target, "--json").json()["messages"] == 5
    check_copies(source, target)


@pytest.mark.parametrize("keys", [KEYS, 0])
def test_a_copy_that_fails_repeats_what_is_not_stored(clusters: Any, keys: int) -> None:
    source, target = create_topics(clusters)
    send(clusters[0], source, range(40), keys)
    succeed("topic", "alter", target, "--perm", "r")
    consumer = PullConsumer(f"copy_{source}_{target}", start="earliest")
    hasty = AsyncProducer(delivery_timeout_ms=0)
    with pytest.raises(NoQueue, match="has no queue to write to"):
        trio.run(copying.copy_topic, consumer, hasty, source, target)
    succeed("topic", "alter", target, "--perm", "rw")
    assert succeed("topic", "copy", source, target, "--json").json()["messages"] == 40
    check_copies(source, target)


def test_a_copy_repeats_what_came_after_its_end(names: tuple[str, str], clusters: Any) -> None:
    source, target = names
    more = [range(40, 44)]

    class LateConsumer(PullConsumer):
        """Begins to read after more messages were sent."""

        async def assign(self, *queues: Any) -> None:
            while more:
                await trio.to_thread.run_sync(send, clusters[0], source, more.pop())
            await super().assign(*queues)

    late = LateConsumer(f"copy_{source}_{target}", start="earliest")
    first = trio.run(copying.copy_topic, late, AsyncProducer(), source, target)
    assert first < 44
    second = succeed("topic", "copy", source, target, "--json").json()["messages"]
    assert first + second == 44
    check_copies(source, target)


def test_a_copy_to_another_cluster(names: tuple[str, str], clusters: Any) -> None:
    source, target = names
    copied = succeed("topic", "copy", source, target, "--from", "old", "--to", "new", "--json")
    assert copied.json()["messages"] == 40
    check_copies(source, target, "-n", clusters[1])
    assert contents(target) == []


def test_a_missing_topic_is_named(unchanged: tuple[str, str]) -> None:
    source, target = unchanged
    assert "has topic nowhere" in fail(3, "topic", "copy", source, "nowhere")
    assert "has topic nowhere" in fail(3, "topic", "copy", "nowhere", target)
    assert contents(target) == []


def test_an_interrupted_export_is_continued(
    names: tuple[str, str], clusters: Any, tmp_path: Path
) -> None:
    source, _ = names
    file = tmp_path / "out.jsonl"
    assert succeed("topic", "export", source, str(file), "--json").json()["messages"] == 40
    whole = file.read_bytes()
    assert sorted(whole.splitlines()) == sorted(
        succeed("consume", source, "--json").stdout.encode().splitlines()
    )
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:25]) + lines[25][:30])
    assert succeed("topic", "export", source, str(file), "--json").json()["messages"] == 15
    assert sorted(file.read_bytes().splitlines()) == sorted(whole.splitlines())
    send(clusters[0], source, range(40, 43))
    assert succeed("topic", "export", source, str(file), "--json").json()["messages"] == 3


@pytest.mark.parametrize(
    "before",
    [
        b"notes without a line end",
        b"notes\n",
        b'{"topic":"b","broker":"a","queue":0,"queue_offset":9}\n',
    ],
    ids=["unended", "notes", "another topic"],
)
def test_an_export_leaves_a_file_with_other_contents_alone(
    unchanged: tuple[str, str], tmp_path: Path, before: bytes
) -> None:
    file = tmp_path / "out.jsonl"
    file.write_bytes(before)
    assert f"{file}:1: " in fail(1, "topic", "export", unchanged[0], str(file))
    assert file.read_bytes() == before


def test_an_export_of_an_earlier_topic_of_the_name_is_not_continued(
    unchanged: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    row = {"topic": unchanged[1], "broker": "a", "queue": 0, "queue_offset": 9}
    file.write_text(json.dumps(row) + "\n")
    found = fail(2, "topic", "export", unchanged[1], str(file))
    assert "offset 10 of a/0, which ends at 0" in found


@pytest.mark.parametrize("now", [b"", b"x" * 50, b"nonsense"])
def test_progress_of_another_file_is_named(
    unchanged: tuple[str, str], tmp_path: Path, now: bytes
) -> None:
    file, progress = tmp_path / "in.jsonl", tmp_path / f"in.jsonl.{unchanged[1]}.imported"
    file.write_bytes(now)
    progress.write_text("40")
    assert f"{progress} is about another file" in fail(
        1, "topic", "import", unchanged[1], str(file)
    )


def test_a_topic_is_not_copied_to_itself(unchanged: tuple[str, str]) -> None:
    assert "the same topic" in fail(2, "topic", "copy", unchanged[0], unchanged[0])
    assert len(contents(unchanged[0])) == 40


def test_an_import_is_continued(names: tuple[str, str], tmp_path: Path) -> None:
    source, target = names
    file = tmp_path / "out.jsonl"
    succeed("topic", "export", source, str(file))
    lines = file.read_bytes().splitlines(keepends=True)
    for other in (b"{}\n", lines[21].replace(source.encode(), b"\xff")):
        file.write_bytes(b"".join(lines[:21]) + other)
        with pytest.raises(CommandFailed, match=r"out\.jsonl:22: not a line of"):
            trio.run(partial(copying.import_file, AsyncProducer(), file, target, at_once=7))
    assert len(contents(target)) == 21
    file.write_bytes(b"".join(lines))
    assert succeed("topic", "import", target, str(file), "--json").json()["messages"] == 19
    check_copies(source, target)
    assert succeed("topic", "import", target, str(file), "--json").json()["messages"] == 0


def test_what_consume_prints_can_be_imported(names: tuple[str, str]) -> None:
    source, target = names
    printed = succeed("consume", source, "--json").stdout.encode()
    assert headrace("topic", "import", target, "-", stdin=printed).exit_code == 0
    check_copies(source, target)


def test_a_copy_of_a_copy_names_the_first(names: tuple[str, str], clusters: Any) -> None:
    source, target = names
    succeed("topic", "copy", source, target)
    succeed("topic", "copy", target, target, "--to", "new")
    check_copies(source, target, "-n", clusters[1])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": "codec missing"}, "was unreadable: codec missing"),
        ({"body": ""}, "a body of 0 bytes"),
        ({"body_base64": "?"}, "body_base64 is malformed"),
        ({"body": "x", "tag": "a\x01b"}, "tag"),
    ],
)
def test_a_line_that_is_no_message_is_named(
    unchanged: tuple[str, str], tmp_path: Path, row: dict[str, str], reason: str
) -> None:
    file = tmp_path / "in.jsonl"
    place = {"broker": "a", "queue": 1, "queue_offset": 7}
    file.write_text(json.dumps(place | row) + "\n")
    found = fail(1, "topic", "import", unchanged[1], str(file))
    assert f"{file}:1: " in found
    assert reason in found


async def test_a_pace_limits_the_rate(autojump_clock: object) -> None:
    pace, began = copying.Pace(100), trio.current_time()
    for _ in range(11):
        await pace.wait(50)
    assert trio.current_time() - began == pytest.approx(5)
    unlimited, began = copying.Pace(None), trio.current_time()
    await unlimited.wait(10**9)
    assert trio.current_time() == began
