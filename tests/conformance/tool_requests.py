"""What dashboards, the exporter and mqadmin 4.9.8 ask of a cluster, and what they read of it.

From the sources of rocketmq-dashboard 1.0.0 (D1) and 2.1.0 (D2), rocketmq-exporter 0.0.3 (E), and
the tools of 4.9.8 (M). A path leads to a value of the answer's body: ``*`` stands for each value of
a map or list, which must have one, and ``@`` for each key; the word after a colon is its kind.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from headrace import Admin, Consumer, Message, Producer
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.fastjson import loads
from headrace_protocol.message_ids import decode_offset_message_id
from tests.conformance.probe import Answer, answer

NAMESERVER: Final = "nameserver"
BROKER: Final = "broker"


@dataclass(frozen=True)
class Asked:
    """A request of a tool.

    fields: those of its header, with names of ``Situation`` in braces. header, body: what is read.
    lines: keys of a body of lines ``key=value``. has_records: whether the body must have something.
    """

    by: str
    code: int
    fields: Mapping[str, str] = field(default_factory=dict)
    body: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    has_records: bool = False
    sent: str = ""
    at: str = BROKER

    def __str__(self) -> str:
        fields = ",".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.code} of {self.by} with {fields or 'nothing'}"


def _capacity(text: str) -> None:
    """As the exporter takes ``Total : 1.5 GiB, Free : 12.0 MiB.`` apart."""
    words = text.split(" ")
    for number, unit in ((words[2], words[3]), (words[6], words[7])):
        float(number)
        assert unit[0] in "BKMGTPE", unit


def _three(text: str) -> None:
    assert len([float(each) for each in text.split()]) == 3, text


def _flag(value: object) -> None:
    assert value in (True, False), value


def _text(value: object) -> None:
    assert isinstance(value, str), value


KINDS: Final[Mapping[str, Callable[[Any], object]]] = {
    "text": _text,
    "int": lambda value: int(str(value)),
    "float": float,
    "flag": _flag,
    # A number before its unit.
    "amount": lambda value: float(value.split(" ")[0]),
    "three": _three,
    "capacity": _capacity,
}

_ROUTES = ("brokerDatas.*.brokerName", "brokerDatas.*.cluster", "brokerDatas.*.brokerAddrs.0")
_QUEUES = tuple(
    f"queueDatas.*.{name}"
    for name in ("brokerName", "readQueueNums:int", "writeQueueNums:int", "perm:int")
)
_CLUSTER = tuple(f"brokerAddrTable.*.{name}" for name in ("brokerName", "cluster", "brokerAddrs.0"))
_TOPIC = ("topicName", "readQueueNums:int", "writeQueueNums:int", "perm:int", "order:flag")
_GROUP = (
    *("groupName", "consumeEnable:flag", "consumeFromMinEnable:flag"),
    *("consumeBroadcastEnable:flag", "consumeMessageOrderly:flag", "retryQueueNums:int"),
    *("retryMaxTimes:int", "brokerId:int", "whichBrokerWhenConsumeSlowly:int"),
    "notifyConsumerIdsChangedEnable:flag",
)
_CONNECTION = tuple(
    f"connectionSet.*.{name}" for name in ("clientId", "clientAddr", "language", "version:int")
)
_QUEUE_KEYS = tuple(f"offsetTable.@.{name}" for name in ("brokerName", "topic", "queueId:int"))
_PROGRESS = (
    *("consumeTps:float", *_QUEUE_KEYS),
    *(f"offsetTable.*.{name}:int" for name in ("brokerOffset", "consumerOffset", "lastTimestamp")),
)
_WINDOWS = tuple(
    f"{window}.{figure}:float"
    for window in ("statsMinute", "statsHour", "statsDay")
    for figure in ("sum", "tps", "avgpt")
)
_STATS = {
    "TOPIC_PUT_NUMS": "{topic}",
    "TOPIC_PUT_SIZE": "{topic}",
    "GROUP_GET_NUMS": "{topic}@{group}",
    "GROUP_GET_SIZE": "{topic}@{group}",
    "SNDBCK_PUT_NUMS": "{topic}@{group}",
    "BROKER_PUT_NUMS": "DefaultCluster",
    "BROKER_GET_NUMS": "DefaultCluster",
}
# Of 28. The exporter reads nothing of it if one is missing or cannot be parsed.
_RUNTIME = (
    *("brokerVersionDesc", "runtime", "brokerVersion:int"),
    *("putTps:three", "getMissTps:three", "getTotalTps:three", "getFoundTps:three"),
    *("getTransferredTps:three", "getTransferedTps:three", "commitLogDirCapacity:capacity"),
    *("putMessageDistributeTime", "remainHowManyDataToFlush:amount"),
    *("consumeQueueDiskRatio:float", "commitLogDiskRatio:float", "putMessageAverageSize:float"),
    *(
        f"{name}:int"
        for name in (
            *("msgPutTotalTodayNow", "msgPutTotalTodayMorning", "msgPutTotalYesterdayMorning"),
            *("msgGetTotalTodayNow", "msgGetTotalTodayMorning", "msgGetTotalYesterdayMorning"),
            *("sendThreadPoolQueueSize", "sendThreadPoolQueueCapacity"),
            *("pullThreadPoolQueueSize", "pullThreadPoolQueueCapacity"),
            *("queryThreadPoolQueueSize", "queryThreadPoolQueueCapacity"),
            *("sendThreadPoolQueueHeadWaitTimeMills", "pullThreadPoolQueueHeadWaitTimeMills"),
            *("queryThreadPoolQueueHeadWaitTimeMills", "pageCacheLockTimeMills"),
            *("bootTimestamp", "startAcceptSendRequestTimeStamp", "earliestMessageTimeStamp"),
            *("commitLogMinOffset", "commitLogMaxOffset", "dispatchBehindBytes"),
            *("dispatchMaxBuffer", "remainTransientStoreBufferNumbs"),
            *("getMessageEntireTimeMax", "putMessageEntireTimeMax"),
            *("putMessageTimesTotal", "putMessageSizeTotal"),
        )
    ),
)
_QUEUE = {"topic": "{topic}", "queueId": "0"}
_NEW_TOPIC = {
    "topic": "{topic}_new",
    "defaultTopic": "TBW102",
    "readQueueNums": "1",
    "perm": "6",
    "writeQueueNums": "1",
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": "0",
    "order": "false",
}
_PULL = {
    **_QUEUE,
    "consumerGroup": "{group}",
    "queueOffset": "0",
    "maxMsgNums": "1",
    "sysFlag": "4",
    "commitOffset": "0",
    "suspendTimeoutMillis": "0",
    "subscription": "*",
    "subVersion": "0",
    "expressionType": "TAG",
}

REQUESTS: Final = (
    Asked("D1 D2 E M", 206, body=("topicList.*",), at=NAMESERVER),
    Asked("D1 D2 E M", 106, body=("clusterAddrTable.*.*", *_CLUSTER), at=NAMESERVER),
    Asked("D1 D2 E M", 105, {"topic": "{topic}"}, (*_ROUTES, *_QUEUES), at=NAMESERVER),
    Asked("D1 D2", 304, body=("topicList.*", "brokerAddr"), at=NAMESERVER),
    Asked("M", 319, lines=("listenPort",), at=NAMESERVER),
    # -- the broker
    Asked("D1 D2", 305, body=("topicList.*",)),
    Asked("D1 D2 E M", 28, body=tuple(f"table.{name}" for name in _RUNTIME)),
    Asked("D1 D2 M", 26, lines=("brokerName", "brokerClusterName", "listenPort")),
    *(
        Asked("D1 D2 E M", 315, {"statsName": name, "statsKey": key}, _WINDOWS)
        for name, key in _STATS.items()
    ),
    Asked("M", 306),
    Asked("M", 316),
    # -- topics
    Asked("D1 D2 E M", 21, body=tuple(f"topicConfigTable.*.{name}" for name in _TOPIC)),
    Asked("D2", 351, {"topic": "{topic}"}, _TOPIC),
    Asked(
        "D1 D2 E M",
        202,
        {"topic": "{topic}"},
        (
            *_QUEUE_KEYS,
            *("offsetTable.*.minOffset:int", "offsetTable.*.maxOffset:int"),
            "offsetTable.*.lastUpdateTimestamp:int",
        ),
    ),
    Asked("D1 D2 E M", 300, {"topic": "{topic}"}, ("groupList.*",)),
    Asked("D1 D2 M", 29, {**_QUEUE, "timestamp": "{now}"}, header=("offset:int",)),
    Asked("D1 D2 M", 30, _QUEUE, header=("offset:int",)),
    Asked("D1 D2 M", 31, _QUEUE, header=("offset:int",)),
    Asked("D1 D2 M", 32, _QUEUE, header=("timestamp:int",)),
    Asked(
        "M",
        321,
        {**_QUEUE, "index": "0", "count": "2", "consumerGroup": ""},
        (
            *("queueData.*.physicOffset:int", "queueData.*.physicSize:int"),
            *("queueData.*.tagsCode:int", "minQueueIndex:int", "maxQueueIndex:int"),
        ),
    ),
    Asked("D1 D2 M", 17, _NEW_TOPIC),
    Asked("D1 D2 M", 215, {"topic": "{topic}_new"}),
    Asked("D1 D2 M", 216, {"topic": "{topic}_new"}, at=NAMESERVER),
    # -- messages
    Asked(
        "D1 D2 E",
        11,
        _PULL,
        header=("nextBeginOffset:int", "minOffset:int", "maxOffset:int"),
        has_records=True,
    ),
    Asked(
        "D1 D2 M",
        12,
        {
            "topic": "{topic}",
            "key": "{key}",
            "maxNum": "64",
            "beginTimestamp": "0",
            "endTimestamp": "{now}",
            "_UNIQUE_KEY_QUERY": "false",
        },
        header=("indexLastUpdateTimestamp:int", "indexLastUpdatePhyoffset:int"),
        has_records=True,
    ),
    Asked(
        "D1 D2 M",
        12,
        {
            "topic": "{topic}",
            "key": "{message_id}",
            "maxNum": "32",
            "beginTimestamp": "0",
            "endTimestamp": str(2**63 - 1),
            "_UNIQUE_KEY_QUERY": "true",
        },
        has_records=True,
    ),
    Asked("M", 33, {"offset": "{physical_offset}"}, has_records=True),
    # -- groups
    Asked("D1 D2 M", 201, body=tuple(f"subscriptionGroupTable.*.{name}" for name in _GROUP)),
    Asked(
        "D1 D2 E M",
        203,
        {"consumerGroup": "{group}"},
        (
            *("consumeType", "messageModel", "consumeFromWhere", *_CONNECTION),
            *("subscriptionTable.*.topic", "subscriptionTable.*.subString"),
        ),
    ),
    Asked("D1 D2 M", 208, {"consumerGroup": "{group}"}, _PROGRESS),
    Asked("D1 D2 E M", 208, {"consumerGroup": "{group}", "topic": "{topic}"}, _PROGRESS),
    Asked(
        "M", 303, {"group": "{group}", "topic": "{topic}"}, ("consumeTimeSpanSet.*.delayTime:int",)
    ),
    Asked(
        "M",
        317,
        {"isOrder": "false"},
        ("consumeStatsList.*.*.*.consumeTps:float", "totalDiff:int"),
    ),
    Asked("D1 D2 M", 200, sent='{{"groupName":"{group}_new"}}'),
    Asked("D1 M", 207, {"groupName": "{group}_new"}),
    Asked("D2", 207, {"groupName": "{group}_new", "cleanOffset": "true"}),
    # -- clients
    Asked("D1 D2 M", 204, {"producerGroup": "{producers}"}, _CONNECTION),
    Asked(
        "E",
        328,
        body=tuple(
            f"data.*.*.{name}" for name in ("clientId", "remoteIP", "language", "version:int")
        ),
    ),
    Asked(
        "D1 D2 E M",
        307,
        {"consumerGroup": "{group}", "clientId": "{client_id}", "jstackEnable": "false"},
        (
            *("mqTable.@.topic", "mqTable.@.brokerName", "mqTable.@.queueId:int"),
            *("mqTable.*.commitOffset:int", "mqTable.*.cachedMsgCount:int"),
            *("subscriptionSet.*.topic", "properties.PROP_CONSUMER_START_TIMESTAMP:int"),
            *("properties.PROP_CONSUME_TYPE", "properties.PROP_CONSUMEORDERLY"),
        ),
    ),
    Asked(
        "D1 D2 M",
        309,
        {"consumerGroup": "{group}", "clientId": "{client_id}", "msgId": "{offset_id}"},
        ("consumeResult", "order:flag", "autoCommit:flag", "spentTimeMills:int"),
    ),
    # -- resets, of a group with members and of one without
    Asked(
        "D1 D2 M",
        222,
        {
            "topic": "{topic}",
            "group": "{group}",
            "timestamp": "{now}",
            "isForce": "true",
        },
        ("offsetTable.@.brokerName", "offsetTable.@.queueId:int", "offsetTable.*:int"),
    ),
    Asked("D1 D2 M", 15, {**_QUEUE, "consumerGroup": "{group}_idle", "commitOffset": "1"}),
    Asked(
        "M",
        314,
        {
            "srcGroup": "{group}_idle",
            "destGroup": "{group}_idle2",
            "topic": "{topic}",
            "offline": "false",
        },
    ),
)


@asynccontextmanager
async def situation(nameserver: str) -> AsyncIterator[dict[str, str]]:
    """A topic with messages of one client that another consumes, which sends the first back.

    Returns the names for ``misread``.
    """
    number = random.randrange(1 << 32)
    topic, group, producers = f"T_{number}", f"G_{number}", f"P_{number}"
    seen = trio.Event()

    async def consume() -> None:
        bodies: set[bytes] = set()
        async for message in consumer:
            if not bodies:
                await message.retry(after=1)
            bodies.add(message.body)
            if len(bodies) == 2:
                seen.set()

    async with Admin(nameserver=nameserver) as admin:
        await admin.create_topic(topic, queues=1)
        for idle in (f"{group}_idle", f"{group}_idle2"):
            await admin.create_group(SubscriptionGroupConfig(group_name=idle))
        (node,) = await admin.cluster()
        async with (
            Producer(nameserver=nameserver, group=producers) as producer,
            Consumer(group, topic, nameserver=nameserver, start="earliest") as consumer,
            trio.open_nursery() as tasks,
        ):
            sent = [await producer.send(Message(topic, b"%d" % each, key="k")) for each in range(2)]
            tasks.start_soon(consume)
            await seen.wait()
            await consumer.commit()
            (connections,) = (await admin.members(group)).values()
            yield {
                "topic": topic,
                "group": group,
                "producers": producers,
                "key": "k",
                NAMESERVER: nameserver,
                BROKER: node.address,
                "client_id": connections.connection_set[0].client_id,
                "message_id": sent[1].message_id,
                "offset_id": sent[1].offset_message_id,
                "physical_offset": str(decode_offset_message_id(sent[1].offset_message_id)[1]),
            }
            tasks.cancel_scope.cancel()


def misread(names: Mapping[str, str], missing: Mapping[int, set[str]]) -> list[str]:
    """What tools cannot read of a cluster, a line for each.

    names: for ``Asked.fields``; also the addresses of nameserver and broker. missing: paths that
        the peer may lack, by code.
    """
    return [f"{each}: {line}" for each in REQUESTS for line in _misread(each, names, missing)]


def _misread(
    asked: Asked, names: Mapping[str, str], missing: Mapping[int, set[str]]
) -> Iterator[str]:
    now = {"now": str(time.time_ns() // 1_000_000)}
    fields = {name: value.format(**names, **now) for name, value in asked.fields.items()}
    body = asked.sent.format(**names).encode()
    got = answer(names[asked.at], asked.code, fields, body)
    if got.code:
        yield f"code {got.code}, {got.remark}"
        return
    known = missing.get(asked.code, set())
    for path, value in _values(asked, got):
        try:
            _check(path, value)
        except (AssertionError, ValueError, TypeError, LookupError, AttributeError) as error:
            if path not in known:
                yield f"{path}: {error!r}"
    if asked.has_records and not got.body:
        yield "no records"


def _values(asked: Asked, got: Answer) -> Iterator[tuple[str, Any]]:
    yield from ((path, got.fields) for path in asked.header)
    if asked.lines:
        lines = got.body.decode().splitlines()
        table = dict(line.split("=", 1) for line in lines if "=" in line)
        yield from ((path, table) for path in asked.lines)
    if asked.body:
        body = loads(got.body)
        yield from ((path, body) for path in asked.body)


def _check(path: str, value: Any) -> None:
    way, _, kind = path.partition(":")
    found = list(_reached(way.split("."), value))
    assert found, "there is none"
    for each in found:
        KINDS[kind or "text"](each)


def _reached(way: list[str], value: Any) -> Iterator[Any]:
    if not way:
        yield value
        return
    step, *rest = way
    match step:
        case "*":
            nexts = list(value.values() if isinstance(value, Mapping) else value)
        case "@":
            nexts = list(value)
        case _:
            nexts = [value[step] if step in value else value[int(step)]]
    for each in nexts:
        yield from _reached(rest, each)
