"""The route table: rules one by one, then any history against a plain model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_nameserver.routes import BROKER_TIMEOUT_MS, RouteTable
from headrace_protocol.bodies import QueueData, TopicConfig, TopicRouteData
from headrace_protocol.departed import Departure
from headrace_protocol.errors import RequestError
from headrace_protocol.nameserver_headers import RegisterBrokerHeader
from headrace_protocol.registration import RegisterBrokerBody
from headrace_protocol.statictopic.mapping import MappingInfo
from tests.support.channel import MemoryChannel
from tests.support.nameserver import broker_topics, register_body, register_header

CHANNEL = MemoryChannel()


def register(
    table: RouteTable, *topics: TopicConfig | str, version: int = 1, now_ms: int = 0, **header: Any
) -> Any:
    return put(table, register_header(**header), register_body(*topics, version=version), now_ms)


def put(
    table: RouteTable,
    header: RegisterBrokerHeader,
    body: RegisterBrokerBody,
    now_ms: int = 0,
    channel: MemoryChannel = CHANNEL,
) -> Any:
    return table.register(header, broker_topics(header, body), channel, now_ms)


def unregister(table: RouteTable, name: str, address: str, now_ms: int = 0) -> bool:
    return table.unregister(name, address, CHANNEL, now_ms)


def route(table: RouteTable, topic: str) -> TopicRouteData:
    found = table.route(topic)
    assert found is not None
    return found


def addresses(table: RouteTable, topic: str) -> dict[str, dict[int, str]]:
    return {b.broker_name: b.broker_addrs for b in route(table, topic).broker_datas}


def perms(table: RouteTable, topic: str) -> dict[str, int]:
    return {queues.broker_name: queues.perm for queues in route(table, topic).queue_datas}


# -- registering -----------------------------------------------------------------------------------


def test_a_registered_topic_has_a_route() -> None:
    table = RouteTable()
    config = TopicConfig(topic_name="T", read_queue_nums=3, write_queue_nums=2, topic_sys_flag=1)
    assert register(table, config, "U", zone_name="z") is None
    found = route(table, "T")
    assert found.queue_datas == [
        QueueData(broker_name="b0", read_queue_nums=3, write_queue_nums=2, perm=6, topic_sys_flag=1)
    ]
    (broker,) = found.broker_datas
    assert (broker.cluster, broker.broker_addrs) == ("c0", {0: "127.0.0.1:10911"})
    assert (broker.zone_name, broker.enable_acting_master) == ("z", False)
    assert found.topic_queue_mapping_by_broker is None
    assert table.route("V") is None


def test_a_first_registration_of_one_topic_is_refused() -> None:
    table = RouteTable()
    with pytest.raises(RequestError, match=r"b0 \(127.0.0.1:10911\) is not registered yet"):
        register(table, "T")
    assert list(table.topics()) == []
    assert table.cluster_info().broker_addr_table == {}
    register(table)
    register(table, "T", version=2)
    assert list(table.topics()) == ["T"]
    with pytest.raises(RequestError, match="not registered yet"):
        register(table, "T", broker_id=1, address="s:1")


def test_topics_are_merged_when_the_version_changed() -> None:
    table = RouteTable()
    register(table, "T", "U")
    wide = TopicConfig(topic_name="T", write_queue_nums=99)
    register(table, wide)
    assert route(table, "T").queue_datas[0].write_queue_nums == 16
    register(table, wide, version=2)
    assert route(table, "T").queue_datas[0].write_queue_nums == 99
    register(table, "V", version=2)  # unknown here: taken whatever the version
    assert list(table.topics()) == ["T", "U", "V"]


def test_a_slave_registers_no_topics_and_learns_its_master() -> None:
    table = RouteTable()
    assert register(table, "S1", "S2", broker_id=1, address="s:1") is None
    assert list(table.topics()) == []
    register(table, "T", "U")
    master = register(table, "S1", "S2", broker_id=1, address="s:1", version=2)
    assert (master.address, master.ha_address) == ("127.0.0.1:10911", "127.0.0.1:10912")
    assert list(table.topics()) == ["T", "U"]
    assert addresses(table, "T") == {"b0": {0: "127.0.0.1:10911", 1: "s:1"}}


def test_a_slave_that_became_master_leaves_its_old_id() -> None:
    table = RouteTable()
    register(table, "T", "U")
    register(table, broker_id=1, address="s:1")
    unregister(table, "b0", "127.0.0.1:10911")
    register(table, "T", "U", broker_id=0, address="s:1", version=2)
    assert addresses(table, "T") == {"b0": {0: "s:1"}}


def test_an_address_belongs_to_one_broker() -> None:
    table = RouteTable()
    register(table, "T", "U")
    register(table, "T", "V", name="b1")
    assert addresses(table, "T") == {"b1": {0: "127.0.0.1:10911"}}
    assert table.route("U") is None
    (departed,) = table.departed.with_topic("U")
    assert (departed.name, departed.how) == ("b0", Departure.RENAMED)


def test_no_state_takes_the_place_of_a_live_broker() -> None:
    table = RouteTable()
    register(table, "T", "U")
    body = register_body("T", "U")
    body.topic_config_serialize_wrapper.data_version.state_version = 2**63 - 1
    with pytest.raises(
        RequestError, match=r"b0 with id 0 cannot register x:1 .* 127.0.0.1:10911 fr"
    ):
        put(table, register_header(address="x:1"), body)
    assert addresses(table, "T") == {"b0": {0: "127.0.0.1:10911"}}
    unregister(table, "b0", "127.0.0.1:10911")
    put(table, register_header(address="x:1"), body)
    assert addresses(table, "T") == {"b0": {0: "x:1"}}


def test_a_broker_may_change_its_cluster() -> None:
    table = RouteTable()
    register(table, "T", "U")
    register(table, "V", "W", name="b1", address="b:1")
    register(table, "T", "U", cluster_name="c1")
    assert table.cluster_info().cluster_addr_table == {"c1": ["b0"], "c0": ["b1"]}
    assert list(table.topics("c1")) == ["T", "U"]
    assert list(table.topics("c2")) == []
    assert table.system_topics() == ["c1", "c0", "b0", "b1"]


# -- acting masters --------------------------------------------------------------------------------


def test_the_smallest_slave_acts_as_a_master_for_reading() -> None:
    table = RouteTable(support_acting_master=True)
    for broker_id, address in ((0, "m:1"), (2, "s:2"), (1, "s:1")):
        topics = ("T", "rmq_sys_SYNC_BROKER_MEMBER_b0") if broker_id == 0 else ()
        register(table, *topics, broker_id=broker_id, address=address, enable_acting_master=True)
    assert perms(table, "T") == {"b0": 6}
    assert addresses(table, "T") == {"b0": {0: "m:1", 1: "s:1", 2: "s:2"}}
    unregister(table, "b0", "m:1", 0)
    assert perms(table, "T") == {"b0": 4}
    assert addresses(table, "T") == {"b0": {0: "s:1", 2: "s:2"}}
    assert addresses(table, "rmq_sys_SYNC_BROKER_MEMBER_b0") == {"b0": {1: "s:1", 2: "s:2"}}
    register(table, "T", "N", broker_id=1, address="s:1", enable_acting_master=True, version=2)
    assert perms(table, "N") == {"b0": 4}
    register(table, "T", "N", address="m:1", enable_acting_master=True, version=3)
    assert perms(table, "T") == perms(table, "N") == {"b0": 6}


def test_a_slave_does_not_act_unless_both_sides_allow_it() -> None:
    for table, allowed in ((RouteTable(), True), (RouteTable(support_acting_master=True), False)):
        register(table, "T", "U", enable_acting_master=allowed)
        register(table, broker_id=1, address="s:1", enable_acting_master=allowed)
        unregister(table, "b0", "127.0.0.1:10911", 0)
        assert addresses(table, "T") == {"b0": {1: "s:1"}}


# -- leaving ---------------------------------------------------------------------------------------


def test_a_silent_broker_is_dropped_and_named() -> None:
    table = RouteTable(broker_timeout_ms=1000)
    assert table.next_expiry_ms() is None
    register(table, "T", "U", now_ms=50)
    header: dict[str, Any] = {"name": "b1", "address": "b:1", "heartbeat_timeout_millis": 400}
    register(table, "T", "W", now_ms=50, **header)
    assert table.next_expiry_ms() == 450
    assert table.expire(449) == []
    assert [live.name for live in table.expire(450)] == ["b1"]
    table.heartbeat("127.0.0.1:10911", 800)
    table.heartbeat("nobody:1", 800)
    assert table.route_age_ms(route(table, "T"), 1000) == 200
    assert [live.name for live in table.expire(1800)] == ["b0"]
    assert table.route("T") is None
    assert table.cluster_info().broker_addr_table == {}
    assert [
        (each.name, each.address, each.how, each.since_ms)
        for each in table.departed.with_topic("T")
    ] == [
        ("b0", "127.0.0.1:10911", Departure.SILENT, 800),
        ("b1", "b:1", Departure.SILENT, 50),
    ]
    assert table.departed.with_topic("V") == []
    register(table, "U", "V", now_ms=2000)
    assert [each.name for each in table.departed.with_topic("T")] == ["b1"]


def test_nonsense_timeouts_do_not_count() -> None:
    table = RouteTable()
    for timeout_ms in (0, -5, None):
        register(table, "T", "U", heartbeat_timeout_millis=timeout_ms)
        assert table.next_expiry_ms() == BROKER_TIMEOUT_MS


def test_a_closed_channel_drops_what_it_registered_last() -> None:
    table = RouteTable()
    old, new = MemoryChannel(), MemoryChannel()
    put(table, register_header(), register_body("T", "U"), channel=old)
    put(table, register_header(name="b1", address="b:1"), register_body("T", "U"), channel=old)
    put(table, register_header(), register_body("T", "U"), channel=new)
    assert [live.name for live in table.close_channel(old, 7)] == ["b1"]
    assert addresses(table, "T") == {"b0": {0: "127.0.0.1:10911"}}
    assert table.close_channel(old, 7) == []
    assert [live.name for live in table.close_channel(new, 8)] == ["b0"]
    assert [(each.name, each.since_ms) for each in table.departed.with_topic("T")] == [
        ("b0", 8),
        ("b1", 7),
    ]


def test_unregistering_asks_for_the_right_name() -> None:
    table = RouteTable()
    register(table, "T", "U")
    assert not unregister(table, "b1", "127.0.0.1:10911", 0)
    assert not unregister(table, "b0", "other:1", 0)
    assert unregister(table, "b0", "127.0.0.1:10911", 0)
    assert not unregister(table, "b0", "127.0.0.1:10911", 0)
    assert list(table.topics()) == []


# -- the rest --------------------------------------------------------------------------------------


def test_static_topics_are_kept_and_returned() -> None:
    table = RouteTable()
    info = MappingInfo(topic="T", bname="b0", total_queues=2, curr_id_map={0: 0})
    body = register_body("T", "U")
    body.topic_config_serialize_wrapper.topic_queue_mapping_info_map = {"T": info}
    put(table, register_header(), body)
    assert route(table, "T").topic_queue_mapping_by_broker == {"b0": info}
    assert route(table, "U").topic_queue_mapping_by_broker is None
    register(table, "T", "U", name="b1", address="b:1")
    assert route(table, "T").topic_queue_mapping_by_broker == {"b0": info}
    unregister(table, "b0", "127.0.0.1:10911", 0)
    assert route(table, "T").topic_queue_mapping_by_broker is None
    put(table, register_header(), body)
    table.delete_topic("T")
    register(table, "T", "U", version=2)
    assert route(table, "T").topic_queue_mapping_by_broker is None


def test_write_permission_is_wiped_and_given() -> None:
    table = RouteTable()
    register(table, "T", "U")
    register(table, "T", "U", name="b1", address="b:1")
    assert table.wipe_write_perm("b0") == 2
    assert perms(table, "T") == {"b0": 4, "b1": 6}
    assert table.add_write_perm("b0") == 2
    assert perms(table, "T") == {"b0": 6, "b1": 6}
    assert table.wipe_write_perm("nobody") == 0


def test_topics_are_deleted_by_cluster_or_everywhere() -> None:
    table = RouteTable()
    register(table, "T", "U")
    register(table, "T", "U", name="b1", address="b:1", cluster_name="c1")
    table.delete_topic("T", "c1")
    assert list(addresses(table, "T")) == ["b0"]
    table.delete_topic("T", "nowhere")
    assert list(addresses(table, "T")) == ["b0"]
    table.delete_topic("T", "c0")
    table.delete_topic("unknown")
    assert table.route("T") is None
    unregister(table, "b0", "127.0.0.1:10911", 0)
    unregister(table, "b1", "b:1", 0)
    assert [each.name for each in table.departed.with_topic("U")] == ["b1", "b0"]
    table.delete_topic("U")
    assert table.departed.with_topic("U") == []


def test_topics_can_be_added_to_brokers_that_are_there() -> None:
    table = RouteTable()
    register(table, "T", "U")
    table.register_topic("N", [QueueData(broker_name="b0", perm=6)])
    assert list(addresses(table, "N")) == ["b0"]
    with pytest.raises(RequestError, match="topic N: broker b9 is not registered here"):
        table.register_topic("N", [QueueData(broker_name="b9")])
    table.register_topic("M", [])
    assert list(table.topics()) == ["T", "U", "N"]


def test_unit_topics_go_by_flag() -> None:
    table = RouteTable()
    flags = {"NONE": 0, "UNIT": 1, "SUB": 2, "BOTH": 3}
    register(table, *(TopicConfig(topic_name=t, topic_sys_flag=f) for t, f in flags.items()))
    assert list(table.unit_topics(unit=True)) == ["UNIT", "BOTH"]
    assert list(table.unit_topics(unit_sub=True)) == ["SUB", "BOTH"]
    assert list(table.unit_topics(unit=False, unit_sub=True)) == ["SUB"]


def test_members_of_a_broker() -> None:
    table = RouteTable()
    assert table.any_address() is None
    register(table, "T", "U")
    register(table, broker_id=3, address="s:3")
    group = table.member_group("c0", "b0")
    assert group.broker_addrs == {0: "127.0.0.1:10911", 3: "s:3"}
    assert table.member_group("c0", "b1").broker_addrs == {}
    assert table.any_address() == "127.0.0.1:10911"
    assert table.holder("b0", 3) == "s:3"
    assert table.data_version("s:3") == register_body().topic_config_serialize_wrapper.data_version
    assert table.data_version("s:4") is None


# -- any history -----------------------------------------------------------------------------------


@dataclass
class ModelBroker:
    name: str
    broker_id: int
    version: int
    channel: int
    expires_ms: int


class AnyHistory(RuleBasedStateMachine):
    """Brokers by address, and for each broker name the queues that its master gave each topic."""

    NAMES = st.sampled_from(["b0", "b1"])
    IDS = st.integers(0, 2)
    ADDRESSES = st.sampled_from(["a:1", "a:2", "a:3", "a:4"])
    TOPICS = st.lists(st.sampled_from(["T", "U", "V"]), unique=True)
    CHANNELS = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.table = RouteTable(broker_timeout_ms=100)
        self.channels = [MemoryChannel() for _ in range(3)]
        self.now_ms = 0
        self.brokers: dict[str, ModelBroker] = {}
        self.queues: dict[tuple[str, str], int] = {}  # (topic, broker name) -> queues

    def holder(self, name: str, broker_id: int) -> str | None:
        held = [a for a, b in self.brokers.items() if (b.name, b.broker_id) == (name, broker_id)]
        return held[0] if held else None

    def drop(self, address: str) -> None:
        name = self.brokers.pop(address).name
        if all(broker.name != name for broker in self.brokers.values()):
            self.queues = {key: n for key, n in self.queues.items() if key[1] != name}

    @rule(
        name=NAMES,
        broker_id=IDS,
        address=ADDRESSES,
        topics=TOPICS,
        version=st.integers(1, 2),
        queue_nums=st.integers(1, 3),
        channel=CHANNELS,
        timeout_ms=st.sampled_from([None, 50]),
    )
    def register(
        self,
        name: str,
        broker_id: int,
        address: str,
        topics: list[str],
        version: int,
        queue_nums: int,
        channel: int,
        timeout_ms: int | None,
    ) -> None:
        header = register_header(name, broker_id, address, heartbeat_timeout_millis=timeout_ms)
        configs = [TopicConfig(topic_name=t, write_queue_nums=queue_nums) for t in topics]
        body = register_body(*configs, version=version)
        holder = self.holder(name, broker_id)
        if len(topics) == 1 if holder is None else holder != address:
            with pytest.raises(RequestError):
                put(self.table, header, body, self.now_ms, self.channels[channel])
            return
        put(self.table, header, body, self.now_ms, self.channels[channel])
        before = self.brokers.get(address)
        if before and before.name != name:
            self.drop(address)
            before = None
        changed = holder is None or before is None or before.version != version
        if broker_id == 0:
            for topic in topics:
                if changed or (topic, name) not in self.queues:
                    self.queues[topic, name] = queue_nums
        expires_ms = self.now_ms + (timeout_ms or 100)
        self.brokers[address] = ModelBroker(name, broker_id, version, channel, expires_ms)

    @rule(name=NAMES, address=ADDRESSES)
    def unregister(self, name: str, address: str) -> None:
        there = address in self.brokers and self.brokers[address].name == name
        assert unregister(self.table, name, address, self.now_ms) == there
        if there:
            self.drop(address)

    @rule(channel=CHANNELS)
    def close_channel(self, channel: int) -> None:
        closed = [a for a, b in self.brokers.items() if b.channel == channel]
        gone = self.table.close_channel(self.channels[channel], self.now_ms)
        assert sorted(live.address for live in gone) == sorted(closed)
        for address in closed:
            self.drop(address)

    @rule(delta_ms=st.integers(1, 60))
    def wait(self, delta_ms: int) -> None:
        self.now_ms += delta_ms
        silent = [a for a, b in self.brokers.items() if b.expires_ms <= self.now_ms]
        assert sorted(live.address for live in self.table.expire(self.now_ms)) == sorted(silent)
        for address in silent:
            self.drop(address)

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def delete_topic(self, data: st.DataObject) -> None:
        topic = data.draw(st.sampled_from(sorted({topic for topic, _ in self.queues})))
        self.table.delete_topic(topic)
        self.queues = {key: n for key, n in self.queues.items() if key[0] != topic}

    @invariant()
    def routes_are_those_of_the_model(self) -> None:
        assert set(self.table.topics()) == {topic for topic, _ in self.queues}
        for topic in ("T", "U", "V"):
            found = self.table.route(topic)
            expected = {name: n for (t, name), n in self.queues.items() if t == topic}
            if not expected:
                assert found is None
                continue
            assert found is not None
            assert {q.broker_name: q.write_queue_nums for q in found.queue_datas} == expected
            assert {b.broker_name: b.broker_addrs for b in found.broker_datas} == {
                name: self.addresses(name) for name in expected
            }
            assert 0 <= self.table.route_age_ms(found, self.now_ms) < 100
            assert not {each.name for each in self.table.departed.with_topic(topic)} & set(expected)

    @invariant()
    def brokers_are_those_of_the_model(self) -> None:
        table = self.table.cluster_info().broker_addr_table
        names = {broker.name for broker in self.brokers.values()}
        assert {n: b.broker_addrs for n, b in table.items()} == {
            n: self.addresses(n) for n in names
        }
        expiries = [broker.expires_ms for broker in self.brokers.values()]
        assert self.table.next_expiry_ms() == min(expiries, default=None)

    def addresses(self, name: str) -> dict[int, str]:
        return {b.broker_id: a for a, b in self.brokers.items() if b.name == name}


TestAnyHistory = pytest.mark.slow(AnyHistory.TestCase)
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
