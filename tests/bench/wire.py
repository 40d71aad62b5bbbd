"""A load generator on plain sockets: many connections and requests that the Java client lacks.

Frames are Apache RocketMQ's JSON ones, written as its Java client writes them (compact, keys
sorted), so that both peers serve them on the way they serve their clients.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from headrace_protocol.codes import RequestCode, ResponseCode

IN_FLIGHT = 32
QUEUES = 8
TIMEOUT_S = 120
RETRY_S = 0.05
PULL_MESSAGES = 32
HOLD_MS = 60_000
COMMIT_OFFSET, SUSPEND, SUBSCRIPTION = 1, 2, 4
_PREFIX = struct.Struct(">II")
_RECEIVE_BYTES = 1 << 20
_ANSWER = b'"flag":1,'
_SUCCESS_START = b'{"code":0,'


class Refused(Exception):
    """An answer that says no."""

    def __init__(self, header: dict[str, Any]) -> None:
        super().__init__(f"code {header['code']}: {header.get('remark')}")
        self.code = int(header["code"])


# -- frames ----------------------------------------------------------------------------------------


def frame(
    code: RequestCode, fields: dict[str, Any], body: bytes = b"", *, opaque: int = 1
) -> bytes:
    """One request, ready to send as often as one likes."""
    command = {
        "code": int(code),
        "extFields": {key: _text(value) for key, value in fields.items()},
        "flag": 0,
        "language": "JAVA",
        "opaque": opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": 513,
    }
    header = json.dumps(command, separators=(",", ":"), sort_keys=True).encode()
    return _PREFIX.pack(4 + len(header) + len(body), len(header)) + header + body


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def send_frame(topic: str, queue_id: int, body: bytes, *, is_batch: bool = False) -> bytes:
    """A message, or a batch of them encoded as RocketMQ's."""
    fields = {
        "a": "bench_producer",
        "b": topic,
        "c": "TBW102",
        "d": QUEUES,
        "e": queue_id,
        "f": 0,
        "g": time.time_ns() // 1_000_000,
        "h": 0,
        "i": "UNIQ_KEY\x017F00000128B430946E0967F9F22001C4\x02WAIT\x01true\x02",
        "j": 0,
        "k": False,
        "m": is_batch,
    }
    code = RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2
    return frame(code, fields, body)


def pull_frame(
    group: str, topic: str, queue_id: int, offset: int, sys_flag: int, *, opaque: int = 1
) -> bytes:
    """A pull of up to 32 messages. sys_flag: of COMMIT_OFFSET, SUSPEND and SUBSCRIPTION."""
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": queue_id,
        "queueOffset": offset,
        "maxMsgNums": PULL_MESSAGES,
        "sysFlag": sys_flag,
        "commitOffset": offset,
        "suspendTimeoutMillis": HOLD_MS,
        "subVersion": 0,
        "subscription": "*",
        "expressionType": "TAG",
    }
    return frame(RequestCode.PULL_MESSAGE, fields, opaque=opaque)


def topic_frame(topic: str, queues: int) -> bytes:
    """Makes a topic."""
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
    }
    return frame(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)


def max_offset_frame(topic: str, queue_id: int) -> bytes:
    """Asks for the end of a queue: the cheapest request."""
    return frame(RequestCode.GET_MAX_OFFSET, {"topic": topic, "queueId": queue_id})


def heartbeat_frame(client_id: str, groups: Iterable[str], topic: str) -> bytes:
    """Joins groups that are subscribed to one topic."""
    subscription = {
        "classFilterMode": False,
        "codeSet": [],
        "expressionType": "TAG",
        "subString": "*",
        "subVersion": 1,
        "tagsSet": [],
        "topic": topic,
    }
    consumers = [
        {
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "consumeType": "CONSUME_PASSIVELY",
            "groupName": group,
            "messageModel": "CLUSTERING",
            "subscriptionDataSet": [subscription],
            "unitMode": False,
        }
        for group in groups
    ]
    body = {"clientID": client_id, "consumerDataSet": consumers, "producerDataSet": []}
    return frame(RequestCode.HEART_BEAT, {}, json.dumps(body).encode())


# -- connections -----------------------------------------------------------------------------------


class Client:
    """One blocking connection; answers come in the order in which they are served."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def call(self, request: bytes) -> None:
        """Wait for success; Refused otherwise."""
        self.send(request)
        self.take_answers(1)

    def take_answers(self, count: int) -> None:
        """Wait for as many answers. Raises Refused for one that is no success."""
        for header in self._headers(count):
            if not header.startswith(_SUCCESS_START):
                answer = json.loads(header)
                if answer["code"] != ResponseCode.SUCCESS:
                    raise Refused(answer)

    def answer(self) -> dict[str, Any]:
        """The header of the next answer."""
        answer: dict[str, Any] = json.loads(self._headers(1)[0])
        return answer

    def _headers(self, count: int) -> list[bytes]:
        """Headers of the next answers; what the daemon asks on its own account is skipped."""
        headers: list[bytes] = []
        while True:
            self._received = _cut(self._received, count, headers)
            if len(headers) == count:
                return headers
            self._receive()

    def _receive(self) -> None:
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the broker closed a connection of the load generator")
        self._received += data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _cut(received: bytes, count: int, headers: list[bytes]) -> bytes:
    """Move headers of whole answers to ``headers`` until there are ``count``; returns the rest."""
    position = 0
    while len(headers) < count and len(received) - position >= _PREFIX.size:
        length, mark = _PREFIX.unpack_from(received, position)
        if len(received) - position < 4 + length:
            break
        header = received[position + 8 : position + 8 + (mark & 0xFFFFFF)]
        position += 4 + length
        if _ANSWER in header:
            headers.append(header)
    return received[position:]


class Rotation:
    """Requests sent in turn over connections in turn, 32 unanswered at a time by default."""

    def __init__(
        self, clients: Sequence[Client], frames: Iterable[bytes], in_flight: int = IN_FLIGHT
    ) -> None:
        """frames: without end."""
        self._width = min(in_flight, len(clients))
        self._depth = in_flight // self._width
        self._clients = itertools.cycle(clients)
        self._frames = iter(frames)

    def run(self, *, seconds: float = 0, count: int = 0) -> int:
        """Go on for ``seconds`` or at least ``count`` requests; returns how many it were."""
        done = 0
        deadline = time.monotonic() + seconds
        while done < count or time.monotonic() < deadline:
            clients = list(itertools.islice(self._clients, self._width))
            for client in clients:
                client.send(b"".join(itertools.islice(self._frames, self._depth)))
            for client in clients:
                client.take_answers(self._depth)
            done += self._width * self._depth
        return done


def call_until_accepted(client: Client, request: bytes) -> None:
    """As ``Client.call``, again while the broker says that it is busy."""
    while True:
        try:
            client.call(request)
        except Refused as refusal:
            if refusal.code != ResponseCode.SYSTEM_BUSY:
                raise
            time.sleep(RETRY_S)
        else:
            return
