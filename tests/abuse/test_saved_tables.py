"""Requests whose tables can't be written, or could be written but not read back."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog.testing
import trio
import trio.testing

from headrace_broker.persistence import SavedFile, TableText
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import ConfigFile, is_whole
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.broker.consumer.test_subscriptions import open_groups
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.running import in_background


def policy(depth: int) -> bytes:
    """A retry policy that nests ``depth`` levels."""
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


def policy_with_key(depth: int) -> bytes:
    """The same with objects as keys at the innermost levels."""
    return b'{"a":' * (depth - 4) + b"{{1:1}:1}" + b"}" * (depth - 4)


@pytest.mark.parametrize("field", [b"groupRetryPolicy", b"subscriptionDataSet"])
@pytest.mark.parametrize("depth", [9, 64, 600])
def test_a_policy_that_nests_deeper_than_eight_levels_is_rejected(
    broker: BrokerUnderTest, field: bytes, depth: int
) -> None:
    value = policy(depth) if field == b"groupRetryPolicy" else b"[" + policy(depth - 1) + b"]"
    body = b'{"groupName":"deep","%s":%s}' % (field, value)
    answer = broker.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert f"{field.decode()} of group deep nests more than 8 levels deep" in answer.remark
    assert broker.groups.get("deep") is None


def test_keys_count_as_levels_too(broker: BrokerUnderTest) -> None:
    body = b'{"groupName":"deep","groupRetryPolicy":%s}' % policy_with_key(12)
    answer = broker.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "nests more than 8 levels deep" in answer.remark


def test_a_policy_of_eight_levels_is_there_after_a_restart(tmp_path: Path) -> None:
    groups = open_groups(tmp_path)
    for name, text in (("a", policy(8)), ("b", policy_with_key(6))):
        body = b'{"groupName":"%s","groupRetryPolicy":%s}' % (name.encode(), text)
        groups.put(SubscriptionGroupConfig.decode(body))
    assert list(open_groups(tmp_path).all()) == list(groups.all())


# -- files that can't be read ----------------------------------------------------------------------


def damaged(folder: Path, *names: str) -> None:
    """Files that an older broker saved: nested too deep to be read."""
    text = b'{"subscriptionGroupTable":{"g":{"groupRetryPolicy":%s}}}'
    for name in names:
        (folder / name).write_bytes(text % policy_with_key(5000))


def test_a_start_with_an_unreadable_file_takes_its_backup(tmp_path: Path) -> None:
    groups = open_groups(tmp_path)
    groups.put(SubscriptionGroupConfig(group_name="kept"))
    (tmp_path / "subscriptionGroup.json").rename(tmp_path / "subscriptionGroup.json.bak")
    damaged(tmp_path, "subscriptionGroup.json")
    assert open_groups(tmp_path).get("kept") is not None


def test_a_start_without_a_readable_file_names_it_and_the_way_out(tmp_path: Path) -> None:
    damaged(tmp_path, "subscriptionGroup.json", "subscriptionGroup.json.bak")
    with pytest.raises(StoreFormatError) as error:
        open_groups(tmp_path)
    assert str(tmp_path / "subscriptionGroup.json") in str(error.value)
    assert "put a good copy in its place" in str(error.value)


# -- tables that can't be written ------------------------------------------------------------------


class Entry(msgspec.Struct):
    value: Any


def too_deep() -> Entry:
    value: dict[Any, Any] = {}
    for _ in range(70):
        value = {1: value}
    return Entry(value)


def test_an_entry_that_could_not_be_read_back_is_never_written() -> None:
    text = TableText()
    text.text({"good": Entry({"a": 1})})
    with pytest.raises(ValueError, match=r"^poison can't be encoded: .*64 levels"):
        text.text({"good": Entry({"a": 1}), "poison": too_deep()})


class Broken:
    """A table whose text can't be made until ``problem`` is gone."""

    def __init__(self, folder: Path) -> None:
        self.problem: Exception | None = RecursionError("maximum recursion depth exceeded")
        self.saved = SavedFile(ConfigFile(folder / "table.json"), self._snapshot)

    def _snapshot(self) -> Callable[[], bytes]:
        return self._text

    def _text(self) -> bytes:
        if self.problem:
            raise self.problem
        return b"{}"


async def test_an_unexpected_error_refuses_the_change_and_leaves_the_service_running(
    tmp_path: Path,
) -> None:
    table = Broken(tmp_path)
    table.saved.unexpected_retry_s = 0.001
    told: list[Exception | None] = []
    async with in_background(table.saved.run):
        await trio.testing.wait_all_tasks_blocked()
        with structlog.testing.capture_logs() as lines:
            table.saved.changed()
            table.saved.when_saved(told.append)
            await table.saved.wait_saved()
        assert told == [table.problem]
        assert lines[0]["event"] == "table not saved, retrying"
        assert lines[0]["exc_info"] is table.problem
        assert table.saved.unexpected_errors >= 1
        table.problem = None
        with trio.fail_after(5):
            while not (tmp_path / "table.json").exists():  # noqa: ASYNC110 - nobody is told
                await trio.sleep(0.001)


async def test_the_refusal_names_the_entry(broker: BrokerUnderTest) -> None:
    broker.groups._groups["poison"] = SubscriptionGroupConfig(group_retry_policy=too_deep().value)
    channel = MemoryChannel()
    async with in_background(broker.groups.saved.run):
        await trio.testing.wait_all_tasks_blocked()
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        broker.send(code, None, b'{"groupName":"other"}', channel)
        await broker.groups.saved.wait_saved()
    ((answer, _),) = channel.replies()
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "poison can't be encoded" in (answer.remark or "")


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item", [b'"":1,', b'"\\"{":"",', b'{{"a":1}:2},', b'"' + b"x" * 70_000 + b'",']
)
def test_checking_a_file_takes_little_more_memory_than_the_file(item: bytes) -> None:
    data = b"{" + item * (2_000_000 // len(item)) + b"}"
    tracemalloc.start()
    try:
        assert is_whole(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(data) + 5_000_000
