"""The table of static topics: its file, its mark, and topics whose mapping can't be used."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_broker.statictopic import table as table_module
from headrace_broker.statictopic.queue_life import TRANSITIONS, Claim, Event, State
from headrace_broker.statictopic.table import MAPPING_NAME, MappingTable
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import ConfigFile, unsealed
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.statictopic.mapping import MappingItem, TopicMapping, encode_detail
from headrace_protocol.statictopic.mapping_file import entry_text
from headrace_protocol.statictopic.offsets import index_of
from tests.support.broker import BrokerUnderTest
from tests.support.golden import STORES, copy_golden_store
from tests.support.static_brokers import TOPIC, Brokers, item
from tests.support.wire import pull_header, send_header

CHAIN = (
    MappingItem(bname="broker-b", gen=0, queue_id=3, logic_offset=0, end_offset=12),
    MappingItem(bname="broker-a", gen=2, queue_id=1, logic_offset=10_000, time_of_start=7),
    MappingItem(bname="broker-c", gen=3, queue_id=0, logic_offset=20_000),
)
LED = (MappingItem(bname="broker-a", gen=0, queue_id=0, logic_offset=0),)


def mapping(topic: str = "T", epoch: int = 1000, bname: str = "broker-a") -> TopicMapping:
    return TopicMapping(
        topic=topic, bname=bname, epoch=epoch, total_queues=4, hosted={1: LED, 3: CHAIN}
    )


def table_in(folder: Path) -> MappingTable:
    return MappingTable("broker-a", ConfigFile(folder / "config" / MAPPING_NAME), lambda: 5000)


def mark(table: MappingTable, topic: str) -> None:
    table.marks.add(topic, "static-1")


def test_a_mapping_knows_its_queues() -> None:
    ours = mapping()
    assert ours.led() == {1: 0}
    assert ours.logic_queues() == {0: 1, 1: 3}
    assert ours.undecided() == []
    assert [ours.chain(queue) for queue in (-1, 0, 3, 4)] == [None, None, CHAIN, None]
    assert [index_of(CHAIN, at) for at in (0, 9999, 10_000, 19_999, 20_000)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("store", STORES)
def test_the_peers_file_is_written_back_byte_for_byte(tmp_path: Path, store: str) -> None:
    root = copy_golden_store(store, tmp_path / "store")
    path = root / "config" / MAPPING_NAME
    before = path.read_bytes()
    table = table_in(root)
    assert table.leads("G_STATIC", 3) == 3
    table.saved.changed()
    assert unsealed(path.read_bytes()) == before


def test_changes_are_there_after_a_restart(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    table.put(mapping())
    mark(table, "T")
    again = table_in(tmp_path)
    found = again.get("T")
    assert found is not None
    assert found == mapping()
    assert again.data_version == table.data_version
    assert again.data_version.counter == 1
    assert (again.leads("T", 1), again.leads("T", 3), again.leads("T", 0)) == (0, None, None)
    again.remove("T")
    assert table_in(tmp_path).get("T") is None


CLAIM = Claim(2000, "broker-b")
TO_REACH = {
    State.SERVING: None,
    State.BEGINNING: Event.BEGIN,
    State.OPENING: Event.OPEN,
    State.FENCED: Event.CLAIM,
}
# A claim ends only with a newer mapping.
TO_SERVING = {
    State.SERVING: {*Event} - {Event.BEGIN, Event.OPEN, Event.CLAIM},
    State.BEGINNING: {Event.SAVED, Event.ABANDON, Event.LOSE},
    State.OPENING: {Event.SAVED, Event.LOSE},
    State.FENCED: {Event.RENEW, Event.LOSE},
}


@pytest.mark.parametrize(("state", "event"), [*itertools.product(State, Event)])
def test_a_queue_is_led_unless_it_is_stopped(tmp_path: Path, state: State, event: Event) -> None:
    table = table_in(tmp_path)
    table.put(mapping())
    if (before := TO_REACH[state]) is not None:
        assert table.apply("T", 1, before, CLAIM)
    assert table.state("T", 1) is state
    after = TRANSITIONS[state, event]
    assert table.apply("T", 1, event, CLAIM) is (after is not state)
    assert table.state("T", 1) is after
    is_led = event in TO_SERVING[state]
    assert (after is State.SERVING) is is_led
    assert (table.leads("T", 1) == 0) is is_led
    assert table.led("T") == ({1: 0} if is_led else {})
    assert table.led_count() == is_led
    assert (table.stopped("T", 1) is None) is is_led
    # The chain that another broker leads has no state here.
    assert table.leads("T", 3) is None


def test_a_mapping_ends_older_claims(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    table.put(mapping())
    calls: list[int] = []
    table.subscribe(lambda: calls.append(table.change_count))
    table.apply("T", 1, Event.CLAIM, CLAIM)
    assert table.stopped("T", 1) == (
        "broker broker-b leads it since epoch 2000; if it should not, repair the topic"
    )
    table.put(mapping(epoch=2000))
    assert table.leads("T", 1) is None
    table.apply_to_all("T", Event.SAVED)
    assert table.leads("T", 1) is None
    table.put(mapping(epoch=2001))
    assert table.leads("T", 1) == 0
    table.apply("T", 1, Event.OPEN)
    table.remove("T")
    assert table.state("T", 1) is State.SERVING
    assert len(calls) == 4


def lost(folder: Path) -> None:
    (folder / "config" / MAPPING_NAME).unlink()


def torn(folder: Path) -> None:
    path = folder / "config" / MAPPING_NAME
    path.write_bytes(path.read_bytes()[:99])
    path.with_name(MAPPING_NAME + ".bak").write_bytes(b"{")


def copied(folder: Path) -> None:
    other = MappingTable("broker-b", ConfigFile(folder / "b" / "config" / MAPPING_NAME), lambda: 1)
    other.put(mapping(bname="broker-b"))
    (folder / "b" / "config" / MAPPING_NAME).replace(folder / "config" / MAPPING_NAME)


def with_a_hole(folder: Path) -> None:
    path = folder / "config" / MAPPING_NAME
    text = unsealed(path.read_bytes())
    assert text.count(b'"gen":2') == 1
    path.write_bytes(text.replace(b'"gen":2', b'"gen":0'))


@pytest.mark.parametrize("damage", [lost, torn, copied, with_a_hole])
def test_a_topic_whose_mapping_is_unusable_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "store"
    table = table_in(folder)
    table.put(mapping())
    mark(table, "T")
    damage(folder)
    broken = table_in(folder)
    assert broken.get("T") is None
    assert broken.is_static("T")
    assert broken.leads("T", 1) is None
    with pytest.raises(RequestError, match=r"topic\[T\] is static.*broker-a.*topic repair T"):
        broken.check_usable("T")
    broken.check_usable("PLAIN")

    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T", 4)
    header = send_header(1)
    answer = broker.ask(RequestCode.SEND_MESSAGE_V2, header, b"body")
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "topic[T] is static" in answer.remark


def test_another_name_of_the_broker_serves_nothing_until_it_is_changed_back(tmp_path: Path) -> None:
    brokers = Brokers(tmp_path, "a")
    brokers.map((item("a", 0, 0),))
    brokers.send("a", b"0")
    brokers.close()
    config = brokers["a"].config
    other = BrokerUnderTest(tmp_path / "a", config.model_copy(update={"broker_name": "broker-new"}))
    for code, header in (
        (RequestCode.SEND_MESSAGE_V2, send_header()),
        (RequestCode.PULL_MESSAGE, pull_header(0)),
    ):
        answer = other.ask(code, header, b"body")
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "topic[T] is static" in answer.remark
        assert "broker-a" in answer.remark
    other.close()
    again = brokers["a"] = BrokerUnderTest(tmp_path / "a", config)
    assert again.store.queue(TOPIC, 0).next_offset == 1
    assert brokers.send("a", b"1") == (0, 1)
    assert brokers.read_all("a") == [(0, b"0"), (1, b"1")]


def test_an_unusable_mapping_stays_in_the_file(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    table.put(mapping())
    copied(tmp_path)
    broken = table_in(tmp_path)
    broken.put(mapping("NEW"))
    path = tmp_path / "config" / MAPPING_NAME
    assert b'"bname":"broker-b"' in path.read_bytes()
    again = table_in(tmp_path)
    assert again.get("NEW") is not None
    assert again.unusable().keys() == {"T"}


def test_a_damaged_file_is_kept_when_it_is_replaced(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    table.put(mapping())
    mark(table, "T")
    torn(tmp_path)
    path = tmp_path / "config" / MAPPING_NAME
    damaged = path.read_bytes()
    table_in(tmp_path).put(mapping("NEW"))
    assert path.with_name(MAPPING_NAME + ".damaged").read_bytes() == damaged


def test_a_mark_that_is_lost_twice_stops_the_start(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    mark(table, "T")
    mark(table, "U")
    for name in ("staticTopic.json", "staticTopic.json.bak"):
        (tmp_path / "config" / name).write_bytes(b"{")
    with pytest.raises(StoreFormatError, match="staticTopic"):
        table_in(tmp_path)


def test_what_is_written_in_answers(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    table.put(mapping())
    detail = table.detail("T")
    assert detail is not None
    assert b"".join(detail.parts) == encode_detail(mapping(), strict=True)
    assert table.detail("PLAIN") is None


def test_only_changed_entries_are_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_in(tmp_path)
    for number in range(3):
        table.put(mapping(f"T{number}"))
    encoded: list[str] = []

    def count(one: TopicMapping) -> bytes:
        encoded.append(one.topic)
        return entry_text(one)

    monkeypatch.setattr(table_module, "entry_text", count)
    table.put(mapping("T1", epoch=2000))
    assert encoded == ["T1"]
