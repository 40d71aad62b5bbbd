"""Everything a client can do wrong, at a running broker and nameserver.

Each bad request gets its response code and a remark that names cause and way out, or its
connection is closed and the log says why. After each one the broker still stores and hands out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import structlog.testing

from headrace_daemon.network import MemoryNetwork, TcpNetwork
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.codes import ResponseCode as Answer
from headrace_protocol.command import FLAG_ONEWAY
from headrace_protocol.frame import FRAME_BYTES_MAX
from headrace_protocol.header_codecs import SerializeType
from headrace_protocol.message import decode_records, encode_batch
from headrace_protocol.message_ids import decode_host
from tests.support.wires import (
    QUEUES,
    TOPIC,
    Daemons,
    daemons,
    framed,
    key_fields,
    networks,
    pull_fields,
    queue_fields,
    request,
    send_fields,
    topic_fields,
)

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
    bad(310, send_fields(b="New", d=0), 29, "requests it with 0 queues", "at least 1"),
    bad(310, send_fields(e=QUEUES), 29, f"queue {QUEUES}", TOPIC, "route"),
    bad(310, send_fields(e=2**31 - 1), 29, "queue 2147483647", "route"),
    bad(310, send_fields(b="ReadOnly"), 16, "ReadOnly", "perm is 4"),
    bad(310, send_fields(b="Closed"), 16, "Closed", "perm is 0"),
    bad(310, send_fields(b="SCHEDULE_TOPIC_XXXX"), 16, "SCHEDULE_TOPIC_XXXX", "of your own"),
    bad(310, send_fields(b="RMQ_SYS_TRANS_HALF_TOPIC"), 16, "HALF_TOPIC", "of your own"),
    bad(310, send_fields(b="SELF_TEST_TOPIC"), 16, "the broker itself writes it"),
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
    bad(11, pull_fields(expressionType="SQL92", subscription="a >"), 23, "line 1, column 4"),
    bad(11, pull_fields(expressionType="regex"), 1, "regex", "by tag"),
    bad(
        Code.BULK_PULL,
        pull_fields(maxMsgBytes=1, queueId=QUEUES),
        29,
        f"there are {QUEUES} to read",
    ),
    bad(Code.BULK_PULL, pull_fields(maxMsgBytes=1, topic="Missing"), 17, "Missing"),
    bad(Code.BULK_PULL, pull_fields(maxMsgBytes=1, expressionType="SQL92"), 23, "line 1"),
    bad(11, pull_fields(queueOffset=-1), 21),
    bad(11, pull_fields(queueOffset=-(2**63)), 21),
    bad(11, pull_fields(queueOffset=2**63 - 1), 21),
]

OTHERS = [
    *(bad(code, {}, 3, f"^ request type {code.value} not supported$")
      for code in (Code.GET_TOPIC_CONFIG_LIST, Code.GET_TOPIC_NAME_LIST)),
    bad(9999, {}, 3, "request type 9999 not supported"),
    bad(Code.POP_MESSAGE, {}, 29, "missing required field"),
    bad(Code.ACK_MESSAGE, {}, 29, "missing required field"),
    bad(Code.BATCH_ACK_MESSAGE, {}, 29, "malformed request", body=b"["),
    bad(Code.CHANGE_MESSAGE_INVISIBLETIME, {}, 29, "missing required field"),
    *(bad(Code.UPDATE_AND_CREATE_STATIC_TOPIC, topic_fields(), 29, "STATIC_TOPIC", body=body)
      for body in (b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000)),
    bad(Code.HEADRACE_HELLO, {}, 3, "not supported"),
    bad(-1, {}, 3, "request type -1 not supported"),
    *(bad(code, queue_fields(topic="Missing"), 17, "Missing", "create") for code in (30, 31, 32)),
    bad(29, queue_fields(topic="Missing", timestamp=0), 17, "Missing", "create"),
    *(bad(code, queue_fields(queueId=queue, timestamp=0), 29, f"queue {queue} of", "there are 2")
      for code in (29, 30, 31, 32) for queue in (QUEUES, 7, -1)),
    bad(29, queue_fields(timestamp=0, boundaryType="MIDDLE"), 29, "MIDDLE", "LOWER or UPPER"),
    bad(14, queue_fields(consumerGroup="nobody", setZeroIfNotFound=False), 22, "nobody"),
    bad(14, queue_fields(), 29, "QUERY_CONSUMER_OFFSET", "missing required field `consumerGroup`"),
    bad(15, queue_fields(consumerGroup="nobody", commitOffset=1), 26, "nobody", "create"),
    bad(15, queue_fields(consumerGroup="readers", commitOffset=-1), 29, "offset -1"),
    bad(15, queue_fields(consumerGroup="readers", commitOffset=1, queueId=-1), 29, "queue -1"),
    bad(15, queue_fields(consumerGroup="readers", commitOffset=1, topic="Missing"), 17, "Missing",
        "headrace topic create Missing"),
    *(bad(33, {"offset": offset}, 1, f"can not find message by the offset, {offset}")
      for offset in (-1, 1, 7, 10**6, 2**63 - 1)),
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
    bad(17, topic_fields(topic="rmq_sys_mine"), 29, "conflict with system topic"),
    bad(17, topic_fields(topic="broker-a"), 29, "conflict with system topic"),
    bad(17, topic_fields(attributes="nonsense"), 29, "nonsense", r"write \+key=value to set"),
    bad(17, topic_fields(attributes="+colour=red"), 29, "unknown key 'colour'"),
    bad(200, {}, 29, "a b", body=b'{"groupName":"a b"}'),
    bad(18, {}, 29, "topicConfigList", body=b"{}"),
    bad(215, {"topic": " "}, 29, "blank"),
    bad(215, {"topic": "TBW102"}, 29, "TBW102"),
    bad(215, {"topic": "SCHEDULE_TOPIC_XXXX"}, 29, "SCHEDULE_TOPIC_XXXX"),
    bad(202, {"topic": "Missing"}, 17, "headrace topic create Missing"),
    bad(351, {"topic": "Missing"}, 17, "headrace topic create Missing"),
    bad(222, {"topic": TOPIC, "group": "nobody", "timestamp": 0, "isForce": True}, 26, "nobody"),
    bad(25, {}, 29, "unknown key noSuchKey", "conf/broker.conf", body=b"noSuchKey=1\n"),
    bad(25, {}, 29, "nothing to change", body=b""),
    *(bad(25, {}, answer, *remark, body=b"longPollingEnable=false\n" + text)
      for text, answer, *remark in (
          (b"listenPort=1", 16, "listenPort can't change while", "in its file"),
          (b"traceOn=true", 16, "traceOn can't change while"),
          (b"colour=red", 29, "unknown key colour: see conf"),
          (b"deleteWhem=5", 29, "did you mean deleteWhen?"),
          (b"brokerPermission=9", 29, "expected at most 7"),
          (b"brokerPermission", 29, "body:2: expected key=value"),
      )),
    bad(25, {}, 29, "UTF-8|utf-8", body=b"\xff\xfe=1\n"),
    bad(321, queue_fields(topic="Missing", index=0, count=1), 1, "Missing"),
]  # fmt: skip

REGISTRATION = {
    "brokerName": "b", "brokerAddr": "1.2.3.4:1", "clusterName": "c", "brokerId": 0,
    "haServerAddr": "1.2.3.4:2",
}  # fmt: skip
GOOD_TOPIC = {"topicName": "T", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
BAD_QUEUES = (
    {"readQueueNums": 2**31 - 1},
    {"writeQueueNums": 65_537},
    {"readQueueNums": -1},
    {"perm": 16},
    {"perm": -1},
)


def registered(**changes: Any) -> bytes:
    """The body of a registration with one topic, and one that is good."""
    topics = ({**GOOD_TOPIC, **changes}, {**GOOD_TOPIC, "topicName": "U"})
    table = {topic["topicName"]: topic for topic in topics}
    return json.dumps({"topicConfigSerializeWrapper": {"topicConfigTable": table}}).encode()


ONE_TOPIC = registered(topicName="U")
AT_THE_NAMESERVER = [
    bad(9999, {}, 3, "request type 9999 not supported"),
    bad(310, send_fields(), 3, "310 not supported"),
    bad(105, {}, 29, "GET_ROUTEINFO_BY_TOPIC", "missing required field `topic`"),
    bad(105, {"topic": "Missing"}, 17, "Missing"),
    bad(105, {"topic": ""}, 17, "topic"),
    bad(103, {"brokerName": "b"}, 29, "REGISTER_BROKER", "missing required field"),
    bad(104, {}, 29, "UNREGISTER_BROKER"),
    bad(101, {"namespace": "n", "key": "k"}, 22, "^no value for key k in namespace n$"),
    bad(219, {"namespace": "n"}, 22, "^namespace n is empty$"),
    bad(100, {"namespace": "n"}, 29, "missing required field"),
    bad(318, {}, 16, "edit nameserver.conf", body=b"noSuchKey=1"),
    bad(217, {"topic": "T"}, 29, body=b"{"),
    bad(322, {"brokerName": "b", "brokerAddr": "1.2.3.4:1", "clusterName": "c", "brokerId": 0}, 29,
        "QUERY_DATA_VERSION", body=b"]"),
    *(bad(100, {"namespace": "n", "key": "k", "value": "v", name: "x" * length}, 29)
      for name, length in (("value", 64 * 1024 + 1), ("key", 256), ("namespace", 256))),
    *(bad(103, {**REGISTRATION, name: value}, 29, body=b"{}")
      for name, values in (
          ("brokerAddr", ("", "10.0.0.2", "10.0.0.2:0", "10.0.0.2:65536", "a\0b:1", "a b:1",
                          "x" * 300 + ":1")),
          ("brokerName", ("", "b 1", "b\x1b[2J", "x" * 256)),
          ("clusterName", ("", "x" * 256)),
          ("haServerAddr", ("\n:1",)),
          ("__ZONE_NAME", ("x" * 256,)),
      ) for value in values),
    *(bad(103, REGISTRATION, 29, body=registered(**change)) for change in BAD_QUEUES),
    *(bad(103, REGISTRATION, 29, body=registered(topicName=name))
      for name in ("", "a b", "x" * 256, "a\x1b")),
    *(bad(217, {"topic": "N"}, 29,
          body=json.dumps({"queueDatas": [{"brokerName": "b0", **change}]}).encode())
      for change in BAD_QUEUES),
    *(bad(103, {**REGISTRATION, **changes}, answer, *remark, body=body)
      for changes, body, answer, remark in (
          ({"bodyCrc32": 5}, b"{}", 1, ("2 bytes has CRC 598130499, but the header says 5",)),
          ({}, b"{", 29, (r"malformed request REGISTER_BROKER \(103\): expected a key",)),
          ({}, b'{"topicConfigSerializeWrapper":5}', 29, ("Expected `object`, got `int` - at ",)),
          ({}, b"\xff\xfe", 29, ("not UTF-8",)),
          ({}, b"[" * 5000, 29, ("more than 64 levels of nesting",)),
          ({}, ONE_TOPIC, 1, ("first registration must name all its topics",)),
          ({"compressed": True}, b"{}", 29, ("compressed register body: .*incorrect header",)),
          ({"brokerId": "first"}, b"{}", 29, (r"\$\.brokerId",)),
      )),
]  # fmt: skip


async def faults(daemons: Daemons, case: Bad, codec: SerializeType, address: str = "") -> list[str]:
    """Faults of the answer to one bad request, and of the broker after it."""
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


async def everything(under_test: Daemons) -> list[object]:
    """The messages, topics, settings and brokers that a bad request could change."""
    running = under_test.running
    found: list[object] = [await under_test.max_offset()]
    # A refused batch may have created the topic of retries.
    async with under_test.wire() as wire:
        await wire.ask(request(310, send_fields(b="%RETRY%g"), b"retry"))
    for address, codes in ((running.broker, (21, 26)), (running.nameserver, (106, 206))):
        async with under_test.wire(address) as wire:
            found += [(await wire.ask(request(code)))[1] for code in codes]
    async with under_test.wire() as wire:
        fields = queue_fields(consumerGroup="readers", setZeroIfNotFound=False)
        found.append((await wire.ask(request(14, fields)))[0].code)
    return found


@pytest.mark.slow
@networks
@pytest.mark.parametrize("codec", list(SerializeType))
async def test_bad_requests_are_answered(
    network: Callable[[], MemoryNetwork | TcpNetwork], codec: SerializeType
) -> None:
    wrong: list[str] = []
    async with daemons(network()) as under_test:
        before = await everything(under_test)
        for case in (*SENDS, *PULLS, *OTHERS):
            if fits(case, codec):
                wrong += await faults(under_test, case, codec)
        for case in AT_THE_NAMESERVER:
            if fits(case, codec):
                wrong += await faults(under_test, case, codec, under_test.running.nameserver)
        assert not wrong, "\n".join(wrong)
        assert await everything(under_test) == before, "a refused request changed something"


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


CLOSING = {
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n": "HTTP",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "HTTP/2",
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
