"""Halves in one store, opened in turn by headrace and by Apache's broker, after stops and kills."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from anyio import run

from headrace import Admin, PullConsumer
from headrace_protocol.bodies import HeartbeatData, ProducerData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import FLAG_ONEWAY
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.message import (
    TRANSACTION_COMMIT,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    decode_record,
    encode_properties,
)
from headrace_protocol.message_ids import decode_offset_message_id
from tests.conformance.peer import Peer, quick_peer

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.long]

TOPIC, GROUP = "swap_halves", "swap_producers"
SETTINGS = {
    # Apache's broker checks decided halves, too, if it checks more often than it gathers decisions.
    "transactionOpBatchInterval": "100",
    "transactionCheckInterval": "1000",
    "transactionTimeOut": "1000",
    "transactionCheckMax": "1000",
}
LIMIT_S = 120
# Some intervals of checks, each of which asks about all undecided halves.
ROUND_S = 3
# Queue offset and physical offset of a half.
Half = tuple[int, int]


class HalfClient:
    """A producer of transactions on one connection, which says what it is told to say."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), LIMIT_S)
        self._reader = FrameReader()
        self.checks: list[tuple[bytes, Half]] = []
        beat = HeartbeatData(client_id="p", producer_data_set=[ProducerData(group_name=GROUP)])
        self._ask(RequestCode.HEART_BEAT, {}, beat.encode())

    def close(self) -> None:
        self._socket.close()

    def send(self, body: bytes) -> Half:
        properties = {"UNIQ_KEY": body.decode(), "TRAN_MSG": "true", "PGROUP": GROUP}
        fields = {"a": GROUP, "b": TOPIC, "c": "TBW102", "d": 1, "e": 0, "f": TRANSACTION_PREPARED}
        text = encode_properties(properties).decode()
        more = {"g": int(time.time() * 1000), "h": 0, "i": text, "j": 0, "k": "false"}
        answer = self._ask(RequestCode.SEND_MESSAGE_V2, {**fields, **more}, body)
        _, physical_offset = decode_offset_message_id(answer["msgId"])
        return int(answer["queueOffset"]), physical_offset

    def end(self, half: Half, decision: int) -> None:
        fields = {
            "producerGroup": GROUP,
            "tranStateTableOffset": half[0],
            "commitLogOffset": half[1],
            "commitOrRollback": decision,
            "fromTransactionCheck": "true",
            "msgId": "x",
        }
        self._ask(RequestCode.END_TRANSACTION, fields)

    def asked(self) -> set[bytes]:
        """The bodies that this producer is asked about within a round."""
        del self.checks[:]
        end = time.monotonic() + ROUND_S
        while (left := end - time.monotonic()) > 0:
            self._read(left)
        return {body for body, _ in self.checks}

    def expect_checks(self, undecided: set[bytes], just_decided: Collection[bytes] = ()) -> None:
        """Wait for a round that asks about just the undecided halves.

        A busy broker may leave some out of a round. It asks about none that are decided, except
        that Apache's does until it has written the decision.
        """
        end = time.monotonic() + LIMIT_S
        while (asked := self.asked()) != undecided:
            assert asked <= undecided.union(just_decided)
            assert time.monotonic() < end, f"asked about {asked}, not {undecided}"

    def commit_when_asked(self, body: bytes) -> None:
        """Answer the next check of a half, at once.

        Apache's broker stores an undecided half anew for each check, and asks about the copy: a
        decision that comes after the next copy leaves that one undecided.
        """
        del self.checks[:]
        end = time.monotonic() + LIMIT_S
        while (left := end - time.monotonic()) > 0:
            self._read(left)
            for half in (half for asked, half in self.checks if asked == body):
                self.end(half, TRANSACTION_COMMIT)
                return
        raise AssertionError(f"not asked about {body!r}")

    def _ask(self, code: int, fields: dict[str, Any], body: bytes = b"") -> Any:
        frame = encode_frame(SerializeType.JSON, code, 7, fields=fields, body_bytes=len(body))
        self._socket.sendall(frame + body)
        end = time.monotonic() + LIMIT_S
        while (left := end - time.monotonic()) > 0:
            for command in self._read(left):
                assert command.code == ResponseCode.SUCCESS, command.remark
                return command.ext()
        raise AssertionError(f"no answer to request {code}")

    def _read(self, seconds: float) -> list[Any]:
        """The answers that come next; checks are kept."""
        self._socket.settimeout(seconds)
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return []
        assert data, "the broker closed the connection"
        answers = []
        for serialize_type, header, body in self._reader.feed(data):
            command = decode_header(serialize_type, header)
            if command.code == RequestCode.CHECK_TRANSACTION_STATE and not command.is_response:
                assert command.flag & FLAG_ONEWAY
                fields = command.ext()
                half = int(fields["tranStateTableOffset"]), int(fields["commitLogOffset"])
                self.checks.append((decode_record(bytes(body)).body, half))
            elif command.is_response:
                answers.append(command)
        return answers


async def create_topic(nameserver: str) -> None:
    async with Admin(nameserver=nameserver) as admin:
        await admin.create_topic(TOPIC, queues=1, if_not_exists=True)


async def bodies(nameserver: str) -> list[bytes]:
    async with PullConsumer(nameserver=nameserver) as consumer:
        (queue,) = await consumer.queues(TOPIC)
        count = await consumer.max_offset(queue)
        await consumer.assign([queue])
        messages: list[Any] = []
        while len(messages) < count:
            messages += await consumer.receive_many() or []
    return sorted(message.body for message in messages)


@contextmanager
def opened(name: str, store: Path) -> Iterator[tuple[Peer, HalfClient]]:
    """A broker on the store, and a producer that is connected to it until the block ends."""
    with quick_peer(name, store=store, settings=SETTINGS) as peer:
        run(create_topic, peer.nameserver)
        with closing(HalfClient(peer.broker)) as client:
            yield peer, client


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize(("first", "second"), [("headrace", "apache"), ("apache", "headrace")])
def test_each_half_is_decided_once(tmp_path: Path, first: str, second: str, end: str) -> None:
    store = tmp_path / "store"
    with opened(first, store) as (peer, client):
        halves = {body: client.send(body) for body in (b"a", b"b", b"c", b"d", b"e")}
        client.end(halves[b"a"], TRANSACTION_COMMIT)
        client.end(halves[b"b"], TRANSACTION_ROLLBACK)
        client.expect_checks({b"c", b"d", b"e"}, [b"a", b"b"] if first == "apache" else [])
        client.commit_when_asked(b"e")
        if end == "stop":
            peer.daemons["broker"].stop()
    with opened(second, store) as (peer, client):
        client.expect_checks({b"c", b"d"})
        client.commit_when_asked(b"c")
        if end == "stop":
            peer.daemons["broker"].stop()
    with opened(first, store) as (peer, client):
        client.expect_checks({b"d"})
        client.commit_when_asked(b"d")
        client.expect_checks(set(), [b"d"] if first == "apache" else [])
        assert run(bodies, peer.nameserver) == [b"a", b"c", b"d", b"e"]
