"""The attackers of a run: ``python -m tests.abuse.attackers KIND NAMESERVER BROKER SEED DOOR``.

Each is a process of its own that says when it begins, and attacks without a pause until SIGTERM;
then it prints what it did.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from headrace.blocking import Admin, Producer, PullConsumer
from headrace.errors import HeadraceError
from headrace.messages import Message
from headrace_protocol.bounds import BODIES, body_of
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.command import FLAG_RESPONSE, Command
from headrace_protocol.errors import RemoteProtocolError
from headrace_protocol.frame import FRAME_BYTES_MAX, FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from tests.abuse.doors import Door, Peer
from tests.abuse.hostile import (
    BODIES_OF_OTHERS,
    DEEP_BODIES,
    LARGE_BODIES,
    LONG_LISTS,
    closing_headers,
    headers,
    plain_fields,
)
from tests.fuzz.corpus import corpus
from tests.fuzz.mutations import spoiled_inside
from tests.support.wires import framed, request

# Of one attacker at a time: each may keep a daemon for 10 ms before others have their turn, so as
# many as make an innocent client wait for a tenth of a second together.
CONNECTIONS = 2
# What is the administrator's right would hurt the innocent, which proves nothing.
HARMLESS = [
    code
    for code in BODIES
    if code
    not in {
        Code.UPDATE_BROKER_CONFIG,
        Code.WIPE_WRITE_PERM_OF_BROKER,
        Code.ADD_WRITE_PERM_OF_BROKER,
        Code.TRIGGER_DELETE_FILES,
        Code.DELETE_EXPIRED_COMMITLOG,
        Code.SET_QUOTA,
    }
]
LISTINGS = [
    Code.GET_ALL_TOPIC_CONFIG,
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    Code.GET_ALL_CONSUMER_OFFSET,
    Code.GET_BROKER_RUNTIME_INFO,
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    Code.GET_BROKER_CLUSTER_INFO,
    Code.PULL_MESSAGE,
]
SENDS = frozenset({Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2, Code.SEND_BATCH_MESSAGE})
CODECS = list(SerializeType)
ROCKETMQ_CODE_MAX = 0x7FFF
LARGEST_BODY = b'{"clientID":"%b"}' % (b"x" * FRAME_BYTES_MAX)


# -- what goes out ---------------------------------------------------------------------------------

# Bytes to send at once, and whether the answers are read.
Volley = tuple[bytes, bool]


def codec_for(rng: Random, code: int) -> SerializeType:
    codec = rng.choice(CODECS)
    is_too_large = codec is SerializeType.ROCKETMQ and code > ROCKETMQ_CODE_MAX
    return SerializeType.JSON if is_too_large else codec


def hostile_headers(rng: Random) -> Iterator[Volley]:
    """Fields that are missing, foreign, extreme or nest."""
    while True:
        code = rng.choice(HARMLESS)
        if rng.random() < 0.2:
            codec, header = rng.choice(list(closing_headers(code)))
            yield framed(codec, header), True
            continue
        fields = rng.choice(list(headers(code)))
        codec = codec_for(rng, code)
        if 10**30 not in fields.values() or codec is not SerializeType.MSGPACK:
            yield request(code, fields, b"x" * rng.choice((0, 1, 1000)), codec=codec), True


def hostile_bodies(rng: Random) -> Iterator[Volley]:
    """Bodies that are deep, foreign, too large, or lists as long as they may be."""
    small = list((BODIES_OF_OTHERS | DEEP_BODIES).values())
    large = [(code, body) for code in HARMLESS for body in LARGE_BODIES.values()]
    lists = [each for each in LONG_LISTS if each[0] in HARMLESS]
    while True:
        code: Code = rng.choice(HARMLESS)
        chance = rng.random()
        if chance < 0.6:
            body = rng.choice(small)
        elif chance < 0.8:
            code, body = rng.choice(lists)
        elif chance < 0.95 or code in SENDS:
            code, body = rng.choice(large)
        else:
            bytes_max = body_of(code).bytes_max
            body = LARGEST_BODY[: bytes_max + rng.choice((-1, 0, 1))]
        body = body[: FRAME_BYTES_MAX - 10_000]
        yield request(code, plain_fields(code), body, codec=codec_for(rng, code)), True


def hostile_routes(rng: Random) -> Iterator[Volley]:
    """Registrations under many names and addresses, and what else changes routes."""
    bodies = [body for code, body in LONG_LISTS if code == Code.REGISTER_BROKER]
    while True:
        name = f"broker-{rng.randrange(200)}"
        address = rng.choice((f"10.0.0.{rng.randrange(255)}:10911", "", "x", "\x1b[2J:1"))
        fields = {
            **plain_fields(Code.REGISTER_BROKER),
            "brokerName": name,
            "brokerAddr": address,
            "clusterName": f"cluster-{rng.randrange(20)}",
            "brokerId": rng.choice((0, 1, -1, 2**63 - 1)),
            "compressed": rng.random() < 0.5,
        }
        code = rng.choice((Code.REGISTER_BROKER, Code.REGISTER_BROKER, Code.UNREGISTER_BROKER))
        yield request(code, fields, rng.choice(bodies)), True
        key = {"namespace": f"n{rng.randrange(50)}", "key": f"k{rng.randrange(50)}"}
        yield request(Code.PUT_KV_CONFIG, {**key, "value": "x" * rng.randrange(100_000)}), True
        yield request(Code.DELETE_KV_CONFIG, key), True


def hostile_pipelines(rng: Random) -> Iterator[Volley]:
    """Many requests at once whose answers are large and not read, and halves of frames."""
    while True:
        code = rng.choice(LISTINGS)
        frame = request(code, plain_fields(code), codec=codec_for(rng, code))
        volley = frame * rng.choice((1, 30, 300))
        yield volley[: len(volley) - rng.choice((0, 0, 1, 5))], rng.random() < 0.3


def spoiled_frames(rng: Random) -> Iterator[Volley]:
    """Recorded requests with a bit, a number or a piece changed."""
    seeds = [each for each in corpus() if each.request_code in HARMLESS]
    while True:
        yield spoiled_inside(rng, rng.choice(seeds), rng.choice(seeds)), True


class Attacker:
    """Sends volleys on a few connections, and replaces those that are closed.

    Where there are users, some connections are no user's, and some even plain.
    """

    def __init__(self, rng: Random, addresses: list[str], door: Door) -> None:
        self._rng = rng
        self._addresses = addresses
        self._doors = [door] * 8 + [door._replace(user=""), door._replace(user="", ca_file="")]
        # A handshake and a log-in take the time of many volleys.
        self._leaving = 0.005 if door.ca_file else 0.05
        self._peers: dict[int, Peer] = {}
        self.did: Counter[str] = Counter()

    def send(self, volley: Volley) -> None:
        data, is_read = volley
        number = self._rng.randrange(CONNECTIONS)
        try:
            if number not in self._peers:
                address, door = self._rng.choice(self._addresses), self._rng.choice(self._doors)
                self._peers[number] = Peer(address, door=door)
                self.did["connections"] += 1
            peer = self._peers[number]
            peer.send(data)
            self.did["volleys"] += 1
            self.did["bytes"] += len(data)
            if is_read:
                peer.drop()
            if self._rng.random() < self._leaving:
                self._close(number)
        except OSError:
            self.did["closed"] += 1
            self._close(number)

    def _close(self, number: int) -> None:
        peer = self._peers.pop(number, None)
        if peer is not None:
            peer.close()


# -- hostile servers -------------------------------------------------------------------------------


class HostileServer:
    """Answers every request with a success and a body that is none, or with no frame at all."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        reader = FrameReader()
        with client, suppress(OSError, RemoteProtocolError):
            while data := client.recv(1 << 16):
                for kind, header, _ in reader.feed(data):
                    client.sendall(self._answer(kind, decode_header(kind, header)))

    def _answer(self, kind: int, command: Command) -> bytes:
        chance = self._rng.random()
        if chance < 0.05:
            return self._rng.randbytes(100)
        body = self._body(command.code)
        frame = encode_frame(
            kind,
            self._rng.choice((0, 0, 0, 0, 1, 17, 2**31 - 1)),
            command.opaque,
            flag=FLAG_RESPONSE,
            fields=self._fields(),
            body_bytes=len(body),
        )
        return (frame + body)[: -1 if chance < 0.1 else None]

    def _fields(self) -> dict[str, Any]:
        number = self._rng.choice((0, 1, -1, 2**31 - 1, 2**63 - 1, "x"))
        names = ("offset", "nextBeginOffset", "minOffset", "maxOffset", "queueOffset", "queueId")
        return {**dict.fromkeys(names, number), "msgId": "\x1b[2J", "suggestWhichBrokerId": 0}

    def _body(self, code: int) -> bytes:
        if code == Code.GET_ROUTEINFO_BY_TOPIC and self._rng.random() < 0.7:
            return self._route()
        return self._rng.choice(list((BODIES_OF_OTHERS | DEEP_BODIES).values()))

    def _route(self) -> bytes:
        queue_nums = self._rng.choice((0, 1, 4, -1, 2**31 - 1))
        queues = {"brokerName": "b", "readQueueNums": queue_nums, "writeQueueNums": queue_nums}
        address = self._rng.choice((self.address, self.address, self.address, "", "x:1"))
        broker = {"brokerName": "b", "cluster": "c", "brokerAddrs": {"0": address}}
        route = {"queueDatas": [{**queues, "perm": 6}], "brokerDatas": [broker]}
        return json.dumps(route).encode()


def use_hostile_servers(rng: Random, door: Door, did: Counter[str]) -> Iterator[None]:
    """Clients of ours at such servers: every call ends with a result or a HeadraceError."""
    server = HostileServer(rng)
    at: dict[str, Any] = {"nameserver": server.address}
    if door.user:
        at |= {"user": door.user, "password": door.password}
    while True:
        for use in (_administer, _produce, _pull):
            try:
                use(at)
                did["results"] += 1
            except HeadraceError:
                did["errors"] += 1
            except Exception as error:  # noqa: BLE001 - what a user must never see
                did[f"fault in {use.__name__}: {error!r}"[:300]] += 1
            yield


def _administer(at: dict[str, Any]) -> None:
    with Admin(**at) as admin:
        asks = (admin.topics, admin.cluster, lambda: admin.topic_stats("Alive"))
        for ask in (
            *asks,
            lambda: admin.lag("readers"),
            lambda: admin.runtime_info(at["nameserver"]),
        ):
            with suppress(HeadraceError):
                ask()


def _produce(at: dict[str, Any]) -> None:
    with Producer(**at, timeout_ms=300, delivery_timeout_ms=100) as producer:
        producer.send(Message("Alive", b"body"))


def _pull(at: dict[str, Any]) -> None:
    with PullConsumer("readers", **at) as consumer:
        queues = consumer.queues("Alive")[:4]
        consumer.assign(queues)
        for queue in queues:
            with suppress(HeadraceError):
                consumer.max_offset(queue)
        consumer.receive_many(timeout_ms=300)


# -- a process -------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Random], Iterator[Volley]]] = {
    "headers": hostile_headers,
    "bodies": hostile_bodies,
    "routes": hostile_routes,
    "pipelines": hostile_pipelines,
    "spoiled": spoiled_frames,
}
SERVERS = "servers"


@dataclass
class Stop:
    """Set by SIGTERM."""

    is_set: bool = False

    def set(self, *_: object) -> None:
        self.is_set = True


def attack(kind: str, addresses: list[str], seed: int, door: Door, stop: Stop) -> Counter[str]:
    rng = Random(f"{kind} {seed}")
    if kind == SERVERS:
        did: Counter[str] = Counter()
        uses = use_hostile_servers(rng, door, did)
        begin()
        while not stop.is_set:
            next(uses)
        return did
    attacker, volleys = Attacker(rng, addresses, door), KINDS[kind](rng)
    attacker.send(next(volleys))
    begin()
    while not stop.is_set:
        attacker.send(next(volleys))
    return attacker.did


def begin() -> None:
    sys.stdout.write("attacking\n")
    sys.stdout.flush()


def main() -> None:
    kind, nameserver, broker, seed, door = sys.argv[1:]
    # The machine's cores are first for those who are attacked.
    os.nice(10)
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.set)
    addresses = [nameserver] if kind == "routes" else [nameserver, broker]
    did = attack(kind, addresses, int(seed), Door(*json.loads(door)), stop)
    sys.stdout.write(json.dumps(did))
    sys.stdout.flush()
    # Threads of hostile servers wait for clients that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
