"""Each field of a feature's record, in a broker that runs; at the end a whole feature.

Their parts are in ``seams/``; ``add_feature`` adds their line. Clients are real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from anyio.abc import ByteStream

from headrace import Message, PullConsumer
from headrace.embedded import Embedded
from headrace.errors import BrokerError
from headrace_broker.core import Core
from headrace_broker.feature import Feature, Followed
from headrace_broker.server import Broker
from headrace_daemon.network import MemoryNetwork, Network, TcpNetwork
from headrace_daemon.services import StopStage
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.address import split_address
from headrace_protocol.message import decode_records
from tests.broker.seams.collector import TopicLetters
from tests.broker.seams.demand import PROPERTY, ParkingTopic
from tests.broker.seams.follower import Copy
from tests.broker.seams.guard import REMARK, Ban
from tests.broker.seams.place import OTHER_BROKER, MovedTopic
from tests.broker.seams.service import IdleService
from tests.broker.seams.source import HiddenTopic
from tests.broker.seams.whole import DRAWER, LOCKED, LOOK_INTO, Drawer
from tests.support.features import add_feature, add_parts
from tests.support.followers import CopyingFollower
from tests.support.metrics import parse, value
from tests.support.running import small_config
from tests.support.until import until
from tests.support.wires import (
    Wire,
    pull_fields,
    queue_fields,
    request,
    send_fields,
    topic_fields,
)

TOPIC = "Orders"
OTHER = "Others"
BODIES = [b"%d" % number for number in range(40)]
OTHER_HOST = "127.0.0.2"
_WAIT_S = 10.0


# -- a broker and its clients ----------------------------------------------------------------------


@asynccontextmanager
async def running(
    folder: Path, network: Network | None = None, **settings: Any
) -> AsyncIterator[Embedded]:
    """A broker and its nameserver; both have stopped in order at the end."""
    network = network or MemoryNetwork()
    async with AsyncExitStack() as stack:
        stack.enter_context(trio.fail_after(_WAIT_S))
        nameserver = NameServer(NameServerConfig(bind_address="127.0.0.1", listen_port=0), network)
        await _start(stack, nameserver)
        config = small_config(folder, listen_port=0, namesrv_addr=nameserver.address, **settings)
        broker = Broker(config, network)
        await _start(stack, broker)
        yield Embedded(nameserver.address, broker.address, folder, network.connect)


async def _start(stack: AsyncExitStack, daemon: NameServer | Broker) -> None:
    nursery = await stack.enter_async_context(trio.open_nursery())
    await nursery.start(daemon.run)
    stack.callback(nursery.cancel_scope.cancel)


async def create(mq: Embedded, *topics: str, queues: int = 2) -> None:
    async with mq.admin() as admin:
        for topic in topics:
            await admin.create_topic(topic, queues=queues)


async def send(mq: Embedded, topic: str, *bodies: bytes, **properties: str) -> None:
    async with mq.producer() as producer:
        for body in bodies:
            await producer.send(Message(topic, body, properties=properties))


async def pull(mq: Embedded, topic: str, count: int) -> list[bytes]:
    """So many bodies from the beginning on, in their order."""
    async with PullConsumer(nameserver=mq.nameserver, connect=mq.connect) as consumer:
        await consumer.assign(await consumer.queues(topic))
        bodies: list[bytes] = []
        while len(bodies) < count:
            bodies += [message.body for message in await consumer.receive_many() or ()]
        return sorted(bodies, key=int)


async def serves(mq: Embedded, topic: str) -> None:
    """A topic's messages are sent and pulled."""
    await send(mq, topic, *BODIES)
    assert await pull(mq, topic, len(BODIES)) == BODIES


@asynccontextmanager
async def wire(mq: Embedded) -> AsyncIterator[Wire]:
    async with await mq.connect(mq.broker) as stream:
        yield Wire(stream)


# -- followers -------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_follower_that_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Copy] = []

    def build(core: Core) -> Feature:
        copies.append(Copy(core, TOPIC))
        return Feature(followers=(Followed(copies[-1]),))

    add_feature(monkeypatch, build)
    async with running(tmp_path, flush_disk_type="SYNC_FLUSH") as mq:
        await create(mq, TOPIC, OTHER)
        await serves(mq, OTHER)
        await send(mq, TOPIC, b"0")
        await trio.to_thread.run_sync(copies[0].has_copied.wait, _WAIT_S)
        assert bodies_of(copies[0]) == [b"0"]  # while the broker runs
        await send(mq, TOPIC, *BODIES[1:20])
    assert bodies_of(copies[0]) == BODIES[:20]  # a stop copies the rest
    async with running(tmp_path) as mq:
        await send(mq, TOPIC, *BODIES[20:])
        assert await pull(mq, TOPIC, len(BODIES)) == BODIES
    assert bodies_of(copies[1]) == BODIES
    # Each queue resumes after the last message that was copied, and has the offsets of the store.
    resumed = {queue_id: offset for _, queue_id, offset in copies[1].resumed}
    assert sum(resumed.values()) == 20
    assert {topic for topic, _ in copies[1].copied()} == {TOPIC}
    for entries in copies[1].copied().values():
        assert [offset for offset, _ in entries] == list(range(len(entries)))


def bodies_of(copy: CopyingFollower) -> list[bytes]:
    return sorted((body for entries in copy.copied().values() for _, body in entries), key=int)


# -- services --------------------------------------------------------------------------------------


async def test_services_that_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    stages = {"first": StopStage.SAVE, "second": StopStage.ANSWER, "third": StopStage.SAVE}
    idle = tuple(IdleService(name, notes).service(stage) for name, stage in stages.items())
    add_parts(monkeypatch, services=idle)
    started = [f"{name} {event}" for event in ("loads", "runs") for name in stages]
    async with running(tmp_path) as mq:
        assert notes == started
        await create(mq, TOPIC)
        await serves(mq, TOPIC)
        assert notes == started
    stopped = notes[len(started) :]
    # Tasks end in no order, between the stages.
    assert sorted(stopped[1:4]) == ["first ends", "second ends", "third ends"]
    assert (stopped[0], stopped[4:]) == ("second finishes", ["first finishes", "third finishes"])


# -- requests --------------------------------------------------------------------------------------


async def connect_from_other_host(address: str) -> ByteStream:
    return await anyio.connect_tcp(*split_address(address), local_host=OTHER_HOST)


@pytest.mark.slow
async def test_a_guard_that_refuses_one_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ban = Ban()
    add_parts(monkeypatch, guards=(ban.add_to,))
    async with running(tmp_path, TcpNetwork()) as mq:
        await create(mq, TOPIC, queues=1)
        theirs = mq._replace(connect=connect_from_other_host)
        async with wire(theirs) as asking:
            # The second burst is of a client that the broker has greeted, as the fast lane needs.
            for _ in range(2):
                assert await send_at_once(asking) == [ResponseCode.SUCCESS] * len(BODIES)
            ban.hosts.add(OTHER_HOST)
            assert await send_at_once(asking) == [ResponseCode.NO_PERMISSION] * len(BODIES)
            for code, fields in (
                (RequestCode.SEND_MESSAGE_V2, send_fields(b=TOPIC)),
                (RequestCode.PULL_MESSAGE, pull_fields(topic=TOPIC)),
                (RequestCode.UPDATE_AND_CREATE_TOPIC, topic_fields(topic=OTHER)),
                (RequestCode.GET_BROKER_CONFIG, {}),
            ):
                answer, _ = await asking.ask(request(code, fields, b"body"))
                assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, REMARK)
        with pytest.raises(BrokerError, match=REMARK):
            await send(theirs, TOPIC, b"refused")
        with pytest.raises(BrokerError, match=REMARK):
            await pull(theirs, TOPIC, 1)
        with pytest.raises(BrokerError, match=REMARK):
            await create(theirs, OTHER)
        async with mq.admin() as admin:
            assert await admin.topics() == [TOPIC]
        await send(mq, TOPIC, b"99")
        assert await pull(mq, TOPIC, 2 * len(BODIES) + 1) == [*sorted(2 * BODIES, key=int), b"99"]


async def send_at_once(asking: Wire) -> list[int]:
    """The codes of the answers to sends that go out together."""
    sends = [request(RequestCode.SEND_MESSAGE_V2, send_fields(b=TOPIC), body) for body in BODIES]
    await asking.send(b"".join(sends))
    return [(await asking.receive())[0].code for _ in BODIES]


async def test_a_place_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_parts(monkeypatch, places=(MovedTopic(TOPIC).place,))
    async with running(tmp_path) as mq:
        await create(mq, TOPIC, OTHER)
        async with mq.producer(delivery_timeout_ms=0) as producer:
            with pytest.raises(BrokerError, match=OTHER_BROKER.address) as refused:
                await producer.send(Message(TOPIC, b"body"))
            assert refused.value.code == ResponseCode.NOT_LEADER_FOR_QUEUE
        async with wire(mq) as asking:
            for code, fields in (
                (RequestCode.SEND_MESSAGE_V2, send_fields(b=TOPIC)),
                (RequestCode.PULL_MESSAGE, pull_fields(topic=TOPIC)),
                (RequestCode.GET_MAX_OFFSET, queue_fields(topic=TOPIC)),
            ):
                answer, _ = await asking.ask(request(code, fields, b"body"))
                assert answer.code == ResponseCode.NOT_LEADER_FOR_QUEUE
                assert OTHER_BROKER.address in (answer.remark or "")
        await serves(mq, OTHER)


async def test_a_source_without_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_parts(monkeypatch, sources=(HiddenTopic(TOPIC).source,))
    async with running(tmp_path) as mq:
        await create(mq, TOPIC, OTHER, queues=1)
        await send(mq, TOPIC, *BODIES)
        async with wire(mq) as asking:
            answer, _ = await asking.ask(
                request(RequestCode.PULL_MESSAGE, pull_fields(topic=TOPIC))
            )
            assert answer.code == ResponseCode.PULL_NOT_FOUND
            answer, _ = await asking.ask(
                request(RequestCode.GET_MAX_OFFSET, queue_fields(topic=TOPIC))
            )
            assert answer.ext()["offset"] == "0"
        await serves(mq, OTHER)


async def test_a_message_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_parts(monkeypatch, demands=(ParkingTopic(OTHER).demand(),))
    async with running(tmp_path) as mq:
        await create(mq, TOPIC, OTHER, queues=1)
        parked, plain = BODIES[::2], BODIES[1::2]
        await send(mq, TOPIC, *parked, **{PROPERTY: "yes"})
        await send(mq, TOPIC, *plain)
        assert await pull(mq, OTHER, len(parked)) == parked
        assert await pull(mq, TOPIC, len(plain)) == plain


async def test_a_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TopicLetters] = []

    def build(core: Core) -> Feature:
        made.append(TopicLetters(core))
        return Feature(collectors=(made[-1].collect,))

    add_feature(monkeypatch, build)
    async with running(tmp_path, monitor_port=0) as mq:
        await create(mq, TOPIC)
        scrapes = made[0].core.serving.scrapes
        assert scrapes is not None
        page = parse(await trio.to_thread.run_sync(scrapes.page))
        assert value(page, "feature_letters", topic=TOPIC, node_id="broker-a") == len(TOPIC)


# -- a whole feature -------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_whole_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record with something in each field, among the broker's own features."""
    made: list[Drawer] = []

    def build(core: Core) -> Feature:
        made.append(Drawer(core))
        return made[-1].record()

    add_feature(monkeypatch, build)
    async with running(tmp_path, monitor_port=0) as mq:
        (drawer,) = made
        await create(mq, TOPIC, DRAWER, queues=1)
        await send(mq, TOPIC, *BODIES, DRAWER="yes")
        await send(mq, TOPIC, b"100")
        assert await pull(mq, DRAWER, len(BODIES)) == BODIES
        assert await pull(mq, TOPIC, 1) == [b"100"]
        await shows_its_numbers(mq, drawer)
        await keeps_messages(mq, drawer)
        await locks(mq, drawer)
    assert int((tmp_path / "config" / "drawer.json").read_bytes()) == len(BODIES)
    assert bodies_of(drawer.copies) == BODIES
    # The table was read above; tests/broker/topics/test_topic_rules.py has queues that move, and
    # tests/broker/quotas/test_owned.py staged writes with a limit.
    assert drawer.used == {*Feature._fields} - {"moves", "staged_bytes", "tables"}


async def shows_its_numbers(mq: Embedded, drawer: Drawer) -> None:
    await until(lambda: drawer.count == len(BODIES))
    async with mq.admin() as admin:
        assert (await admin.runtime_info(mq.broker))["inDrawer"] == str(len(BODIES))
    scrapes = drawer.core.serving.scrapes
    assert scrapes is not None
    page = parse(await trio.to_thread.run_sync(scrapes.page))
    assert value(page, "feature_in_drawer") == len(BODIES)


async def keeps_messages(mq: Embedded, drawer: Drawer) -> None:
    fields = {"topic": DRAWER, "key": DRAWER, "maxNum": 8, "beginTimestamp": 0}
    async with wire(mq) as asking:
        wanted = request(RequestCode.QUERY_MESSAGE, {**fields, "endTimestamp": 2**62})
        (found,) = decode_records((await asking.ask(wanted))[1])
        assert (found.topic, found.body) == (DRAWER, BODIES[0])
    async with mq.admin() as admin:
        with pytest.raises(BrokerError, match=LOCKED):
            await admin.delete_topic(DRAWER)
    lowest = returned(drawer.core.store.cleaner.unconsumed()(DRAWER, [0]))
    assert lowest == {0: (0, "the drawer")}
    assert drawer.core.messages.writer.find_target(DRAWER, 0) == 0


async def locks(mq: Embedded, drawer: Drawer) -> None:
    async with wire(mq) as asking:
        answer, _ = await asking.ask(request(LOOK_INTO, {}))
        assert answer.remark == str(len(BODIES))
        drawer.is_locked = True
        answer, _ = await asking.ask(request(LOOK_INTO, {}))
        assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, LOCKED)
        drawer.core.tables.topics.lookups_changed()
        answer, _ = await asking.ask(request(RequestCode.PULL_MESSAGE, pull_fields(topic=DRAWER)))
        assert answer.code == ResponseCode.PULL_NOT_FOUND


def returned(steps: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
