"""consumerOrderInfo.json: batches of orderly POPs go from one broker to the other and back."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from headrace_broker.store.errors import StoreFormatError
from headrace_protocol import fastjson
from tests.support.pop_broker import INVISIBLE_MS, PopBroker, bodies
from tests.support.stores import crash

NAME = "store/config/consumerOrderInfo.json"


def broker_with(folder: Path, table: dict[str, Any] | None = None, **fields: Any) -> PopBroker:
    """A broker with messages 0 to 4 in a queue, on a store that another one has written."""
    if table is not None:
        (folder / NAME).parent.mkdir(parents=True, exist_ok=True)
        (folder / NAME).write_text(json.dumps({"table": table, **fields}))
    broker = PopBroker(folder, commit_log_file_bytes=1 << 16)
    for number in range(5):
        broker.store_message("T", 0, b"%d" % number)
    return broker


def entry(broker_ms: int, **fields: Any) -> dict[str, Any]:
    return {
        "popTime": broker_ms,
        "i": INVISIBLE_MS,
        "o": [0, 1, 2],
        "ot": None,
        "oc": {"0": 1},
        "l": broker_ms,
        "cm": 0,
        "a": "attempt",
        **fields,
    }


def written(folder: Path) -> Any:
    return fastjson.loads((folder / NAME).read_bytes())


@pytest.fixture
def now_ms(tmp_path: Path) -> int:
    return PopBroker(tmp_path / "other").clock.ms


MALFORMED: tuple[dict[str, Any], ...] = (
    {"popTime": "soon"},
    {"popTime": -1},
    {"popTime": 2**63},
    {"i": 2**64},
    {"o": [-1, 2]},
    {"o": [0, 2**63 - 1]},
    {"o": list(range(65))},
    {"ot": {"1": 2**63}},
    {"oc": {"1": -1}},
    {"oc": {"1": 2**31}},
    {"cm": 2**64},
)


@pytest.mark.parametrize(
    ("fields", "first", "later"),
    [
        ({}, [], b"01234"),
        ({"cm": 0b001}, [], b"1234"),
        ({"cm": 0b110}, [], b"01234"),
        ({"cm": 0b111}, [b"3", b"4"], b""),
        ({"o": [0, 3]}, [], b"01234"),
        ({"o": [3]}, [], b"34"),
        ({"o": []}, [b"0", b"1", b"2", b"3", b"4"], b""),
        ({"o": [5, -1]}, [b"0", b"1", b"2", b"3", b"4"], b""),
        ({"i": 0, "cm": 1}, [b"1", b"2", b"3", b"4"], b""),
        ({"i": 0, "ot": {"1": 1_700_000_009_000}}, [], b"01234"),
        ({"i": -1, "cm": 1}, [b"1", b"2", b"3", b"4"], b""),
        ({"ot": {"9": 2**62}, "oc": {str(9 + n): n for n in range(99)}}, [], b"01234"),
        *[(fields, [b"0", b"1", b"2", b"3", b"4"], b"") for fields in MALFORMED],
    ],
)
def test_what_another_broker_gave_out_stays_out(
    tmp_path: Path, now_ms: int, fields: dict[str, Any], first: list[bytes], later: bytes
) -> None:
    committed = 3 if fields.get("cm") == 0b111 else None
    broker = broker_with(tmp_path, {"T@g": {"0": entry(now_ms, **fields)}})
    if committed:
        broker.offsets.commit("g", "T", 0, committed)
    assert bodies(broker.taken(order=True)) == first
    if not first:
        broker.clock.ms += INVISIBLE_MS
        assert bodies(broker.taken(order=True)) == [later[n : n + 1] for n in range(len(later))]


def test_an_attempt_goes_on_at_the_other_broker(tmp_path: Path, now_ms: int) -> None:
    broker = broker_with(tmp_path, {"T@g": {"0": entry(now_ms)}})
    answer = broker.pop(order=True, attempt_id="attempt", max_msg_nums=3)
    assert answer.command.ext()["orderCountInfo"] == "0 qo0%0 1;0 0 0"


@pytest.mark.parametrize("name", ["gone@g", "T", "@", "T@" + "g" * 256])
def test_entries_of_nothing_are_passed(tmp_path: Path, now_ms: int, name: str) -> None:
    broker = broker_with(tmp_path, {name: {"0": entry(now_ms)}})
    assert len(broker.taken(order=True)) == 5


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"table": {"T@g": 5}}', '{"table": {"T@g": {"x": {}}}}']
)
def test_a_damaged_file_is_no_empty_one(tmp_path: Path, text: str) -> None:
    broker = broker_with(tmp_path, {})
    (tmp_path / NAME).write_text(text)
    with pytest.raises(StoreFormatError, match=r"consumerOrderInfo\.json"):
        _ = broker.pop_parts


def test_a_stop_leaves_the_file_to_the_other_broker(tmp_path: Path, now_ms: int) -> None:
    """With all that this one does not know."""
    table = {"T@g": {"0": entry(now_ms, more=7), "1": entry(now_ms)}}
    broker = broker_with(tmp_path, table, other="kept")
    broker.clock.ms += INVISIBLE_MS
    (_, first), (_, second), _ = broker.taken(order=True, max_msg_nums=3, attempt_id="mine")
    broker.ack(second)
    broker.change(first, 1000)
    broker.pop_parts.finish()
    fields = written(tmp_path)
    assert fields["other"] == "kept"
    assert fields["table"] == {
        "T@g": {
            0: {
                "popTime": broker.clock.ms,
                "i": INVISIBLE_MS,
                "o": [0, 1, 2],
                "ot": {0: broker.clock.ms + 1000},
                "oc": {0: 2, 1: 1, 2: 1},
                "l": broker.clock.ms,
                "cm": 0b10,
                "a": "mine",
                "more": 7,
            }
        }
    }


def test_the_log_of_pops_knows_better_than_our_file(tmp_path: Path) -> None:
    broker = broker_with(tmp_path)
    handles = [handle for _, handle in broker.taken(order=True, max_msg_nums=3)]
    broker.pop_parts.order_infos.save()
    for handle in handles:
        broker.ack(handle)
    crash(broker.store)
    broker.pop_parts.log.close()
    broker = PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    assert bodies(broker.taken(order=True)) == [b"3", b"4"]


@pytest.mark.parametrize("same", [True, False])
def test_the_other_brokers_file_knows_better_than_our_log(tmp_path: Path, same: bool) -> None:
    broker = broker_with(tmp_path)
    broker.taken(order=True, max_msg_nums=3)
    broker.pop_parts.finish()
    fields = written(tmp_path)
    del fields["headrace"]  # as the other one drops what it does not know
    (batch,) = fields["table"]["T@g"].values()
    batch["cm"] = 0b001
    batch["popTime"] += not same
    (tmp_path / NAME).write_bytes(fastjson.dumps(fields, strict=True))
    crash(broker.store)
    broker = PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    assert broker.progress() == 1
    assert broker.taken(order=True) == []
    assert written(tmp_path)["headrace"] is True
    broker.clock.ms += INVISIBLE_MS + 1
    assert bodies(broker.taken(order=True)) == [b"1", b"2", b"3", b"4"]


def test_what_is_out_without_an_order_stays_out(tmp_path: Path) -> None:
    broker = broker_with(tmp_path)
    (_, handle), *_ = broker.taken()
    table = {"T@g": {0: entry(broker.clock.ms)}}
    (tmp_path / NAME).write_bytes(fastjson.dumps({"table": table}, strict=True))
    crash(broker.store)
    broker.pop_parts.log.close()
    broker = PopBroker(tmp_path, clock=broker.clock, commit_log_file_bytes=1 << 16)
    broker.ack(handle)
    assert broker.taken(order=True, attempt_id="attempt") == []
    broker.clock.ms += INVISIBLE_MS
    broker.revive()
    assert bodies(broker.taken()) == [b"1", b"2", b"3", b"4"]


async def test_the_file_follows_while_the_broker_runs(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    broker = broker_with(tmp_path)
    infos = broker.pop_parts.order_infos
    async with trio.open_nursery() as nursery:
        nursery.start_soon(infos.run)
        await trio.sleep(6)
        assert not (tmp_path / NAME).exists()
        broker.taken(order=True)
        await infos.save_in_thread()
        nursery.cancel_scope.cancel()
    assert list(written(tmp_path)["table"]) == ["T@g"]


async def test_a_failed_save_is_tried_again(tmp_path: Path) -> None:
    broker = broker_with(tmp_path)
    broker.taken(order=True)
    infos = broker.pop_parts.order_infos
    folder = tmp_path / "store/config"
    folder.rename(tmp_path / "away")
    folder.write_text("in the way")
    with pytest.raises(OSError, match=os.strerror(errno.ENOTDIR)):
        await infos.save_in_thread()
    folder.unlink()
    (tmp_path / "away").rename(folder)
    await infos.save_in_thread()
    assert list(written(tmp_path)["table"]) == ["T@g"]
