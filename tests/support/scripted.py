"""A server that answers by a script: for what no real broker does on demand.

It is the daemons' own serving side with a test's answers, in memory (under a mock clock) or, for
asyncio and blocking code, on a loopback socket in a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from headrace import Producer
from headrace.instance import ClientInstance
from headrace_daemon.network import MemoryNetwork, Network, TcpNetwork
from headrace_daemon.serving.server import RemotingServer
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_protocol.bodies import BrokerData, QueueData, TopicRouteData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command
from headrace_protocol.frame import Frame
from headrace_protocol.header_codecs import SerializeType, decode_header
from headrace_protocol.headers import SendMessageResponseHeader
from headrace_protocol.message import decode_properties, decode_records
from headrace_protocol.nameserver_headers import GetRouteInfoResponseHeader
from headrace_protocol.serving import Registry, Reply, Request
from headrace_protocol.statictopic.mapping import MappingInfo
from tests.support.batches import iter_batch

Answer = Reply | None
HOST = "127.0.0.1"

BUSY = Reply(code=ResponseCode.SYSTEM_BUSY, remark="dispatch is behind")
ILLEGAL = Reply(code=ResponseCode.MESSAGE_ILLEGAL, remark="no")

# headrace's own brokers take whole records, Apache's don't.
both_kinds = pytest.mark.parametrize("ours", [True, False], ids=["headrace", "apache"])


@contextlib.asynccontextmanager
async def producing(
    brokers: int = 1, *, queues: int = 1, headrace: bool = False, **options: Any
) -> AsyncIterator[tuple[Producer, Scripted, list[Scripted]]]:
    """A producer with these options at a scripted cluster; its nameserver and brokers."""
    cluster = scripted_cluster(brokers, queues=queues, headrace=headrace)
    async with (
        cluster as (nameserver, masters, network),
        Producer(nameserver=nameserver.address, connect=network.connect, **options) as producer,
    ):
        yield producer, nameserver, masters


@contextlib.asynccontextmanager
async def open_instance(nameserver: str, network: Network) -> AsyncIterator[ClientInstance]:
    """The base of a client, started."""
    instance = ClientInstance(nameserver, connect=network.connect)
    await instance.start()
    try:
        yield instance
    finally:
        await instance.stop()


@dataclass
class Asked:
    """One request as it arrived. reply: answers it later, if its script gave no answer."""

    code: int
    ext: dict[str, str]
    body: bytes
    is_oneway: bool
    channel: ServerChannel
    opaque: int = 0
    serialize_type: int = SerializeType.JSON
    reply: Callable[[Reply], None] = field(default=lambda _: None)

    @property
    def properties(self) -> dict[str, str]:
        """The properties of the one message that the request sends."""
        return decode_properties(self.ext["i"].encode())


@dataclass
class Scripted:
    """``answers[code]`` are used up one by one; the last one stays. Codes without get 0.

    An answer is a Reply, None (no answer ever), or a function of Asked that returns one.

    is_headrace: says so to clients; if not, they take it for one of Apache's.
    """

    address: str = ""
    is_headrace: bool = False
    asked: list[Asked] = field(default_factory=list)
    responses: list[tuple[Command, bytes]] = field(default_factory=list)
    answers: dict[int, deque[Any]] = field(default_factory=lambda: defaultdict(deque))

    def answer(self, code: int, *answers: Reply | Callable[[Asked], Answer] | None) -> None:
        self.answers[code] = deque(answers)

    def answer_sends(self, *answers: Reply | Callable[[Asked], Answer] | None) -> None:
        """One script for all requests that send."""
        script = deque(answers)
        for code in SENDS:
            self.answers[code] = script

    @property
    def sends(self) -> list[Asked]:
        """The requests that sent messages."""
        return [asked for asked in self.asked if asked.code in SENDS]

    @property
    def sent(self) -> list[bytes]:
        """The bodies of all messages that were sent, stored or not."""
        return [body for asked in self.sends for body in sent_bodies(asked)]

    def count(self, code: int) -> int:
        return sum(asked.code == code for asked in self.asked)

    def last(self, code: int) -> Asked:
        return next(asked for asked in reversed(self.asked) if asked.code == code)

    # -- FrameHandler --

    def handle(self, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        if not (channel.is_greeted or self.is_headrace):
            channel.greet()
        for serialize_type, header, body in frames:
            command = decode_header(serialize_type, header)
            if command.is_response:
                self.responses.append((command, bytes(body)))
        return _EveryCode(self).handle(channel, frames)

    def finish_turn(self) -> None:
        """All was answered at once."""

    def replied(self) -> None:
        """Nothing is put off."""

    def closed(self, channel: ServerChannel) -> None:
        """Nothing is kept per client."""

    def serve(self, request: Request) -> Answer:
        command = request.command
        asked = Asked(
            command.code,
            command.ext(),
            bytes(request.body),
            command.is_oneway,
            request.channel,  # type: ignore[arg-type]
            command.opaque,
            request.serialize_type,
            request.reply,
        )
        self.asked.append(asked)
        script = self.answers.get(command.code)
        if not script:
            return Reply()
        answer = script.popleft() if len(script) > 1 else script[0]
        return answer(asked) if callable(answer) else answer


class _EveryCode(Registry):
    def __init__(self, script: Scripted) -> None:
        def unexpected(_request: Request, error: Exception) -> None:
            raise error

        super().__init__(unexpected)
        self.functions = defaultdict(lambda: script.serve)
        for code in RequestCode:
            self.functions[code] = script.serve


def close(asked: Asked) -> Answer:
    """The answer that is none: the connection ends."""
    asked.channel.close("")
    return None


SENDS = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.BULK_SEND)


def sent_bodies(asked: Asked) -> list[bytes]:
    """The messages' bodies in any request that sends."""
    if asked.code == RequestCode.SEND_BATCH_MESSAGE:
        return [bytes(body) for _, body, _ in iter_batch(asked.body)]
    if asked.code == RequestCode.BULK_SEND:
        records = asked.body[4 * int(asked.ext["count"]) :]
        return [stored.body for stored in decode_records(records)]
    return [asked.body]


def sent_queue(asked: Asked) -> int:
    """The queue of any request that sends."""
    return int(asked.ext["queueId" if asked.code == RequestCode.BULK_SEND else "e"])


def stored(queue_offset: int = 0) -> Callable[[Asked], Reply]:
    """The answer to a send."""

    def answer(asked: Asked) -> Reply:
        count = len(sent_bodies(asked)) if asked.code == RequestCode.SEND_BATCH_MESSAGE else 1
        header = SendMessageResponseHeader(
            msg_id=",".join(["0" * 32] * count),
            queue_id=sent_queue(asked),
            queue_offset=queue_offset,
        )
        return Reply(header)

    return answer


def storing() -> Callable[[Asked], Reply]:
    """Answers to sends, with the queue offsets that a broker would give."""
    next_offsets: dict[int, int] = defaultdict(int)

    def answer(asked: Asked) -> Reply:
        queue_id = sent_queue(asked)
        offset = next_offsets[queue_id]
        next_offsets[queue_id] += len(sent_bodies(asked))
        return stored(offset)(asked)

    return answer


def no_topic(*, awaits_broker: bool) -> Reply:
    """The answer of a headrace nameserver."""
    header = GetRouteInfoResponseHeader(awaits_broker=awaits_broker)
    return Reply(header, code=ResponseCode.TOPIC_NOT_EXIST)


def route(*brokers: Scripted, queues: int = 1, perm: int = 6) -> Reply:
    """The route of a topic on ``brokers``, which are named broker-0, broker-1, ..."""
    names = [f"broker-{number}" for number in range(len(brokers))]
    data = TopicRouteData(
        broker_datas=[
            BrokerData(cluster="c", broker_name=name, broker_addrs={0: broker.address})
            for name, broker in zip(names, brokers, strict=True)
        ],
        queue_datas=[
            QueueData(broker_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)
            for name in names
        ],
    )
    return Reply(body=(data.encode(strict=True),))


def static_route(
    *brokers: Scripted, leads: list[list[int]], total: int, perm: int = 6, away: int = 0
) -> Reply:
    """The route of a static topic.

    leads: by broker, the queues that it leads, in ascending order of epoch. away: so many of the
        last brokers have no address.
    """
    names = [f"broker-{number}" for number in range(len(leads))]
    plain = TopicRouteData.decode(route(*brokers, perm=perm).body[0])
    live = names[: len(leads) - away]
    plain.queue_datas = [part for part in plain.queue_datas if part.broker_name in live]
    plain.broker_datas = [part for part in plain.broker_datas if part.broker_name in live]
    plain.topic_queue_mapping_by_broker = {
        name: MappingInfo(
            topic="T",
            bname=name,
            total_queues=total,
            epoch=epoch,
            curr_id_map={queue: 100 + queue for queue in queues},
        )
        for epoch, (name, queues) in enumerate(zip(names, leads, strict=True), 1)
    }
    return Reply(body=(plain.encode(strict=True),))


@contextlib.asynccontextmanager
async def scripted(network: Network, count: int = 1) -> AsyncIterator[list[Scripted]]:
    """Run ``count`` scripted servers."""
    scripts = [Scripted() for _ in range(count)]
    async with trio.open_nursery() as nursery:
        for script in scripts:
            listener = network.listen(HOST, 0)
            script.address = listener.address
            await nursery.start(network.serve, listener, RemotingServer(script))
        yield scripts
        nursery.cancel_scope.cancel()


@contextlib.contextmanager
def scripted_in_thread(count: int = 1) -> Iterator[list[Scripted]]:
    """Run ``count`` scripted servers on loopback sockets, in another thread."""
    started: Future[tuple[list[Scripted], Callable[[], None]]] = Future()

    async def serve() -> None:
        async with scripted(TcpNetwork(), count) as scripts:
            stop = trio.Event()
            token = trio.lowlevel.current_trio_token()
            started.set_result((scripts, lambda: token.run_sync_soon(stop.set)))
            await stop.wait()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    scripts, stop = started.result()
    try:
        yield scripts
    finally:
        stop()
        thread.join()


@contextlib.asynccontextmanager
async def scripted_cluster(
    brokers: int = 1, *, queues: int = 1, headrace: bool = False
) -> AsyncIterator[tuple[Scripted, list[Scripted], MemoryNetwork]]:
    """A nameserver that knows every topic on all of ``brokers`` scripted brokers, in memory."""
    network = MemoryNetwork()
    async with scripted(network, brokers + 1) as (nameserver, *masters):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(*masters, queues=queues))
        for master in masters:
            master.is_headrace = headrace
            master.answer_sends(stored())
        yield nameserver, masters, network
