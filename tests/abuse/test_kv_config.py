"""Key-value settings: bounded, and never written by the loop that serves everybody."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_daemon import saved_table
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command
from headrace_protocol.drivers.files import replace_file
from headrace_protocol.nameserver_headers import (
    GetKVConfigResponseHeader,
    KVKeyHeader,
    PutKVConfigHeader,
)
from tests.support.channel import MemoryChannel
from tests.support.nameserver import NameServerUnderTest, frame

PUT, GET = RequestCode.PUT_KV_CONFIG, RequestCode.GET_KV_CONFIG


def put(server: NameServerUnderTest, key: str, value: str = "v", namespace: str = "n") -> Command:
    return server.ask(PUT, PutKVConfigHeader(namespace=namespace, key=key, value=value))[0]


def get(server: NameServerUnderTest, key: str) -> str | None:
    command, _ = server.ask(GET, KVKeyHeader(namespace="n", key=key))
    if command.code == ResponseCode.QUERY_NOT_FOUND:
        return None
    return command.header(GetKVConfigResponseHeader).value


class Threads:
    """Work handed to threads, done when the test says so."""

    def __init__(self, server: NameServerUnderTest) -> None:
        self.asked: list[tuple[Callable[[], None], Callable[[Exception | None], None]]] = []
        server.registry.run_fetch = lambda _, wait, then: self.asked.append((wait.fetch, then))

    def finish(self) -> None:
        asked, self.asked = self.asked, []
        for fetch, _ in asked:
            fetch()
        for _, then in asked:
            then(None)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The contents written to files."""
    written: list[bytes] = []

    def count(path: Path, data: bytes) -> None:
        written.append(data)
        replace_file(path, data)

    monkeypatch.setattr(saved_table, "replace_file", count)
    return written


def ask_together(
    server: NameServerUnderTest, threads: Threads, *keys: str
) -> list[list[tuple[Command, bytes]]]:
    """Put values, each on its own connection; returns the answers."""
    channels = [MemoryChannel() for _ in keys]
    for channel, key in zip(channels, keys, strict=True):
        header = PutKVConfigHeader(namespace="n", key=key, value="v")
        assert server.take(frame(PUT, header), channel) == []
    threads.finish()
    return [channel.replies() for channel in channels]


def test_changes_are_written_together_in_a_thread(tmp_path: Path, writes: list[bytes]) -> None:
    server = NameServerUnderTest(kv_config_path=tmp_path / "kv.json")
    threads = Threads(server)
    answers = ask_together(server, threads, *"abc")
    assert [reply[0].code for ((reply),) in answers] == [0, 0, 0]
    assert len(writes) == 1
    assert json.loads(writes[0]) == {"configTable": {"n": {"a": "v", "b": "v", "c": "v"}}}
    assert get(server, "c") == "v"


def test_a_change_is_invisible_until_it_is_on_disk(tmp_path: Path, writes: list[bytes]) -> None:
    server = NameServerUnderTest(kv_config_path=tmp_path / "kv.json")
    threads = Threads(server)
    header = PutKVConfigHeader(namespace="n", key="k", value="v")
    server.take(frame(PUT, header), MemoryChannel())
    assert (get(server, "k"), writes) == (None, [])
    threads.finish()
    assert (get(server, "k"), len(writes)) == ("v", 1)


def test_the_changes_of_a_client_are_made_in_order(tmp_path: Path) -> None:
    server = NameServerUnderTest(kv_config_path=tmp_path / "kv.json")
    threads = Threads(server)
    values = [PutKVConfigHeader(namespace="n", key="k", value=str(n)) for n in range(5)]
    server.take(b"".join(frame(PUT, header) for header in values))
    while threads.asked:
        assert len(threads.asked) == 1
        threads.finish()
    assert [reply.code for reply, _ in server.channel.replies()] == [0] * 5
    assert get(server, "k") == "4"


def test_a_failed_write_fails_all_that_it_was_for(tmp_path: Path) -> None:
    server = NameServerUnderTest(kv_config_path=tmp_path / "file" / "kv.json")
    (tmp_path / "file").write_bytes(b"")
    threads = Threads(server)
    answers = ask_together(server, threads, *"ab")
    assert [reply[0].code for ((reply),) in answers] == [ResponseCode.SERVICE_NOT_AVAILABLE] * 2
    assert get(server, "a") is None
    (tmp_path / "file").unlink()
    ((answer,),) = ask_together(server, threads, "c")
    assert answer[0].code == ResponseCode.SUCCESS
    assert json.loads((tmp_path / "file" / "kv.json").read_bytes()) == {
        "configTable": {"n": {"c": "v"}}
    }


def test_a_change_without_effect_is_not_written(tmp_path: Path, writes: list[bytes]) -> None:
    server = NameServerUnderTest(kv_config_path=tmp_path / "kv.json")
    put(server, "k")
    put(server, "k")
    server.ask(RequestCode.DELETE_KV_CONFIG, KVKeyHeader(namespace="n", key="other"))
    assert len(writes) == 1


@pytest.mark.parametrize(("bound", "most"), [("items_max", 3), ("chars_max", 9)])
def test_all_values_together_are_bounded(bound: str, most: int) -> None:
    server = NameServerUnderTest(kv_limits={bound: most})
    codes = [
        put(server, key, namespace=namespace).code
        for key, namespace in zip("abcd", "nnmm", strict=True)
    ]
    assert codes == [0, 0, 0, ResponseCode.INVALID_PARAMETER]
    server.ask(RequestCode.DELETE_KV_CONFIG, KVKeyHeader(namespace="n", key="a"))
    assert put(server, "d").code == ResponseCode.SUCCESS


def test_the_longest_texts_are_kept() -> None:
    server = NameServerUnderTest()
    assert put(server, "k" * 255, "v" * 64 * 1024, "n" * 255).code == ResponseCode.SUCCESS


def test_a_placed_link_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "kv.json.tmp").symlink_to(victim)
    server = NameServerUnderTest(kv_config_path=tmp_path / "kv.json")
    assert put(server, "k").code == ResponseCode.SUCCESS
    assert victim.read_bytes() == b"precious"
    assert (tmp_path / "kv.json").stat().st_mode & 0o777 == 0o600
