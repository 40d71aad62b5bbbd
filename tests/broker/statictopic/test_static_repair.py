"""A tool killed between any two requests, and a broker with it: repair makes the topic whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from headrace_protocol.admin_headers import CreateStaticTopicHeader, DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.statictopic.checks import BadMapping, check_cluster
from headrace_protocol.statictopic.mapping import encode_detail
from headrace_protocol.statictopic.plans import (
    BrokerTopic,
    Closed,
    InvalidChange,
    Mode,
    NoChange,
    Plan,
    Step,
    plan_create,
    plan_rebalance,
    plan_remap,
)
from headrace_protocol.statictopic.repair import plan_repair
from tests.support.static_brokers import TOPIC
from tests.support.static_brokers import Brokers as StaticBrokers
from tests.support.stores import crash

NAMES = ("broker-a", "broker-b", "broker-c")
A, B, C = NAMES
CHANGES = ("create", "grow", "strict", "available", "rebalance", "repair", "delete")
STEPS_MAX = 12


class Brokers(StaticBrokers):
    """Three brokers and a tool. acked: queue, offset and body of each message they took."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "abc")
        self.acked: list[tuple[int, int, bytes]] = []
        self.now_ms = 1_700_000_000_000

    def found(self) -> dict[str, BrokerTopic]:
        """What a tool reads."""
        return {f"broker-{name}": self._topic(name) for name in self}

    def _topic(self, name: str) -> BrokerTopic:
        topic = self[name].topics.get(TOPIC)
        mapping = self[name].mappings.get(TOPIC)
        return BrokerTopic(
            mapping=mapping,
            read_queues=topic.read_queue_nums if topic else 0,
            write_queues=topic.write_queue_nums if topic else 0,
            is_lost=mapping is None and topic is not None,
        )

    def requests(self, name: str) -> Iterator[None]:
        """Make a change, with a break after each request."""
        if name == "delete":
            for broker in self.values():
                header = DeleteTopicHeader(topic=TOPIC)
                answer = broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, header)
                assert answer.code == ResponseCode.SUCCESS, answer.remark
                yield
            return
        self.now_ms += 10_000
        for broker in self.values():
            broker.clock.ms = self.now_ms
        yield from self._carry_out(self._plan(name))

    def _plan(self, name: str) -> Plan:
        found, now_ms = self.found(), self.now_ms
        if name == "create":
            return plan_create(TOPIC, 4, [A, B], found, now_ms)
        if name == "grow":
            return plan_create(TOPIC, 6, [B, C], found, now_ms)
        if name == "rebalance":
            return plan_rebalance(TOPIC, found, now_ms)
        if name == "repair":
            return plan_repair(TOPIC, found, now_ms)
        mode = Mode.STRICT if name == "strict" else Mode.AVAILABLE
        return plan_remap(TOPIC, [C, B], found, now_ms, mode=mode)

    def _carry_out(self, plan: Plan) -> Iterator[None]:
        epochs = {
            name: topic.mapping.epoch if topic.mapping else 0 for name, topic in plan.before.items()
        }
        for stage in (*plan.claims(), *plan.closing()):
            for step in stage:
                self._change(step, epochs)
                yield
        closed = {queue: self._closed(queue, plan) for queue in plan.closed_items()}
        for stage in plan.final(closed, NAMES):
            for step in stage:
                self._change(step, epochs)
                yield

    def _closed(self, queue: int, plan: Plan) -> Closed:
        item = plan.closed_items()[queue]
        broker = self[item.bname[-1]]
        stored = broker.mappings.get(TOPIC)
        assert stored is not None
        chain = stored.chain(queue) or ()
        physical = broker.store.find_queue(TOPIC, item.queue_id)
        end = physical.next_offset if physical else 0
        return Closed(next((each for each in chain if each.gen == item.gen), item), end)

    def _change(self, step: Step, epochs: dict[str, int]) -> None:
        header = CreateStaticTopicHeader(
            topic=TOPIC,
            default_topic="TBW102",
            read_queue_nums=step.read_queues,
            write_queue_nums=step.write_queues,
            perm=6,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            order=False,
            force=step.force,
            read_epoch=epochs[step.broker],
        )
        code = RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC
        answer = self[step.broker[-1]].ask(code, header, encode_detail(step.mapping))
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        epochs[step.broker] = step.mapping.epoch

    def kill(self, name: str) -> None:
        """Kill a broker, and start it on what its disk has."""
        crash(self[name].store)
        self.start(name)
        self[name].clock.ms = self.now_ms

    def write(self) -> None:
        """A message to each leader of a queue."""
        for name, broker in self.items():
            for queue in broker.mappings.led(TOPIC):
                body = f"{len(self.acked)}".encode()
                _, offset = self.send(name, body, queue)
                self.acked.append((queue, offset, body))

    def check(self) -> None:
        """The topic is whole, and has every message at its offset."""
        mappings = [topic.mapping for topic in self.found().values() if topic.mapping]
        for queue, chain in check_cluster(mappings).items():
            held = dict(self.read_all(chain[-1].bname[-1], queue_id=queue))
            for _, offset, body in (each for each in self.acked if each[0] == queue):
                assert body == held.get(offset) or (offset < 0 and body in held.values()), chain


def prepared(folder: Path, name: str) -> Brokers:
    """Brokers just before a change."""
    brokers = Brokers(folder)
    if name != "create":
        finish(brokers.requests("create"))
        brokers.write()
    if name == "repair":
        next(islice(brokers.requests("strict"), 3, None))  # queues are closed, and not open yet
        brokers.write()
    return brokers


def finish(requests: Iterator[None]) -> int:
    return sum(1 for _ in requests)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dead",
    ["", "a", pytest.param("b", marks=pytest.mark.long), pytest.param("c", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("name", CHANGES)
def test_a_tool_and_a_broker_killed_between_any_two_requests(
    tmp_path: Path, name: str, dead: str
) -> None:
    for sent in range(1, STEPS_MAX):
        brokers = prepared(tmp_path / str(sent), name)
        is_done = len([*islice(brokers.requests(name), sent)]) < sent
        brokers.write()
        if dead:
            brokers.kill(dead)
            brokers.write()
        if name == "delete":
            check_deleted(brokers)
        else:
            with suppress(NoChange):
                finish(brokers.requests("repair"))
            brokers.check()
            with pytest.raises(NoChange):
                finish(brokers.requests("repair"))
        brokers.close()
        if is_done:
            return
    raise AssertionError(f"{name} has more requests than {STEPS_MAX}")


def check_deleted(brokers: Brokers) -> None:
    """A half-done deletion is finished by another; repair says so where messages are gone."""
    with suppress(NoChange):
        led = {queue for topic in brokers.found().values() for queue in led_by(topic)}
        if led == set(range(4)):
            finish(brokers.requests("repair"))
            brokers.check()
        else:
            with pytest.raises((BadMapping, InvalidChange), match=r"topic delete T|not a static"):
                finish(brokers.requests("repair"))
    finish(brokers.requests("delete"))
    assert not any(topic.mapping or topic.is_lost for topic in brokers.found().values())


def led_by(topic: BrokerTopic) -> set[int]:
    return set(topic.mapping.led()) if topic.mapping else set()
