"""Producer against scripted brokers: choice of queue, retries, time-outs, limits, batches."""

# ruff: noqa: PT012 - what blocks raise after a few statements is the point here

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Message, MessageQueue, Producer
from headrace.errors import (
    BrokerError,
    ClientClosed,
    ConfigurationError,
    InvalidMessage,
    NameserverUnavailable,
    NoQueue,
    RequestTimeout,
    RouteNotFound,
)
from headrace.producer.block import BLOCK_BYTES
from headrace.producer.encoding import Outgoing, SendTemplate
from headrace.producer.faults import AVOID_S
from headrace.producer.publication import Publication
from headrace.producer.selector import queue_index
from headrace.route import TopicRoute
from headrace_protocol.bodies import BrokerData, QueueData, TopicRouteData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.compression import decompress
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import decode_header
from headrace_protocol.headers import SendMessageHeaderV2
from headrace_protocol.message import decode_properties, decode_records
from headrace_protocol.message_ids import decode_offset_message_id
from headrace_protocol.serving import Reply
from tests.support.batches import iter_batch
from tests.support.scripted import (
    BUSY,
    ILLEGAL,
    Asked,
    Scripted,
    both_kinds,
    close,
    no_topic,
    producing,
    route,
    scripted_cluster,
    sent_bodies,
    sent_queue,
    stored,
    storing,
)

SEND = RequestCode.SEND_MESSAGE_V2
NO_TOPIC = Reply(code=ResponseCode.TOPIC_NOT_EXIST)


# -- keys and queues -------------------------------------------------------------------------------


# These numbers are a promise to every program that writes the same topics: never change them.
@pytest.mark.parametrize(
    ("key", "index"),
    [("", 0), ("a", 3), ("N12345", 6), ("order-17", 4), ("Zürich", 6), ("航空", 1), ("🛫", 7)],
)
def test_keys_go_to_fixed_queues(key: str, index: int) -> None:
    assert queue_index(key, 8) == index


@given(st.text(), st.integers(1, 100))
def test_a_key_always_has_a_queue(key: str, queue_count: int) -> None:
    assert 0 <= queue_index(key, queue_count) < queue_count


def publication(*broker_names: str) -> Publication:
    """The route of a topic with two queues on each broker."""
    data = TopicRouteData(
        queue_datas=[
            QueueData(broker_name=name, write_queue_nums=2, perm=6) for name in broker_names
        ],
        broker_datas=[
            BrokerData(broker_name=name, broker_addrs={0: f"{name}:1"}) for name in broker_names
        ],
    )
    return Publication("g", TopicRoute("T", data, 0))


def test_messages_without_a_key_take_turns() -> None:
    found = publication("a", "b")
    places = [found.target(b"", ()).queue for _ in range(5)]
    assert [(queue.broker_name, queue.queue_id) for queue in places] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 0)
    ]  # fmt: skip


def test_brokers_to_avoid_are_left_out_while_there_is_another() -> None:
    found = publication("a", "b")
    assert {found.target(b"", {"a"}).broker_name for _ in range(8)} == {"b"}
    assert {found.target(b"", {"a", "b"}).broker_name for _ in range(8)} == {"a", "b"}


# -- frames ----------------------------------------------------------------------------------------


@given(
    properties=st.text(),
    sys_flag=st.integers(0, 2**31 - 1),
    born=st.integers(0, 2**63 - 1),
    opaque=st.integers(0, 2**31 - 1),
    body=st.binary(min_size=1),
    topic=st.sampled_from(["T", "%RETRY%g", 'odd"%d%%b', "日本", "FLAG"]),
    batch=st.booleans(),
)
def test_a_frame_from_the_template_says_what_was_filled_in(
    properties: str, sys_flag: int, born: int, opaque: int, body: bytes, topic: str, batch: bool
) -> None:
    template = SendTemplate("group%s", topic, "broker-a", 3, batch=batch)
    outgoing = Outgoing(body, sys_flag, born, properties, ["id"], is_batch=batch)
    ((serialize_type, header, sent),) = FrameReader().feed(
        b"".join(template.frame(outgoing, opaque))
    )
    command = decode_header(serialize_type, header)
    assert (command.code, command.opaque, command.flag) == (template.code, opaque, 0)
    assert bytes(sent) == body
    assert command.header(SendMessageHeaderV2) == SendMessageHeaderV2(
        producer_group="group%s",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=3,
        sys_flag=sys_flag,
        born_timestamp=born,
        flag=0,
        properties=properties,
        reconsume_times=0,
        unit_mode=False,
        batch=batch,
        bname="broker-a",
    )


def test_the_frame_prefix_is_the_peers() -> None:
    outgoing = Outgoing(b"body", 0, 0, "", ["id"])
    prefix, header, body = SendTemplate("g", "T", "b", 0).frame(outgoing, 1)
    assert struct.unpack(">II", prefix) == (4 + len(header) + len(body), len(header))


# -- one message -----------------------------------------------------------------------------------


async def test_a_message_arrives_with_its_properties_and_an_id() -> None:
    async with producing(group="pg") as (p, _, (broker,)):
        broker.answer(SEND, stored(41))
        result = await p.send(
            Message("T", b"body", key="k", tag="t", properties={"x": "1"}, delay_level=3)
        )
        asked = broker.last(SEND)
        assert asked.body == b"body"
        assert asked.ext["a"] == "pg"
        assert asked.properties == {
            "UNIQ_KEY": result.message_id,
            "KEYS": "k",
            "TAGS": "t",
            "DELAY": "3",
            "x": "1",
        }
        assert (result.queue, result.queue_offset) == (MessageQueue("T", "broker-0", 0), 41)
        assert result.status is ResponseCode.SUCCESS


async def test_the_broker_hears_of_the_producer_and_of_its_end() -> None:
    async with scripted_cluster() as (nameserver, (broker,), network):
        client = Producer(nameserver=nameserver.address, connect=network.connect, group="pg")
        async with client as p:
            await p.send(Message("T", b"x"))
            assert b'"groupName":"pg"' in broker.last(RequestCode.HEART_BEAT).body
        assert broker.last(RequestCode.UNREGISTER_CLIENT).ext["producerGroup"] == "pg"


async def test_heartbeats_go_on(autojump_clock: object) -> None:
    async with producing() as (p, nameserver, (broker,)):
        await p.send(Message("T", b"x"))
        await trio.sleep(100)
        assert broker.count(RequestCode.HEART_BEAT) == 4
        assert nameserver.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) == 4


async def test_large_bodies_are_compressed() -> None:
    body = b"headrace " * 1000
    async with producing() as (p, _, (broker,)):
        await p.send(Message("T", body))
        asked = broker.last(SEND)
        assert (zlib.decompress(asked.body), asked.ext["f"]) == (body, str(0x301))
        await p.send(Message("T", body[:4095]))
        assert (broker.last(SEND).body, broker.last(SEND).ext["f"]) == (body[:4095], "0")
    async with producing(compress_from_bytes=None) as (p, _, (broker,)):
        await p.send(Message("T", body))
        assert broker.last(SEND).body == body


@pytest.mark.parametrize(("name", "flags"), [("zlib", 0x301), ("lz4", 0x101), ("zstd", 0x201)])
async def test_bodies_are_compressed_with_the_codec_that_is_named(name: Any, flags: int) -> None:
    body = b"headrace " * 1000
    async with producing(compression=name) as (p, _, (broker,)):
        await p.send(Message("T", body))
        asked = broker.last(SEND)
        assert asked.ext["f"] == str(flags)
        assert len(asked.body) < len(body)
        assert decompress(asked.body, flags) == body


@pytest.mark.parametrize("name", ["gzip", "", None, ["zlib"]])
def test_an_unknown_codec_is_refused_at_once(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"compression=.* must be 'zlib', 'lz4'"):
        Producer(compression=name, nameserver="127.0.0.1:65001")


@pytest.mark.parametrize(("name", "module"), [("lz4", "lz4"), ("zstd", "zstandard")])
def test_a_codec_without_its_package_says_what_to_install(
    name: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=f"pip install {module}"):
        Producer(compression=name, nameserver="127.0.0.1:65001")


async def test_a_chosen_queue_gets_the_message() -> None:
    async with producing(2, queues=4) as (p, _, brokers):
        queue = (await p.queues("T"))[6]
        result = await p.send(Message("T", b"x", key="ignored"), queue=queue)
        assert result.queue == queue == MessageQueue("T", "broker-1", 2)
        assert [broker.count(SEND) for broker in brokers] == [0, 1]


async def test_a_chosen_queue_that_is_not_there_is_an_error(autojump_clock: object) -> None:
    async with producing() as (p, _, _):
        with pytest.raises(NoQueue, match="broker-0/7"):
            await p.send(Message("T", b"x"), queue=MessageQueue("T", "broker-0", 7))


async def test_oneway_sends_ask_for_no_answer() -> None:
    async with producing() as (p, _, (broker,)):
        await p.send_oneway(Message("T", b"x"))
        await p.send(Message("T", b"y"))
        assert [asked.is_oneway for asked in broker.asked if asked.code == SEND] == [True, False]


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [BUSY, close, None], ids=["busy", "closed", "silent"])
async def test_another_broker_gets_what_one_could_not_take(
    failure: Callable[..., Any] | Reply | None, autojump_clock: object
) -> None:
    async with producing(2) as (p, _, (bad, good)):
        bad.answer(SEND, failure)
        result = await p.send(Message("T", b"x"))
        assert result.queue.broker_name == "broker-1"
        assert (bad.count(SEND), good.count(SEND)) == (1, 1)
        for _ in range(4):
            await p.send(Message("T", b"x"))
        assert bad.count(SEND) == 1, "a broker that failed is avoided for a while"
        bad.answer(SEND, stored())
        await trio.sleep(AVOID_S)
        for _ in range(2):
            await p.send(Message("T", b"x"))
        assert bad.count(SEND) == 2


async def test_a_broker_that_is_gone_is_replaced_by_another() -> None:
    async with producing(2) as (p, nameserver, (_, good)):
        gone = type(good)(address="127.0.0.1:65001")
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(gone, good))
        result = await p.send(Message("T", b"x"))
        assert result.queue.broker_name == "broker-1"


async def test_a_key_stays_on_its_queue_also_in_retries(autojump_clock: object) -> None:
    async with producing(2) as (p, _, brokers):
        home = queue_index("k", 2)
        brokers[home].answer(SEND, BUSY, BUSY, stored())
        result = await p.send(Message("T", b"x", key="k"))
        assert result.queue.broker_name == f"broker-{home}"
        assert brokers[home].count(SEND) == 3


async def test_the_last_error_is_raised_when_retries_do_not_help(autojump_clock: object) -> None:
    async with producing(delivery_timeout_ms=5000) as (p, _, (broker,)):
        broker.answer(SEND, BUSY)
        started = trio.current_time()
        with pytest.raises(BrokerError, match="dispatch is behind") as caught:
            await p.send(Message("T", b"x"))
        assert 4 <= trio.current_time() - started <= 5
        assert 8 <= broker.count(SEND) <= 15, "the pauses double up to a second"
        assert caught.value.code == ResponseCode.SYSTEM_BUSY


async def test_a_send_is_tried_again_when_the_broker_says(autojump_clock: object) -> None:
    busy = Reply(
        {"retryAfterMs": "3000"}, code=ResponseCode.SYSTEM_BUSY, remark="[quota] again in 3000 ms"
    )
    async with producing() as (p, _, (broker,)):
        broker.answer(SEND, busy, stored())
        started = trio.current_time()
        await p.send(Message("T", b"x"))
        assert 3 <= trio.current_time() - started <= 3.4
        assert broker.count(SEND) == 2


async def test_what_no_broker_would_take_is_not_tried_again() -> None:
    async with producing() as (p, _, (broker,)):
        broker.answer(SEND, ILLEGAL)
        with pytest.raises(BrokerError, match="MESSAGE_ILLEGAL"):
            await p.send(Message("T", b"x"))
        assert broker.count(SEND) == 1


async def test_no_answer_is_a_timeout_per_attempt(autojump_clock: object) -> None:
    async with producing(timeout_ms=2000, delivery_timeout_ms=0) as (p, _, (broker,)):
        broker.answer(SEND, None)
        started = trio.current_time()
        with pytest.raises(RequestTimeout):
            await p.send(Message("T", b"x"))
        assert trio.current_time() - started == pytest.approx(2)


@pytest.mark.parametrize("code", [10, 11, 12])
async def test_a_message_that_is_stored_but_not_safe_yet_is_a_success_that_says_so(
    code: int,
) -> None:
    async with producing() as (p, _, (broker,)):
        ok = stored()
        broker.answer(SEND, lambda asked: Reply(ok(asked).header, code=code))
        assert (await p.send(Message("T", b"x"))).status == code
        assert broker.count(SEND) == 1


# -- routes ----------------------------------------------------------------------------------------


async def test_a_topic_that_the_brokers_would_make_is_sent_to() -> None:
    async with producing() as (p, nameserver, (broker,)):

        def only_the_template(asked: Asked) -> Reply:
            if asked.ext["topic"] == "TBW102":
                return route(broker, queues=8, perm=7)
            return route(broker, queues=2) if broker.sends else NO_TOPIC

        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, only_the_template)
        result = await p.send(Message("New", b"x"))
        asked = broker.last(SEND)
        assert (asked.ext["b"], asked.ext["c"], asked.ext["d"]) == ("New", "TBW102", "4")
        assert result.queue.queue_id in range(4)
        assert len(await p.queues("New")) == 2


async def test_a_topic_whose_broker_comes_back_between_two_questions_is_not_taken_for_new() -> None:
    async with producing() as (p, nameserver, (broker,)):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, NO_TOPIC, route(broker, queues=8))
        # In none of the few queues that a new topic would get.
        key = next(f"key{n}" for n in range(100) if queue_index(f"key{n}", 8) >= 4)
        await p.send(Message("Known", b"x", key=key))
        asked = [each.ext["topic"] for each in nameserver.asked if "topic" in each.ext]
        assert asked == ["Known", "TBW102", "Known"]
        assert [sent_queue(each) for each in broker.sends] == [queue_index(key, 8)]


async def test_a_sender_waits_until_the_topic_that_it_made_has_a_route(
    autojump_clock: object,
) -> None:
    async with producing() as (p, nameserver, (broker,)):
        sent_at = math.inf

        def after_a_while(asked: Asked) -> Reply:
            if asked.ext["topic"] == "TBW102":
                return route(broker, perm=7)
            known = broker.sends and trio.current_time() - sent_at > 0.5
            return route(broker) if known else NO_TOPIC

        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, after_a_while)
        sent_at = trio.current_time()
        async with p.pipeline() as pipeline:
            await pipeline.send_all([Message("New", b"x")] * 3)
        assert await p.queues("New")
        assert len(broker.sent) == 3


async def test_a_topic_that_nobody_would_make_is_an_error_with_the_way_out() -> None:
    async with producing() as (p, nameserver, _):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, no_topic(awaits_broker=False))
        with pytest.raises(RouteNotFound, match="headrace topic create Missing") as caught:
            await p.send(Message("Missing", b"x"))
        assert not caught.value.retryable


@pytest.mark.parametrize("answer", [no_topic(awaits_broker=True), NO_TOPIC], ids=["ours", "apache"])
async def test_a_route_that_is_not_there_yet_is_waited_for(
    answer: Reply, autojump_clock: object
) -> None:
    async with producing() as (p, nameserver, (broker,)):

        def after_20_s(_asked: Asked) -> Reply:
            return route(broker) if trio.current_time() - started > 20 else answer

        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, after_20_s)
        started = trio.current_time()
        await p.send(Message("T", b"x"))


async def test_no_topic_is_to_be_created_while_its_broker_is_expected(
    autojump_clock: object,
) -> None:
    async with producing() as (p, nameserver, _):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, no_topic(awaits_broker=True))
        with pytest.raises(RouteNotFound, match="may yet register it") as caught:
            await p.send(Message("T", b"x"))
        assert "create" not in str(caught.value)
        assert caught.value.retryable


async def test_a_nameserver_that_tells_nothing_is_believed_once_it_was_up_for_a_period(
    autojump_clock: object,
) -> None:
    async with producing() as (p, nameserver, _):
        await p.send(Message("Known", b"x"))
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, NO_TOPIC)
        with pytest.raises(RouteNotFound, match="may yet register it"):
            await p.queues("Missing")
        await trio.sleep(31)
        with pytest.raises(RouteNotFound, match="headrace topic create Missing"):
            await p.send(Message("Missing", b"x"))
        with pytest.raises(RouteNotFound, match="may yet register it"):
            await p.queues("Known")
        await trio.sleep(700)
        with pytest.raises(RouteNotFound, match="headrace topic create Known"):
            await p.queues("Known")


async def test_a_topic_without_write_permission_has_no_queue(autojump_clock: object) -> None:
    async with producing() as (p, nameserver, (broker,)):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(broker, perm=4))
        with pytest.raises(NoQueue, match="no queue to write to"):
            await p.send(Message("T", b"x"))


async def test_the_second_nameserver_answers_for_a_dead_first_one() -> None:
    async with scripted_cluster() as (nameserver, _, network):
        addresses = f"127.0.0.1:65001;{nameserver.address}"
        async with Producer(nameserver=addresses, connect=network.connect) as p:
            await p.send(Message("T", b"x"))
        assert nameserver.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) == 1


async def test_dead_nameservers_are_all_named(autojump_clock: object) -> None:
    async with (
        scripted_cluster() as (_, _, network),
        Producer(nameserver="127.0.0.1:65001;127.0.0.1:65002", connect=network.connect) as p,
    ):
        with pytest.raises(NameserverUnavailable, match=r"127.0.0.1:65001.*127.0.0.1:65002"):
            await p.send(Message("T", b"x"))


async def test_a_known_route_outlives_its_nameserver(autojump_clock: object) -> None:
    async with producing() as (p, nameserver, (broker,)):
        await p.send(Message("T", b"x"))
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, close)
        await trio.sleep(100)
        await p.send(Message("T", b"x"))
        assert broker.count(SEND) == 2


# -- bad input -------------------------------------------------------------------------------------

AnyMessage: Any = Message  # takes what a type checker would refuse


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("T", b""), "0 bytes"),
        (Message("T", bytes(4 * 1024 * 1024 + 1)), "4194304"),
        (AnyMessage("T", "text"), "encode it"),
        (Message("bad topic", b"x"), "not a valid topic name"),
        (Message("", b"x"), "not a valid topic name"),
        (Message("T" * 128, b"x"), "not a valid topic name"),
        (Message("T", b"x", key="a\x01b"), "byte 1 or 2"),
        (Message("T", b"x", properties={"a": "b\x02"}), "byte 1 or 2"),
        (Message("T", b"x", properties={"TAGS": "t"}), "tag="),
        (Message("T", b"x", properties={"a": ""}), "empty"),
        (Message("T", b"x", properties={"a": "x" * 32768}), "32725"),
        (Message("T", b"x", properties={"a": "ü" * 16380}), "32725"),
        (Message("T", b"x", delay_level=19), "delay_level 19"),
        (AnyMessage(5, b"x"), "5 is not a valid topic name"),
        (AnyMessage("T", b"x", key=5), "key=5 is int: it must be str"),
        (AnyMessage("T", b"x", tag=5), "tag=5 is int: it must be str"),
        (AnyMessage("T", b"x", properties={"a": 5}), "'a' = 5 is int: the value must be a str"),
    ],
)
async def test_bad_messages_do_not_reach_the_wire(message: Message, reason: str) -> None:
    async with producing() as (p, _, (broker,)):
        with pytest.raises(InvalidMessage, match=reason):
            await p.send(message)
        async with p.pipeline() as pipeline:
            with pytest.raises(InvalidMessage, match=reason):
                await pipeline.send(message)
        assert not broker.asked


@pytest.mark.parametrize(
    ("nameserver", "reason"), [("nowhere", "HOST:PORT"), (";", "names no nameserver")]
)
def test_bad_nameservers_are_refused_at_once(nameserver: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Producer(nameserver=nameserver)


@pytest.mark.parametrize(
    "options", [{"timeout_ms": 0}, {"delivery_timeout_ms": -1}, {"compress_from_bytes": -1}]
)
def test_limits_that_cannot_work_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}=.*: must be at least"):
        Producer(**options, nameserver="127.0.0.1:65001")


def test_bad_groups_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="not a valid group name"):
        Producer("my group")
    with pytest.raises(ConfigurationError, match="first argument is the group: write nameserver="):
        Producer("localhost:9876")


async def test_a_producer_outside_its_block_is_an_error() -> None:
    p = Producer(nameserver="127.0.0.1:65001")
    with pytest.raises(ClientClosed, match="async with Producer"):
        await p.send(Message("T", b"x"))


async def test_what_the_block_raises_comes_out_as_it_is() -> None:
    async with scripted_cluster() as (nameserver, _, network):
        client = Producer(nameserver=nameserver.address, connect=network.connect)
        with pytest.raises(KeyError, match="mine"):
            async with client as p:
                await p.send(Message("T", b"x"))
                raise KeyError("mine")


async def test_a_time_limit_around_the_block_works(autojump_clock: object) -> None:
    with trio.move_on_after(7) as scope:
        async with producing():
            await trio.sleep_forever()
    assert scope.cancelled_caught


# -- batches ---------------------------------------------------------------------------------------


async def test_a_batch_is_one_request_per_queue() -> None:
    async with producing(queues=4) as (p, _, (broker,)):
        broker.answer(RequestCode.SEND_BATCH_MESSAGE, stored(5))
        results = await p.send_many([Message("T", b"%d" % n, tag="t") for n in range(100)])
        (asked,) = broker.sends
        assert (asked.code, asked.ext["m"]) == (RequestCode.SEND_BATCH_MESSAGE, "true")
        assert broker.sent == [b"%d" % n for n in range(100)]
        ((_, _, first),) = list(iter_batch(asked.body))[:1]
        assert decode_properties(first)["TAGS"] == "t"
        (result,) = results
        assert (result.message_count, result.queue_offset) == (100, 5)
        assert len(set(result.message_id.split(","))) == 100


async def test_a_broker_of_ours_gets_whole_records() -> None:
    async with producing(queues=4, headrace=True, group="pg") as (p, _, (broker,)):
        broker.answer_sends(storing())
        messages = [
            Message("T", b"%d" % n, tag="t", properties={"n": "x" * n}) for n in range(1, 101)
        ]
        (result,) = await p.send_many(messages)
        (asked,) = broker.sends
        assert asked.code == RequestCode.BULK_SEND
        assert (asked.ext["producerGroup"], asked.ext["topic"]) == ("pg", "T")
        sizes = struct.unpack(">100i", asked.body[:400])
        records = decode_records(asked.body[400:])
        assert [record.size for record in records] == list(sizes)
        assert [record.properties for record in records] == [
            {"TAGS": "t", "n": "x" * n} for n in range(1, 101)
        ]
        assert all(record.born_timestamp and record.topic == "T" for record in records)
        assert result.message_count == 100
        assert result.message_ids is result.offset_message_ids
        offsets = [decode_offset_message_id(message_id)[1] for message_id in result.message_ids]
        assert offsets == [sum(sizes[:n]) for n in range(100)]


@both_kinds
async def test_keys_of_a_batch_go_to_their_queues_in_order(ours: bool) -> None:
    async with producing(queues=4, headrace=ours) as (p, _, (broker,)):
        messages = [Message("T", b"%d" % n, key=f"k{n % 7}") for n in range(70)]
        await p.send_many(messages)
        expected = sorted_by_queue(messages)
        assert {sent_queue(asked): sent_bodies(asked) for asked in broker.sends} == expected
        broker.asked.clear()
        bodies = [message.body for message in messages]
        keys = [message.key for message in messages]
        await p.send_many(bodies, topic="T", keys=keys)
        assert {sent_queue(asked): sent_bodies(asked) for asked in broker.sends} == expected


def sorted_by_queue(messages: list[Message], queue_count: int = 4) -> dict[int, list[bytes]]:
    expected: dict[int, list[bytes]] = {}
    for message in messages:
        expected.setdefault(queue_index(message.key, queue_count), []).append(message.body)
    return expected


@both_kinds
async def test_a_batch_is_split_by_size_and_the_parts_take_turns(ours: bool) -> None:
    async with producing(queues=4, headrace=ours) as (p, _, (broker,)):
        bodies = [b"%07d" % n * 10_000 for n in range(80)]
        results = await p.send_many(bodies, topic="T")
        assert broker.sent == bodies
        assert max(len(asked.body) for asked in broker.sends) < BLOCK_BYTES + 70_000
        assert [len(sent_bodies(asked)) for asked in broker.sends] == [14, 14, 14, 14, 14, 10]
        assert {sent_queue(asked) for asked in broker.sends} == {0, 1, 2, 3}
        assert sum(result.message_count for result in results) == 80


@both_kinds
async def test_a_batch_to_a_chosen_queue_stays_in_order(ours: bool) -> None:
    async with producing(queues=4, headrace=ours) as (p, _, (broker,)):
        broker.answer_sends(storing())
        queue = (await p.queues("T"))[2]
        bodies = [bytes(100_000)] * 40
        results = await p.send_many(bodies, topic="T", keys=["k"] * 40, queue=queue)
        assert {sent_queue(asked) for asked in broker.sends} == {2}
        assert [result.queue_offset for result in results] == [0, 10, 20, 30]


@both_kinds
async def test_messages_of_several_topics_in_a_batch(ours: bool) -> None:
    async with producing(headrace=ours) as (p, _, (broker,)):
        results = await p.send_many([Message(f"T{n % 3}", b"%d" % n) for n in range(9)])
        assert [result.queue.topic for result in results] == ["T0", "T1", "T2"]
        assert broker.sent == [b"%d" % n for n in (0, 3, 6, 1, 4, 7, 2, 5, 8)]


async def test_messages_may_be_made_while_they_are_sent() -> None:
    async with producing(queues=2, headrace=True) as (p, _, (broker,)):
        made_when_asked = []

        def bodies() -> Iterator[bytes]:
            for _ in range(60):
                made_when_asked.append(len(broker.sends))
                yield bytes(500_000)

        await p.send_many(bodies(), topic="T")
        assert len(broker.sent) == 60
        assert made_when_asked[-1] > 10, "some are stored before the last ones are made"


async def test_empty_batches_and_delayed_messages() -> None:
    async with producing() as (p, _, _):
        assert await p.send_many([]) == []
        assert await p.send_many([], topic="T") == []
        with pytest.raises(InvalidMessage, match="singly"):
            await p.send_many([Message("T", b"x", delay_level=1)])
        with pytest.raises(InvalidMessage, match="singly"):
            await p.send_many([b"x", b"y"], topic="%RETRY%g")


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ([b"x"], {}, "bytes is no Message"),
        ([b"a", b""], {"topic": "T"}, "row 1: a body of 0 bytes"),
        ([b"a", "b"], {"topic": "T"}, "row 1: .* is str, not bytes"),
        ([b"x", bytes(4 * 1024 * 1024 + 1)], {"topic": "T"}, "row 1: .*4194304"),
        ([b"x"], {"topic": "T", "keys": []}, "0 keys for 1 messages"),
        (iter([b"x", b"y"]), {"topic": "T", "keys": ["a"]}, "1 keys for more messages"),
        ([b"x"], {"topic": "T", "keys": [7]}, r"keys\[0\]=7 is int"),
        ([b"x"], {"topic": "T", "tags": ["a\x02b"]}, "row 0: its tag .* byte 1 or 2"),
        ([b"x"], {"topic": "T", "tags": ["a"], "keys": ["k" * 32800]}, "32725"),
        ([b"x"], {"topic": "bad topic"}, "not a valid topic name"),
        ([Message("T", b"x")], {"keys": ["k"]}, "a Message has a key"),
        ([Message("T", b"x")], {"topic": "T"}, "row 0: .* is headrace.messages.Message, not bytes"),
        ([Message("T", b"x"), Message("T", b"")], {}, "row 1"),
        ([Message("T", b"x"), Message("U", b"")], {}, "0 bytes for U"),
        ([Message("T", b"x", properties={"TAGS": "t"})], {}, "tag="),
    ],
)
async def test_bad_batches_do_not_reach_the_wire(
    messages: Any, options: dict[Any, Any], reason: str
) -> None:
    async with producing(headrace=True) as (p, _, (broker,)):
        with pytest.raises(InvalidMessage, match=reason):
            await p.send_many(messages, **options)
        assert not broker.sends


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.binary(min_size=1), st.text("abcü", max_size=5), st.text("kö", max_size=2)),
        max_size=20,
    ),
    st.booleans(),
)
def test_batches_hold_what_went_in(items: list[tuple[bytes, str, str]], ours: bool) -> None:
    async def main() -> None:
        messages = [Message("T", body, tag=tag, key=key) for body, tag, key in items]
        async with producing(headrace=ours) as (p, _, (broker,)):
            await p.send_many(messages)
            first = sorted(found_in(broker))
            broker.asked.clear()
            bodies, tags, keys = zip(*items, strict=True) if items else ([], [], [])
            await p.send_many(bodies, topic="T", tags=tags, keys=keys)
            assert first == sorted(found_in(broker)) == sorted(items)

    trio.run(main)


def found_in(broker: Scripted) -> Iterator[tuple[bytes, str, str]]:
    for asked in broker.sends:
        for body, raw in with_properties(asked):
            its = decode_properties(raw)
            yield body, its.get("TAGS", ""), its.get("KEYS", "")


def with_properties(asked: Asked) -> list[tuple[bytes, bytes]]:
    if asked.code == SEND:
        return [(asked.body, asked.ext["i"].encode())]
    if asked.code == RequestCode.SEND_BATCH_MESSAGE:
        return [(bytes(body), raw) for _, body, raw in iter_batch(asked.body)]
    records = decode_records(asked.body[4 * int(asked.ext["count"]) :])
    return [(record.body, record.raw_properties) for record in records]


@both_kinds
@pytest.mark.parametrize("failure", [BUSY, close, None], ids=["busy", "closed", "silent"])
async def test_another_broker_gets_the_batch_that_one_could_not_take(
    failure: Callable[..., Any] | Reply | None, ours: bool, autojump_clock: object
) -> None:
    async with producing(2, headrace=ours) as (p, _, (bad, good)):
        bad.answer_sends(failure)
        bodies = [b"%06d" % n * 10_000 for n in range(40)]
        results = await p.send_many(bodies, topic="T")
        assert sorted(good.sent) == bodies
        assert sum(result.message_count for result in results) == 40
        assert {result.queue.broker_name for result in results} == {"broker-1"}


@both_kinds
async def test_a_batch_that_is_lost_for_good_is_an_error(
    ours: bool, autojump_clock: object
) -> None:
    async with producing(queues=2, headrace=ours, delivery_timeout_ms=100) as (p, _, (broker,)):
        broker.answer_sends(BUSY)
        with pytest.raises(BrokerError, match="dispatch is behind"):
            bodies = [bytes([n]) * 100_000 for n in range(50)]
            await p.send_many(bodies, topic="T", keys=["k"] * 50)
        home = queue_index("k", 2)
        assert {sent_queue(asked) for asked in broker.sends} == {home}
        assert {sent_bodies(asked)[0] for asked in broker.sends} == {bodies[0]}, (
            "later ones stay here"
        )


async def test_a_cancelled_batch_leaves_a_producer_that_works(autojump_clock: object) -> None:
    async with producing(queues=2, headrace=True, timeout_ms=60_000) as (p, _, (broker,)):
        await p.send(Message("T", b"x"))
        broker.answer_sends(None)
        with trio.move_on_after(1):
            await p.send_many([bytes(100_000)] * 50, topic="T")
        assert len(broker.sends) - 1 == 2, "one under way for each queue"
        broker.answer_sends(stored())
        assert len(await p.send_many([b"y", b"z"], topic="T")) == 1


async def test_a_broker_of_ours_may_want_no_whole_records() -> None:
    async with producing(headrace=True) as (p, _, (broker,)):
        broker.answer(RequestCode.BULK_SEND, Reply(code=3, remark="I have an IPv6 address"))
        for _ in range(2):
            await p.send_many([b"a", b"b"], topic="T")
        async with p.pipeline() as pipeline:
            await pipeline.send_all([Message("T", b"c")] * 2)
        codes = [asked.code for asked in broker.sends]
        assert codes == [RequestCode.BULK_SEND] + [RequestCode.SEND_BATCH_MESSAGE] * 3
