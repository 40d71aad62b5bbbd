"""Everything a client can do wrong, at a running broker and nameserver.

Each bad request gets its response code and a remark that names cause and way out, or its
connection is closed and the log says why. After each one the broker still stores and hands out.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import pytest
import structlog.testing
import trio
import trio.testing
from anyio.abc import ByteStream

from headrace.embedded import Embedded, run_daemons
from headrace_daemon.network import MemoryNetwork, TcpNetwork
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.codes import ResponseCode as Answer
from headrace_protocol.command import FLAG_ONEWAY, Command
from headrace_protocol.frame import FRAME_BYTES_MAX, FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.message import decode_records, encode_batch
from headrace_protocol.message_ids import decode_host

TOPIC = "Flights"
QUEUES = 2
JSON = SerializeType.JSON


# -- a client that says what it likes --------------------------------------------------------------


class Wire:
    """One connection, on which any bytes can be sent."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._reader = FrameReader()
        self._received: list[tuple[Command, bytes]] = []

    async def send(self, data: bytes) -> None:
        await self.stream.send(data)

    async def receive(self) -> tuple[Command, bytes]:
        """The next frame; EndOfStream or BrokenResourceError when the other side has closed."""
        while not self._received:
            for serialize_type, header, body in self._reader.feed(await self.stream.receive()):
                self._received.append((decode_header(serialize_type, header), bytes(body)))
        return self._received.pop(0)

    async def ask(self, request: bytes) -> tuple[Command, bytes]:
        await self.send(request)
        with trio.fail_after(5):
            return await self.receive()

    async def closed(self) -> None:
        """Wait until the other side has closed; whatever it said before is dropped."""
        with trio.fail_after(5):
            try:
                while True:
                    await self.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, OSError):
                pass


def request(
    code: int,
    fields: dict[str, Any] | None = None,
    body: bytes = b"",
    *,
    codec: SerializeType = JSON,
    flag: int = 0,
    opaque: int = 1,
) -> bytes:
    frame = encode_frame(
        codec, code, opaque, flag=flag, fields=fields or {}, body_bytes=len(body), language="JAVA"
    )
    return frame + body


def send_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "a": "producers", "b": TOPIC, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1795235766905,
        "h": 0, "i": "KEYS\x01k\x02", "j": 0, "k": False, "m": False,
    }  # fmt: skip
    return {**fields, **changes}


def pull_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "consumerGroup": "readers", "topic": TOPIC, "queueId": 0, "queueOffset": 0,
        "maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0,
        "subVersion": 0, "subscription": "*", "expressionType": "TAG",
    }  # fmt: skip
    return {**fields, **changes}


def queue_fields(**changes: Any) -> dict[str, Any]:
    return {"topic": TOPIC, "queueId": 0, **changes}


def key_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "topic": TOPIC, "key": "none", "maxNum": 9, "beginTimestamp": 0, "endTimestamp": 2**63 - 1
    }  # fmt: skip
    return {**fields, **changes}


def topic_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "topic": "Fresh", "defaultTopic": "TBW102", "readQueueNums": QUEUES,
        "writeQueueNums": QUEUES, "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0,
        "order": False,
    }  # fmt: skip
    return {**fields, **changes}


# -- daemons under test ----------------------------------------------------------------------------


class Daemons:
    """A broker and a nameserver with a few topics, and ways to look at them."""

    def __init__(self, running: Embedded) -> None:
        self.running = running
        self._count = 0

    @asynccontextmanager
    async def wire(self, address: str = "") -> AsyncIterator[Wire]:
        stream = await self.running.connect(address or self.running.broker)
        async with stream:
            yield Wire(stream)

    async def prepare(self) -> None:
        async with self.wire() as wire:
            for topic, perm in ((TOPIC, 6), ("ReadOnly", 4), ("WriteOnly", 2), ("Closed", 0)):
                fields = topic_fields(topic=topic, perm=perm)
                command, _ = await wire.ask(request(Code.UPDATE_AND_CREATE_TOPIC, fields))
                assert command.code == 0, command.remark

    async def serves(self) -> None:
        """Store a message and get it back."""
        self._count += 1
        body = b"round trip %d" % self._count
        async with self.wire() as wire:
            command, _ = await wire.ask(request(Code.SEND_MESSAGE_V2, send_fields(b="Alive"), body))
            assert command.code == 0, command.remark
            offset = command.ext()["queueOffset"]
            fields = pull_fields(topic="Alive", queueOffset=offset)
            command, records = await wire.ask(request(Code.PULL_MESSAGE, fields))
            assert command.code == 0, command.remark
            assert [message.body for message in decode_records(records)] == [body]

    async def max_offset(self, queue_id: int = 0) -> int:
        async with self.wire() as wire:
            fields = queue_fields(queueId=queue_id)
            command, _ = await wire.ask(request(Code.GET_MAX_OFFSET, fields))
            return int(command.ext()["offset"])


@asynccontextmanager
async def daemons(network: MemoryNetwork | TcpNetwork) -> AsyncIterator[Daemons]:
    async with run_daemons(None, network=network) as running:
        under_test = Daemons(running)
        await under_test.prepare()
        await under_test.serves()
        yield under_test
        await under_test.serves()


networks = pytest.mark.parametrize("network", [MemoryNetwork, TcpNetwork])


# -- requests that are answered --------------------------------------------------------------------


class Bad(NamedTuple):
    """A bad request, and the answer to it.

    remark: what the remark names, as regular expressions: the cause, the way out.
    """

    code: int
    fields: dict[str, Any]
    body: bytes
    answer: int
    remark: tuple[str, ...]


def bad(code: int, fields: dict[str, Any], answer: int, *remark: str, body: bytes = b"body") -> Bad:
    return Bad(code, fields, body, answer, remark)


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


SENDS = [
    bad(310, without(send_fields(), "g"), 29, "SEND_MESSAGE_V2", "missing required field `g`"),
    bad(310, without(send_fields(), "b"), 29, "missing required field `b`"),
    bad(310, send_fields(e="one"), 29, "`int`", r"\$\.e"),
    bad(310, send_fields(e=2**31), 29, r"\$\.e"),
    bad(310, send_fields(g=2**63), 29, r"\$\.g"),
    bad(310, send_fields(k="perhaps"), 29, r"`bool", r"\$\.k"),
    bad(10, send_fields(), 29, "SEND_MESSAGE", "missing required field `producerGroup`"),
    bad(310, send_fields(b="Missing", c="Missing"), 17, "Missing", "create"),
    bad(310, send_fields(b="no such!"), 29, "no such!", "only letters"),
    bad(310, send_fields(b="t" * 128), 29, "128 characters", "the maximum is 127"),
    bad(310, send_fields(b="New", d=0), 29, "0 queues", "at least 1"),
    bad(310, send_fields(e=QUEUES), 29, f"queue {QUEUES}", TOPIC, "route"),
    bad(310, send_fields(e=2**31 - 1), 29, "queue 2147483647", "route"),
    bad(310, send_fields(b="ReadOnly"), 16, "ReadOnly", "perm is 4"),
    bad(310, send_fields(b="Closed"), 16, "Closed", "perm is 0"),
    bad(310, send_fields(b="SCHEDULE_TOPIC_XXXX"), 16, "SCHEDULE_TOPIC_XXXX", "of your own"),
    bad(310, send_fields(b="RMQ_SYS_TRANS_HALF_TOPIC"), 16, "HALF_TOPIC", "of your own"),
    bad(310, send_fields(), 13, "has no body", body=b""),
    bad(310, send_fields(), 13, r"4194305", r"4194304", body=b"x" * 4_194_305),
    bad(310, send_fields(i="a\x01" + "b" * 40_000), 13, "properties of 40", "32767", "body"),
    bad(310, send_fields(i="DELAY\x01x\x02"), 13, "DELAY=x", "expected a number"),
    bad(310, send_fields(i="TRAN_MSG\x01true\x02"), 13, "TRAN_MSG=true without PGROUP"),
    bad(310, send_fields(f=4), 13, "sysFlag 4 without TRAN_MSG=true"),
    bad(310, send_fields(f=0x80), 3, "inner batches", "sysFlag 128"),
    bad(310, send_fields(f=-1), 3, "sysFlag -1"),
    bad(320, send_fields(m=True), 13, "batch", "byte 0", "whole messages", body=b"x"),
    bad(320, send_fields(m=True), 13, "has no body", body=b""),
    bad(310, send_fields(m=True, b="%RETRY%g"), 13, "batch", "one by one"),
]

PULLS = [
    bad(11, without(pull_fields(), "queueOffset"), 29, "missing required field `queueOffset`"),
    bad(11, pull_fields(maxMsgNums="many"), 29, r"\$\.maxMsgNums"),
    bad(11, pull_fields(topic="Missing"), 17, "Missing", "create"),
    bad(11, pull_fields(topic="WriteOnly"), 16, "WriteOnly", "perm is 2"),
    bad(361, pull_fields(topic="Closed"), 16, "Closed", "perm is 0"),
    bad(11, pull_fields(queueId=QUEUES), 29, f"queue {QUEUES}", "route"),
    bad(11, pull_fields(queueId=-1), 29, "queue -1", "route"),
    bad(11, pull_fields(consumerGroup="bad group!"), 29, "bad group!"),
    bad(11, pull_fields(consumerGroup=""), 29, "group"),
    bad(11, pull_fields(sysFlag=0), 24, "readers"),
    bad(11, pull_fields(expressionType="SQL92", subscription="a > 1"), 1, "SQL92", "by tag"),
    bad(11, pull_fields(expressionType="regex"), 1, "regex", "by tag"),
    bad(11, pull_fields(queueOffset=-1), 21),
    bad(11, pull_fields(queueOffset=-(2**63)), 21),
    bad(11, pull_fields(queueOffset=2**63 - 1), 21),
]

OTHERS = [
    bad(9999, {}, 3, "request type 9999 not supported"),
    bad(Code.POP_MESSAGE, {}, 3, "request type 200050 not supported"),
    *(bad(Code.UPDATE_AND_CREATE_STATIC_TOPIC, topic_fields(), 29, "STATIC_TOPIC", body=body)
      for body in (b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000)),
    bad(Code.HEADRACE_HELLO, {}, 3, "not supported"),
    bad(-1, {}, 3, "request type -1 not supported"),
    *(bad(code, queue_fields(topic="Missing"), 17, "Missing", "create") for code in (30, 31, 32)),
    bad(29, queue_fields(topic="Missing", timestamp=0), 17, "Missing", "create"),
    *(bad(code, queue_fields(queueId=7), 29, "queue 7", "route") for code in (30, 31, 32)),
    bad(30, queue_fields(queueId=-1), 29, "queue -1", "route"),
    bad(29, queue_fields(timestamp=0, boundaryType="MIDDLE"), 29, "MIDDLE", "LOWER or UPPER"),
    bad(14, queue_fields(consumerGroup="nobody", setZeroIfNotFound=False), 22, "nobody"),
    bad(14, queue_fields(), 29, "QUERY_CONSUMER_OFFSET", "missing required field `consumerGroup`"),
    bad(15, queue_fields(consumerGroup="nobody", commitOffset=1), 26, "nobody", "create"),
    bad(15, queue_fields(consumerGroup="readers", commitOffset=-1), 29, "-1"),
    bad(15, queue_fields(consumerGroup="readers", commitOffset=1, topic="Missing"), 17, "Missing"),
    bad(33, {"offset": -1}, 1, "-1"),
    bad(33, {"offset": 7}, 1, "7"),
    bad(33, {"offset": 2**63 - 1}, 1, "9223372036854775807"),
    bad(33, {}, 29, "VIEW_MESSAGE_BY_ID"),
    bad(12, key_fields(maxNum=-5, beginTimestamp=9, endTimestamp=-9), 22, "none"),
    bad(12, key_fields(indexType="X"), 29, "'X'", "K \\(keys\\)"),
    *(bad(code, {}, 29, RequestName, body=body)
      for code, RequestName in ((34, "HEART_BEAT"), (41, "LOCK_BATCH_MQ"), (42, "UNLOCK_BATCH_MQ"),
                                (46, "CHECK_CLIENT_CONFIG"), (200, "SUBSCRIPTIONGROUP"))
      for body in (b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000)),
    bad(34, {}, 29, "HEART_BEAT", "clientID",
        body=b'{"clientID":[5],"consumerDataSet":[],"producerDataSet":[]}'),
    bad(34, {}, 29, "group",
        body=b'{"clientID":"c","consumerDataSet":[{"groupName":"bad group"}]}'),
    bad(38, {"consumerGroup": "nobody"}, 1, "nobody"),
    bad(203, {"consumerGroup": "nobody"}, 206, "nobody"),
    bad(17, topic_fields(readQueueNums=-1), 29, "readQueueNums -1", "0 to"),
    bad(17, topic_fields(writeQueueNums=2**31 - 1), 29, "writeQueueNums 2147483647", "0 to"),
    bad(17, topic_fields(topic=TOPIC, readQueueNums=-(2**31)), 29, "readQueueNums -2147483648"),
    bad(17, topic_fields(perm=99), 29, "perm 99", "6 both"),
    bad(17, topic_fields(topic="a b"), 29, "'a b'", "only letters"),
    bad(17, topic_fields(topic="TBW102"), 29, "TBW102", "another name"),
    bad(17, topic_fields(topicFilterType="NO_TAG"), 29, "NO_TAG", "SINGLE_TAG"),
    bad(17, topic_fields(attributes="nonsense"), 29, "nonsense"),
    bad(18, {}, 29, "topicConfigList", body=b"{}"),
    bad(215, {"topic": " "}, 29, "blank"),
    bad(215, {"topic": "TBW102"}, 29, "TBW102"),
    bad(202, {"topic": "Missing"}, 17, "Missing"),
    bad(351, {"topic": "Missing"}, 17, "Missing"),
    bad(222, {"topic": TOPIC, "group": "nobody", "timestamp": 0, "isForce": True}, 26, "nobody"),
    bad(25, {}, 29, "unknown key noSuchKey", "conf/broker.conf", body=b"noSuchKey=1\n"),
    bad(25, {}, 16, "listenPort", "in its file", body=b"listenPort=1\n"),
    bad(25, {}, 29, "UTF-8|utf-8", body=b"\xff\xfe=1\n"),
    bad(321, queue_fields(topic="Missing", index=0, count=1), 1, "Missing"),
]  # fmt: skip

AT_THE_NAMESERVER = [
    bad(9999, {}, 3, "request type 9999 not supported"),
    bad(310, send_fields(), 3, "310 not supported"),
    bad(105, {}, 29, "GET_ROUTEINFO_BY_TOPIC", "missing required field `topic`"),
    bad(105, {"topic": "Missing"}, 17, "Missing"),
    bad(105, {"topic": ""}, 17, "topic"),
    bad(103, {"brokerName": "b"}, 29, "REGISTER_BROKER", "missing required field"),
    bad(104, {}, 29, "UNREGISTER_BROKER"),
    bad(101, {"namespace": "n", "key": "k"}, 22, "n", "k"),
    bad(219, {"namespace": "n"}, 22, "n"),
    bad(100, {"namespace": "n"}, 29, "missing required field"),
    bad(318, {}, 3, "318 not supported", body=b"noSuchKey=1"),
    bad(217, {"topic": "T"}, 29, body=b"{"),
    bad(322, {"brokerName": "b", "brokerAddr": "1.2.3.4:1", "clusterName": "c", "brokerId": 0}, 29,
        "QUERY_DATA_VERSION", body=b"]"),
    *(bad(103, {"brokerName": "b", "brokerAddr": "1.2.3.4:1", "clusterName": "c", "brokerId": 0,
                "haServerAddr": "1.2.3.4:2", **changes}, answer, *remark, body=body)
      for changes, body, answer, remark in (
          ({"bodyCrc32": 5}, b"{}", 1, ("CRC",)),
          ({}, b"{", 29, ("REGISTER_BROKER",)),
          ({"compressed": True}, b"{}", 29, ("compressed",)),
          ({"brokerId": "first"}, b"{}", 29, (r"\$\.brokerId",)),
      )),
]  # fmt: skip


async def faults(daemons: Daemons, case: Bad, codec: SerializeType, address: str = "") -> list[str]:
    """What is wrong with the answer to one bad request, and with the broker after it."""
    async with daemons.wire(address) as wire:
        command, _ = await wire.ask(request(case.code, case.fields, case.body, codec=codec))
        remark = command.remark or ""
        wrong = []
        if command.code != case.answer:
            wrong.append(f"code {command.code} instead of {case.answer}: {remark}")
        wrong += [
            f"no {text!r} in {remark!r}" for text in case.remark if not re.search(text, remark)
        ]
        # One-way requests get no answer, whatever they ask: the next answer is to the next request.
        await wire.send(request(case.code, case.fields, case.body, codec=codec, flag=FLAG_ONEWAY))
        command, _ = await wire.ask(request(9999, opaque=2))
        if (command.opaque, command.code) != (2, 3):
            wrong.append(f"the one-way request was answered: {command}")
    await daemons.serves()
    return [f"{case.code} {str(case.fields)[:60]} {case.body[:20]!r}: {text}" for text in wrong]


def fits(case: Bad, codec: SerializeType) -> bool:
    """A binary header has no codes of more than 16 bits, and no empty values."""
    has_form = -0x8000 <= case.code <= 0x7FFF and "" not in case.fields.values()
    return codec is not SerializeType.ROCKETMQ or has_form


@pytest.mark.slow
@networks
@pytest.mark.parametrize("codec", list(SerializeType))
async def test_bad_requests_are_answered(
    network: Callable[[], MemoryNetwork | TcpNetwork], codec: SerializeType
) -> None:
    wrong: list[str] = []
    async with daemons(network()) as under_test:
        before = await under_test.max_offset()
        for case in (*SENDS, *PULLS, *OTHERS):
            if fits(case, codec):
                wrong += await faults(under_test, case, codec)
        for case in AT_THE_NAMESERVER:
            if fits(case, codec):
                wrong += await faults(under_test, case, codec, under_test.running.nameserver)
        assert await under_test.max_offset() == before, "a refused message was stored"
    assert not wrong, "\n".join(wrong)


async def test_absurd_numbers_of_a_pull_are_limited() -> None:
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        for _ in range(3):
            await wire.ask(request(310, send_fields(), b"found"))
        for changes, count in (
            ({"maxMsgNums": 2**31 - 1}, 3),
            ({"maxMsgNums": 0}, 1),
            ({"maxMsgNums": -1}, 1),
            ({"maxMsgBytes": -1}, 3),
            ({"maxMsgBytes": 2**31 - 1}, 3),
            ({"suspendTimeoutMillis": -(2**63), "sysFlag": 6}, 3),
            ({"suspendTimeoutMillis": 2**63 - 1, "sysFlag": 6}, 3),
            ({"subVersion": -(2**63)}, 3),
            ({"subscription": "||" * 1000}, 3),
        ):
            command, body = await wire.ask(request(11, pull_fields(**changes)))
            assert command.code == Answer.SUCCESS, (changes, command.remark)
            assert len(decode_records(body)) == count, changes


async def test_a_pull_commits_no_impossible_offset() -> None:
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        await wire.ask(request(310, send_fields(), b"found"))
        await wire.ask(request(11, pull_fields(sysFlag=5, commitOffset=-5)))
        fields = queue_fields(consumerGroup="readers", setZeroIfNotFound=False)
        command, _ = await wire.ask(request(14, fields))
        assert command.code == Answer.QUERY_NOT_FOUND, command.ext()


@pytest.mark.parametrize("sys_flag", [0x10, 0x20, 0x30, 0x7FFFFF73, -(2**31)])
async def test_absurd_flags_of_a_message_leave_a_sound_record(sys_flag: int) -> None:
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        command, _ = await wire.ask(request(310, send_fields(f=sys_flag, h=-1, g=-1), b"body"))
        assert command.code == Answer.SUCCESS, command.remark
        message_id = command.ext()["msgId"]
        command, body = await wire.ask(request(11, pull_fields()))
        (message,) = decode_records(body)
        assert (message.stored_body, message.flag, message.born_timestamp) == (b"body", -1, -1)
        assert message.offset_message_id == message_id
        assert decode_host(message.born_host)[0] == "127.0.0.1"


async def test_a_batch_torn_at_any_byte_stores_nothing() -> None:
    whole = encode_batch([(0, b"first", b"KEYS\x01a\x02"), (0, b"second", b""), (0, b"3", b"")])
    item_ends = {0, *(len(whole[:at]) for at in (34, 62, len(whole)))}
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        for end in range(1, len(whole)):
            command, _ = await wire.ask(request(320, send_fields(m=True), whole[:end]))
            if end not in item_ends:
                assert command.code == Answer.MESSAGE_ILLEGAL, (end, command)
                assert "batch" in (command.remark or "")
        stored = await under_test.max_offset()
        assert stored == 1 + 2, "whole items at the start of a torn batch"
        command, _ = await wire.ask(request(320, send_fields(m=True), whole))
        assert command.code == Answer.SUCCESS
        assert await under_test.max_offset() == stored + 3


async def test_many_bad_requests_at_once_are_each_answered() -> None:
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        cases = [case for case in SENDS if len(case.body) < 100]
        await wire.send(
            b"".join(
                request(case.code, case.fields, case.body, opaque=opaque)
                for opaque, case in enumerate(cases)
            )
        )
        answers = [(await wire.receive())[0] for _ in cases]
        codes = {answer.opaque: answer.code for answer in answers}
        assert codes == {opaque: case.answer for opaque, case in enumerate(cases)}


# -- bytes that close their connection -------------------------------------------------------------


def framed(serialize_type: int, header: bytes) -> bytes:
    mark = serialize_type << 24 | len(header)
    return (4 + len(header)).to_bytes(4, "big") + mark.to_bytes(4, "big") + header


CLOSING = {
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n": "HTTP",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "HTTP/2",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03": "TLS",
    b"SSH-2.0-OpenSSH_9.2\r\n": "SSH",
    b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n": "the PROXY protocol",
    FRAME_BYTES_MAX.to_bytes(4, "big") + b"\0\0\0\x02{}": "over the limit of 16777216",
    b"\xff" * 64: "over the limit",
    b"\0\0\0\x06\0\0\0\x03{}": "a header longer than its frame",
    b"\0\0\0\0\0\0\0\0": "a header longer than its frame",
    framed(0, b"{"): "malformed JSON header",
    framed(0, b"[]"): "malformed JSON header",
    framed(0, b'{"opaque":1}'): "code",
    framed(0, b'{"code":"\xff"}'): "malformed JSON header",
    framed(0, b""): "malformed JSON header",
    framed(1, b"\0\n\0\0\0"): "malformed ROCKETMQ header",
    framed(1, request(11, pull_fields(), codec=SerializeType.ROCKETMQ)[8:-3]): "ROCKETMQ",
    framed(0x68, b"\xc1"): "malformed MSGPACK header",
    framed(2, b"{}"): "unknown header type 2",
}


@networks
async def test_what_is_no_frame_is_closed_and_logged(
    network: Callable[[], MemoryNetwork | TcpNetwork],
) -> None:
    async with daemons(network()) as under_test:
        for address in (under_test.running.broker, under_test.running.nameserver):
            for data, reason in CLOSING.items():
                with structlog.testing.capture_logs() as logs:
                    async with under_test.wire(address) as wire:
                        await wire.send(data)
                        await wire.closed()
                closed = [entry for entry in logs if entry["event"] == "client closed"]
                assert len(closed) == 1, (data, logs)
                assert reason in closed[0]["reason"], data
                assert closed[0]["log_level"] == "warning"
                await under_test.serves()


async def test_requests_before_the_bad_bytes_count() -> None:
    async with daemons(MemoryNetwork()) as under_test:
        before = await under_test.max_offset()
        async with under_test.wire() as wire:
            command, _ = await wire.ask(request(310, send_fields(), b"good"))
            assert command.code == Answer.SUCCESS
            await wire.send(framed(2, b"{}"))
            await wire.closed()
        assert await under_test.max_offset() == before + 1


# -- clients that do too little --------------------------------------------------------------------


@networks
async def test_half_frames_and_sudden_ends_harm_nobody(
    network: Callable[[], MemoryNetwork | TcpNetwork],
) -> None:
    frame = request(310, send_fields(), b"never whole")
    async with daemons(network()) as under_test:
        before = await under_test.max_offset()
        for end in range(0, len(frame), 5):
            async with under_test.wire() as wire:
                await wire.send(frame[:end])
                await under_test.serves()
        assert await under_test.max_offset() == before


@pytest.mark.slow
async def test_a_client_that_never_reads_holds_up_only_itself() -> None:
    async with daemons(TcpNetwork()) as under_test, under_test.wire() as greedy:
        for _ in range(4):
            command, _ = await greedy.ask(request(310, send_fields(), b"x" * 1_000_000))
            assert command.code == Answer.SUCCESS
        pull = request(11, pull_fields(maxMsgBytes=4_000_000))
        with structlog.testing.capture_logs() as logs:
            async with trio.open_nursery() as nursery:

                async def pull_without_end() -> None:
                    while True:
                        await greedy.send(pull * 10)

                nursery.start_soon(pull_without_end)
                while not logs:
                    await under_test.serves()
                nursery.cancel_scope.cancel()
        assert logs[0]["event"] == "slow reader paused"
        await under_test.serves()


@pytest.mark.slow
@networks
async def test_two_thousand_silent_clients(
    network: Callable[[], MemoryNetwork | TcpNetwork],
) -> None:
    async with daemons(network()) as under_test:
        streams = [await under_test.running.connect(under_test.running.broker) for _ in range(2000)]
        await under_test.serves()
        for stream in streams[::100]:
            command, _ = await Wire(stream).ask(request(9999))
            assert command.code == Answer.REQUEST_CODE_NOT_SUPPORTED
        for stream in streams:
            await stream.aclose()
