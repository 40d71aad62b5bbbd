"""What is out of one store, opened in turn by headrace and by Apache's broker.

With filters and request modes of groups.
"""

from __future__ import annotations

import time
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from anyio import run

from headrace import Admin, Consumer, Message, Producer, SimpleConsumer
from headrace_protocol import fastjson
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.pop.handle import Handle
from tests.conformance.peer import TIMEOUT_MS, Peer, quick_peer
from tests.conformance.probe import answer
from tests.support.pop_broker import messages_in
from tests.support.until import wait_until

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

GROUP = "swap_poppers"
# Popped as they were sent, and from the group's retry topic.
PLAIN, RETRIED = "swap_pops", "swap_retries"
RETRY_TOPIC = f"%RETRY%{GROUP}_{RETRIED}"
# Popped in order: one batch is out for longer than the test, the other for a changed time.
ORDERED, CHANGED = "swap_orders", "swap_changes"
TOPICS = (PLAIN, RETRIED, ORDERED, CHANGED)
COUNT = 8
INVISIBLE_S = 30
# headrace names what is out in Apache's form at a stop, and before that once it is old.
OLD_INVISIBLE_S = 80
BEFORE_CHANGE_S = 10
# Apache's broker looks for what was not acknowledged every few seconds.
LIMIT_S = 90
QUIET_S = {"apache": 15, "headrace": 5}

# In order: the group's offset stays at 4, where the next batch begins.
ACKED, LEFT, LAST = (0, 1, 2, 3, 6), (4, 5), 7
ACKED_BITS = 0b0100_1111
AGAIN = sorted(
    [f"{topic} {number}" for topic in (PLAIN, RETRIED) for number in range(1, COUNT, 2)]
    + [f"{CHANGED} {number}" for number in range(4, COUNT)]
)

FILTERED_GROUP, FILTER = "swap_filters", "n = 1"
SETTINGS = {"enablePropertyFilter": "true"}
# Files, and where in them the entries of a topic are.
TABLES = {
    "messageRequestMode.json": ("messageRequestModeMap", PLAIN),
    "consumerFilter.json": ("filterDataByTopic", PLAIN, "groupFilterData"),
    "consumerOrderInfo.json": ("table", f"{CHANGED}@{GROUP}"),
}
UNKNOWN = {"unknown": [1]}


async def send(nameserver: str) -> None:
    async with Admin(nameserver=nameserver) as admin:
        for topic in TOPICS:
            await admin.create_topic(topic, queues=1)
    async with Producer(nameserver=nameserver, timeout_ms=TIMEOUT_MS) as producer:
        for topic in TOPICS:
            for number in range(COUNT):
                await producer.send(Message(topic, f"{topic} {number}".encode()))


async def retry(nameserver: str) -> None:
    """Have all messages delivered again, from the retry topic."""
    count = 0
    async with SimpleConsumer(GROUP, RETRIED, nameserver=nameserver) as consumer:
        while count < COUNT:
            for message in await consumer.receive(wait=1):
                count += not message.reconsume_times
                await message.retry(after=1)


async def take(nameserver: str, invisible_s: int, limit_s: float) -> list[str]:
    """The bodies of all messages, of which those with even numbers are acknowledged.

    More that come within a while are in it too.
    """
    bodies: list[str] = []
    end = time.monotonic() + limit_s
    topics = (PLAIN, RETRIED)
    async with SimpleConsumer(GROUP, topics, nameserver=nameserver) as consumer:
        while len(bodies) < len(topics) * COUNT and time.monotonic() < end:
            for message in await consumer.receive(wait=1, invisible=invisible_s):
                assert (message.topic == RETRIED) == (message.reconsume_times > 0)
                bodies.append(message.body.decode())
                if int(bodies[-1][-1]) % 2 == 0:
                    await message.ack()
    return sorted(bodies)


async def take_all(peer: Peer, limit_s: float) -> list[str]:
    """The bodies of all messages that come in a while, and once all are there, in a shorter.

    All are acknowledged.
    """
    bodies: list[str] = []
    end = time.monotonic() + limit_s
    async with SimpleConsumer(GROUP, (PLAIN, RETRIED), nameserver=peer.nameserver) as consumer:
        while time.monotonic() < end:
            for message in await consumer.receive(wait=1, invisible=INVISIBLE_S):
                bodies.append(message.body.decode())
                await message.ack()
            for handle in pop_in_order(peer, CHANGED, INVISIBLE_S, "other").values():
                bodies.append(f"{CHANGED} {handle.queue_offset}")
                ask_about(peer, RequestCode.ACK_MESSAGE, CHANGED, handle)
            if len(bodies) == len(AGAIN):
                end = min(end, time.monotonic() + QUIET_S[peer.name])
    return sorted(bodies)


def pop_in_order(peer: Peer, topic: str, invisible_s: int, attempt: str) -> dict[int, Handle]:
    """The handles of a batch by offset; none while another batch is out."""
    fields = {
        "consumerGroup": GROUP,
        "topic": topic,
        "queueId": "0",
        "maxMsgNums": "32",
        "invisibleTime": f"{1000 * invisible_s}",
        "pollTime": "0",
        "bornTime": f"{time.time_ns() // 1_000_000}",
        "initMode": "0",
        "order": "true",
        "attemptId": attempt,
    }
    got = answer(peer.broker, RequestCode.POP_MESSAGE, fields)
    if got.code == ResponseCode.POLLING_TIMEOUT:
        return {}
    assert got.code == ResponseCode.SUCCESS, got.remark
    return {found.queue_offset: handle for found, handle in messages_in(got.fields, got.body)}


def ask_about(peer: Peer, code: RequestCode, topic: str, handle: Handle, **fields: str) -> None:
    fields |= {"consumerGroup": GROUP, "topic": topic, "queueId": "0"}
    fields |= {"extraInfo": handle.text(), "offset": f"{handle.queue_offset}"}
    got = answer(peer.broker, code, fields)
    assert got.code == ResponseCode.SUCCESS, got.remark


def take_in_order(peer: Peer, topic: str, invisible_s: int) -> dict[int, Handle]:
    """Take all in one batch, and acknowledge some."""
    batch = pop_in_order(peer, topic, invisible_s, "first")
    assert list(batch) == [*range(COUNT)]
    for offset in ACKED:
        ask_about(peer, RequestCode.ACK_MESSAGE, topic, batch[offset])
    return batch


def continue_in_order(peer: Peer, batch: dict[int, Handle]) -> None:
    """Finish the batch that the other broker gave out."""
    assert pop_in_order(peer, ORDERED, INVISIBLE_S, "other") == {}
    for offset in LEFT:
        ask_about(peer, RequestCode.ACK_MESSAGE, ORDERED, batch[offset])
    again = pop_in_order(peer, ORDERED, INVISIBLE_S, "first")
    assert list(again) == [LAST]
    ask_about(peer, RequestCode.ACK_MESSAGE, ORDERED, again[LAST])
    assert pop_in_order(peer, ORDERED, INVISIBLE_S, "other") == {}


def set_mode(peer: Peer, topic: str) -> None:
    mode = {"topic": topic, "consumerGroup": GROUP, "mode": "POP", "popShareQueueNum": 3}
    body = fastjson.dumps(mode, strict=True)
    got = answer(peer.broker, RequestCode.SET_MESSAGE_REQUEST_MODE, {}, body)
    assert got.code == ResponseCode.SUCCESS, got.remark


def modes(peer: Peer) -> dict[str, tuple[str, int]]:
    """Mode and number of shared queues, by topic."""
    got = answer(peer.broker, RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, {})
    topics = fastjson.loads(got.body)["messageRequestModeMap"]
    entries = {topic: groups[GROUP] for topic, groups in topics.items()}
    return {topic: (each["mode"], each["popShareQueueNum"]) for topic, each in entries.items()}


async def register_filter(nameserver: str, topic: str) -> None:
    """Register a filter that no message passes."""
    async with Consumer(FILTERED_GROUP, topic, filter=FILTER, nameserver=nameserver):
        pass


def filters(store: Path) -> dict[str, str]:
    """Expressions by topic."""
    topics = config(store, "consumerFilter.json").get("filterDataByTopic", {})
    groups = {topic: each["groupFilterData"] for topic, each in topics.items()}
    return {topic: each[FILTERED_GROUP]["expression"] for topic, each in groups.items()}


def config(store: Path, name: str) -> Any:
    try:
        return fastjson.loads((store / "config" / name).read_bytes())
    except FileNotFoundError:
        return {}


def is_saved(store: Path) -> bool:
    """Whether the files of offsets and orders count all messages, and there is a filter."""
    offsets = config(store, "consumerOffset.json").get("offsetTable", {})
    orders = config(store, "consumerOrderInfo.json").get("table", {})
    popped = [offsets.get(f"{topic}@{GROUP}", {}) for topic in (PLAIN, RETRY_TOPIC)]
    batches = [orders.get(f"{topic}@{GROUP}", {}) for topic in (ORDERED, CHANGED)]
    return (
        all(max(queues.values(), default=0) >= COUNT for queues in popped)
        and [[each["cm"] for each in queues.values()] for queues in batches] == 2 * [[ACKED_BITS]]
        and all(each.get("ot") for each in batches[1].values())
        and PLAIN in filters(store)
    )


def leave(peer: Peer, store: Path, end: str, *, wait: bool) -> tuple[float, dict[int, Handle]]:
    """Take all, acknowledge some, set a mode and a filter, and end the broker.

    wait: until the files say what is out.

    Returns when what is not acknowledged becomes visible, and the batch of ORDERED.
    """
    run(send, peer.nameserver)
    run(retry, peer.nameserver)
    set_mode(peer, PLAIN)
    run(register_filter, peer.nameserver, PLAIN)
    invisible_s = OLD_INVISIBLE_S if wait and peer.name == "headrace" else INVISIBLE_S
    visible_at = time.monotonic() + invisible_s
    batch = take_in_order(peer, ORDERED, 10 * INVISIBLE_S)
    last = take_in_order(peer, CHANGED, BEFORE_CHANGE_S)[LAST]
    change = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
    ask_about(peer, change, CHANGED, last, invisibleTime=f"{1000 * invisible_s}")
    taken = run(take, peer.nameserver, invisible_s, 30)
    assert taken == [f"{topic} {number}" for topic in (PLAIN, RETRIED) for number in range(COUNT)]
    if wait:
        wait_until(lambda: is_saved(store), "it was not saved", LIMIT_S)
    broker = peer.daemons["broker"]
    broker.stop() if end == "stop" else broker.kill()
    return visible_at, batch


def add_unknown_fields(store: Path) -> None:
    """Write the tables as a later version might."""
    for name, path in TABLES.items():
        fields = config(store, name)
        for entry in reduce(getitem, path, fields).values():
            entry.update(UNKNOWN)
        text = fastjson.dumps(fields | UNKNOWN, strict=True)
        (store / "config" / name).write_bytes(text)


@pytest.mark.parametrize(
    ("first", "second", "end"),
    [
        ("headrace", "apache", "stop"),
        ("headrace", "apache", "kill"),
        ("apache", "headrace", "stop"),
        ("apache", "headrace", "kill"),
        ("headrace", "headrace", "stop"),
        ("headrace", "headrace", "kill"),
    ],
)
def test_what_was_not_acknowledged_comes_again(
    tmp_path: Path, first: str, second: str, end: str
) -> None:
    store = tmp_path / "store"
    is_swapped = first != second
    with quick_peer(first, store=store, settings=SETTINGS) as peer:
        visible_at, batch = leave(peer, store, end, wait=is_swapped and end == "kill")
    if is_swapped:
        add_unknown_fields(store)
    with quick_peer(second, store=store, settings=SETTINGS) as peer:
        assert modes(peer) == {PLAIN: ("POP", 3)}
        set_mode(peer, RETRIED)
        assert modes(peer) == {PLAIN: ("POP", 3), RETRIED: ("POP", 3)}
        run(register_filter, peer.nameserver, RETRIED)
        continue_in_order(peer, batch)
        left_s = visible_at - time.monotonic()
        early = run(take_all, peer, max(left_s - 3, 0))
        assert early == [], "before its time"
        assert run(take_all, peer, LIMIT_S) == AGAIN
        wait_until(lambda: filters(store) == {PLAIN: FILTER, RETRIED: FILTER}, "", LIMIT_S)
    if is_swapped and second == "headrace":
        kept = {name: config(store, name) for name in TABLES}
        assert all(fields.items() >= UNKNOWN.items() for fields in kept.values())
        for name in ("messageRequestMode.json", "consumerFilter.json"):
            (entry,) = reduce(getitem, TABLES[name], kept[name]).values()
            assert entry.items() >= UNKNOWN.items()
