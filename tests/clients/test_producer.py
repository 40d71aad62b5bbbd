"""Producer and pipeline against scripted brokers: choice of queue, retries, time-outs, limits."""

# ruff: noqa: PT012 - what blocks raise after a few statements is the point here

from __future__ import annotations

import struct
import zlib

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Message, MessageQueue, Producer
from headrace.errors import (
    BrokerError,
    ClientClosed,
    ConfigurationError,
    ConnectFailed,
    HeadraceError,
    InvalidMessage,
    NameserverUnavailable,
    NoQueue,
    PipelineError,
    RequestTimeout,
    RouteNotFound,
)
from headrace.producer.encoding import Outgoing, SendTemplate
from headrace.producer.faults import AVOID_S
from headrace.producer.selector import QueueSelector, queue_index
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import decode_header
from headrace_protocol.headers import SendMessageHeaderV2
from headrace_protocol.message import decode_properties, iter_batch
from headrace_protocol.serving import Reply
from tests.support.scripted import close, route, scripted_cluster, stored

SEND = RequestCode.SEND_MESSAGE_V2
BUSY = Reply(code=ResponseCode.SYSTEM_BUSY, remark="dispatch is behind")
ILLEGAL = Reply(code=ResponseCode.MESSAGE_ILLEGAL, remark="no")
NO_TOPIC = Reply(code=ResponseCode.TOPIC_NOT_EXIST)


def producer(nameserver, network, **options):
    return Producer(nameserver=nameserver.address, connect=network.connect, **options)


def properties(asked):
    return decode_properties(asked.ext["i"].encode())


# -- keys and queues -------------------------------------------------------------------------------


# These numbers are a promise to every program that writes the same topics: never change them.
@pytest.mark.parametrize(
    ("key", "index"),
    [("", 0), ("a", 3), ("N12345", 6), ("order-17", 4), ("Zürich", 6), ("航空", 1), ("🛫", 7)],
)
def test_keys_go_to_fixed_queues(key, index):
    assert queue_index(key, 8) == index


@given(st.text(), st.integers(1, 100))
def test_a_key_always_has_a_queue(key, queue_count):
    assert 0 <= queue_index(key, queue_count) < queue_count


def queues(*broker_names, count=2):
    return [MessageQueue("T", name, number) for name in broker_names for number in range(count)]


def test_messages_without_a_key_take_turns():
    selector = QueueSelector(queues("a", "b"))
    assert [selector.next() for _ in range(5)] == [*queues("a", "b"), queues("a")[0]]


def test_brokers_to_avoid_are_left_out_while_there_is_another():
    selector = QueueSelector(queues("a", "b"))
    assert {selector.next({"a"}).broker_name for _ in range(8)} == {"b"}
    assert {selector.next({"a", "b"}).broker_name for _ in range(8)} == {"a", "b"}


# -- frames ----------------------------------------------------------------------------------------


@given(
    properties=st.text(),
    sys_flag=st.integers(0, 2**31 - 1),
    born=st.integers(0, 2**63 - 1),
    opaque=st.integers(0, 2**31 - 1),
    body=st.binary(min_size=1),
    topic=st.sampled_from(["T", "%RETRY%g", 'odd"%d%%b', "日本"]),
    batch=st.booleans(),
)
def test_a_frame_from_the_template_says_what_was_filled_in(
    properties, sys_flag, born, opaque, body, topic, batch
):
    template = SendTemplate("group%s", topic, "broker-a", 3, batch=batch)
    outgoing = Outgoing(body, sys_flag, born, properties, "id", is_batch=batch)
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
        broker_name="broker-a",
    )


# -- one message -----------------------------------------------------------------------------------


async def test_a_message_arrives_with_its_properties_and_an_id():
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(SEND, stored(41))
        async with producer(nameserver, network, group="pg") as p:
            result = await p.send(
                Message("T", b"body", key="k", tag="t", properties={"x": "1"}, delay_level=3)
            )
        asked = broker.last(SEND)
        assert asked.body == b"body"
        assert asked.ext["a"] == "pg"
        assert properties(asked) == {
            "UNIQ_KEY": result.message_id,
            "KEYS": "k",
            "TAGS": "t",
            "DELAY": "3",
            "x": "1",
        }
        assert (result.queue, result.queue_offset) == (MessageQueue("T", "broker-0", 0), 41)
        assert result.status is ResponseCode.SUCCESS


async def test_the_broker_hears_of_the_producer_and_of_its_end():
    async with scripted_cluster() as (nameserver, (broker,), network):
        async with producer(nameserver, network, group="pg") as p:
            await p.send(Message("T", b"x"))
        assert b'"groupName":"pg"' in broker.last(RequestCode.HEART_BEAT).body
        assert broker.last(RequestCode.UNREGISTER_CLIENT).ext["producerGroup"] == "pg"


async def test_heartbeats_go_on(autojump_clock):
    async with scripted_cluster() as (nameserver, (broker,), network):
        async with producer(nameserver, network) as p:
            await p.send(Message("T", b"x"))
            await trio.sleep(100)
        assert broker.count(RequestCode.HEART_BEAT) == 4
        assert nameserver.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) == 4


async def test_large_bodies_are_compressed():
    async with scripted_cluster() as (nameserver, (broker,), network):
        body = b"headrace " * 1000
        async with producer(nameserver, network) as p:
            await p.send(Message("T", body))
            asked = broker.last(SEND)
            assert (zlib.decompress(asked.body), asked.ext["f"]) == (body, str(0x301))
            await p.send(Message("T", body[:4095]))
            assert (broker.last(SEND).body, broker.last(SEND).ext["f"]) == (body[:4095], "0")
        async with producer(nameserver, network, compress_from_bytes=None) as p:
            await p.send(Message("T", body))
            assert broker.last(SEND).body == body


async def test_a_chosen_queue_gets_the_message():
    async with scripted_cluster(2, queues=4) as (nameserver, brokers, network):
        async with producer(nameserver, network) as p:
            queue = (await p.queues("T"))[6]
            result = await p.send(Message("T", b"x", key="ignored"), queue=queue)
        assert result.queue == queue == MessageQueue("T", "broker-1", 2)
        assert [broker.count(SEND) for broker in brokers] == [0, 1]


async def test_a_chosen_queue_that_is_not_there_is_an_error(autojump_clock):
    async with (
        scripted_cluster() as (nameserver, _, network),
        producer(nameserver, network) as p,
    ):
        with pytest.raises(NoQueue, match="broker-0/7"):
            await p.send(Message("T", b"x"), queue=MessageQueue("T", "broker-0", 7))


async def test_oneway_sends_ask_for_no_answer():
    async with scripted_cluster() as (nameserver, (broker,), network):
        async with producer(nameserver, network) as p:
            await p.send_oneway(Message("T", b"x"))
            await p.send(Message("T", b"y"))
        assert [asked.is_oneway for asked in broker.asked if asked.code == SEND] == [True, False]


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [BUSY, close, None], ids=["busy", "closed", "silent"])
async def test_another_broker_gets_what_one_could_not_take(failure, autojump_clock):
    async with scripted_cluster(2) as (nameserver, (bad, good), network):
        bad.answer(SEND, failure)
        async with producer(nameserver, network) as p:
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


async def test_a_broker_that_is_gone_is_replaced_by_another():
    async with scripted_cluster(2) as (nameserver, (_, good), network):
        gone = type(good)(address="127.0.0.1:65001")
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(gone, good))
        async with producer(nameserver, network) as p:
            result = await p.send(Message("T", b"x"))
        assert result.queue.broker_name == "broker-1"


async def test_a_key_stays_on_its_queue_also_in_retries(autojump_clock):
    async with scripted_cluster(2) as (nameserver, brokers, network):
        home = queue_index("k", 2)
        brokers[home].answer(SEND, BUSY, BUSY, stored())
        async with producer(nameserver, network) as p:
            result = await p.send(Message("T", b"x", key="k"))
        assert result.queue.broker_name == f"broker-{home}"
        assert brokers[home].count(SEND) == 3


async def test_the_last_error_is_raised_when_retries_do_not_help(autojump_clock):
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(SEND, BUSY)
        async with producer(nameserver, network) as p:
            with pytest.raises(BrokerError, match="dispatch is behind") as caught:
                await p.send(Message("T", b"x"))
        assert broker.count(SEND) == 3
        assert caught.value.code == ResponseCode.SYSTEM_BUSY


async def test_what_no_broker_would_take_is_not_tried_again():
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(SEND, ILLEGAL)
        async with producer(nameserver, network) as p:
            with pytest.raises(BrokerError, match="MESSAGE_ILLEGAL"):
                await p.send(Message("T", b"x"))
        assert broker.count(SEND) == 1


async def test_no_answer_is_a_timeout_per_attempt(autojump_clock):
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(SEND, None)
        async with producer(nameserver, network, timeout_ms=2000, retries=1) as p:
            started = trio.current_time()
            with pytest.raises(RequestTimeout):
                await p.send(Message("T", b"x"))
            assert 4 <= trio.current_time() - started < 5


@pytest.mark.parametrize("code", [10, 11, 12])
async def test_a_message_that_is_stored_but_not_safe_yet_is_a_success_that_says_so(code):
    async with scripted_cluster() as (nameserver, (broker,), network):
        ok = stored()
        broker.answer(SEND, lambda asked: Reply(ok(asked).header, code=code))
        async with producer(nameserver, network) as p:
            assert (await p.send(Message("T", b"x"))).status == code
        assert broker.count(SEND) == 1


# -- routes ----------------------------------------------------------------------------------------


async def test_a_topic_that_the_brokers_would_make_is_sent_to():
    async with scripted_cluster() as (nameserver, (broker,), network):

        def only_the_template(asked):
            if asked.ext["topic"] == "TBW102":
                return route(broker, queues=8, perm=7)
            return route(broker, queues=2) if broker.count(SEND) else NO_TOPIC

        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, only_the_template)
        async with producer(nameserver, network) as p:
            result = await p.send(Message("New", b"x"))
            asked = broker.last(SEND)
            assert (asked.ext["b"], asked.ext["c"], asked.ext["d"]) == ("New", "TBW102", "4")
            assert result.queue.queue_id in range(4)
            assert len(await p.queues("New")) == 2


async def test_a_sender_waits_until_the_topic_that_it_made_has_a_route(autojump_clock):
    async with scripted_cluster() as (nameserver, (broker,), network):
        sent_at = None

        def after_a_while(asked):
            if asked.ext["topic"] == "TBW102":
                return route(broker, perm=7)
            known = broker.count(SEND) and trio.current_time() - sent_at > 0.5
            return route(broker) if known else NO_TOPIC

        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, after_a_while)
        sent_at = trio.current_time()
        async with producer(nameserver, network) as p:
            async with p.pipeline() as pipeline:
                await pipeline.send_all([Message("New", b"x")] * 3)
            assert await p.queues("New")
        assert broker.count(SEND) == 3


async def test_a_topic_that_nobody_would_make_is_an_error_with_the_way_out():
    async with scripted_cluster() as (nameserver, _, network):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, NO_TOPIC)
        async with producer(nameserver, network) as p:
            with pytest.raises(RouteNotFound, match="headrace topic create Missing"):
                await p.send(Message("Missing", b"x"))


async def test_a_topic_without_write_permission_has_no_queue(autojump_clock):
    async with scripted_cluster() as (nameserver, (broker,), network):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(broker, perm=4))
        async with producer(nameserver, network) as p:
            with pytest.raises(NoQueue, match="no queue to write to"):
                await p.send(Message("T", b"x"))


async def test_the_second_nameserver_answers_for_a_dead_first_one():
    async with scripted_cluster() as (nameserver, _, network):
        addresses = f"127.0.0.1:65001;{nameserver.address}"
        async with Producer(nameserver=addresses, connect=network.connect) as p:
            await p.send(Message("T", b"x"))
        assert nameserver.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) == 1


async def test_dead_nameservers_are_all_named(autojump_clock):
    async with (
        scripted_cluster() as (_, _, network),
        Producer(nameserver="127.0.0.1:65001;127.0.0.1:65002", connect=network.connect) as p,
    ):
        with pytest.raises(NameserverUnavailable, match=r"127.0.0.1:65001.*127.0.0.1:65002"):
            await p.send(Message("T", b"x"))


async def test_a_known_route_outlives_its_nameserver(autojump_clock):
    async with scripted_cluster() as (nameserver, (broker,), network):
        async with producer(nameserver, network) as p:
            await p.send(Message("T", b"x"))
            nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, close)
            await trio.sleep(100)
            await p.send(Message("T", b"x"))
        assert broker.count(SEND) == 2


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("T", b""), "0 bytes"),
        (Message("T", bytes(4 * 1024 * 1024 + 1)), "4194304"),
        (Message("T", "text"), "encode it"),
        (Message("bad topic", b"x"), "no topic name"),
        (Message("", b"x"), "no topic name"),
        (Message("T" * 128, b"x"), "no topic name"),
        (Message("T", b"x", key="a\x01b"), "byte 1 or 2"),
        (Message("T", b"x", properties={"a": "b\x02"}), "byte 1 or 2"),
        (Message("T", b"x", properties={"TAGS": "t"}), "tag="),
        (Message("T", b"x", properties={"a": ""}), "empty"),
        (Message("T", b"x", properties={"a": "x" * 32768}), "32767"),
        (Message("T", b"x", properties={"a": "ü" * 16380}), "32767"),
        (Message("T", b"x", delay_level=19), "delay_level 19"),
    ],
)
async def test_bad_messages_do_not_reach_the_wire(message, reason):
    async with scripted_cluster() as (nameserver, (broker,), network):
        async with producer(nameserver, network) as p:
            with pytest.raises(InvalidMessage, match=reason):
                await p.send(message)
            async with p.pipeline() as pipeline:
                with pytest.raises(InvalidMessage, match=reason):
                    await pipeline.send(message)
        assert not broker.asked


@pytest.mark.parametrize(
    ("nameserver", "reason"), [("nowhere", "HOST:PORT"), (";", "names no nameserver")]
)
def test_bad_nameservers_are_refused_at_once(nameserver, reason):
    with pytest.raises(ConfigurationError, match=reason):
        Producer(nameserver=nameserver)


def test_bad_groups_are_refused_at_once():
    with pytest.raises(ConfigurationError, match="no group name"):
        Producer("my group")


async def test_a_producer_outside_its_block_is_an_error():
    p = Producer(nameserver="127.0.0.1:65001")
    with pytest.raises(ClientClosed, match="async with Producer"):
        await p.send(Message("T", b"x"))


async def test_what_the_block_raises_comes_out_as_it_is():
    async with scripted_cluster() as (nameserver, _, network):
        with pytest.raises(KeyError, match="mine"):
            async with producer(nameserver, network) as p:
                await p.send(Message("T", b"x"))
                raise KeyError("mine")


async def test_a_time_limit_around_the_block_works(autojump_clock):
    async with scripted_cluster() as (nameserver, _, network):
        with trio.move_on_after(7) as scope:
            async with producer(nameserver, network):
                await trio.sleep_forever()
        assert scope.cancelled_caught


# -- batches ---------------------------------------------------------------------------------------


def bodies(asked):
    return [bytes(body) for _, body, _ in iter_batch(asked.body)]


async def test_a_batch_is_one_request_per_queue():
    async with scripted_cluster(queues=4) as (nameserver, (broker,), network):
        broker.answer(RequestCode.SEND_BATCH_MESSAGE, stored(5))
        async with producer(nameserver, network) as p:
            results = await p.send_many([Message("T", b"%d" % n, tag="t") for n in range(100)])
        (asked,) = [asked for asked in broker.asked if asked.code == RequestCode.SEND_BATCH_MESSAGE]
        assert asked.ext["m"] == "true"
        assert bodies(asked) == [b"%d" % n for n in range(100)]
        ((_, _, first),) = list(iter_batch(asked.body))[:1]
        assert decode_properties(first)["TAGS"] == "t"
        (result,) = results
        assert (result.message_count, result.queue_offset) == (100, 5)
        assert len(result.message_id.split(",")) == 100


async def test_keys_of_a_batch_go_to_their_queues_in_order():
    async with scripted_cluster(queues=4) as (nameserver, (broker,), network):
        broker.answer(RequestCode.SEND_BATCH_MESSAGE, stored())
        messages = [Message("T", b"%d" % n, key=f"k{n % 7}") for n in range(70)]
        async with producer(nameserver, network) as p:
            await p.send_many(messages)
        batches = {int(a.ext["e"]): bodies(a) for a in broker.asked if a.code == 320}
        expected: dict[int, list[bytes]] = {}
        for message in messages:
            expected.setdefault(queue_index(message.key, 4), []).append(message.body)
        assert batches == expected


async def test_a_batch_is_split_at_the_size_limit():
    async with scripted_cluster(queues=4) as (nameserver, (broker,), network):
        broker.answer(RequestCode.SEND_BATCH_MESSAGE, stored())
        async with producer(nameserver, network) as p:
            results = await p.send_many([Message("T", bytes(1024 * 1024))] * 9)
        asked = [a for a in broker.asked if a.code == RequestCode.SEND_BATCH_MESSAGE]
        assert [len(bodies(a)) for a in asked] == [3, 3, 3]
        assert max(len(a.body) for a in asked) <= 4 * 1024 * 1024
        assert len({a.ext["e"] for a in asked}) == 1, "one queue, so that the order is kept"
        assert sum(result.message_count for result in results) == 9


async def test_empty_batches_and_delayed_messages():
    async with (
        scripted_cluster() as (nameserver, _, network),
        producer(nameserver, network) as p,
    ):
        assert await p.send_many([]) == []
        with pytest.raises(InvalidMessage, match="singly"):
            await p.send_many([Message("T", b"x", delay_level=1)])


@settings(max_examples=25)
@given(st.lists(st.tuples(st.binary(min_size=1), st.text("abcü", max_size=5)), max_size=20))
def test_batches_hold_what_went_in(items):
    async def main():
        async with scripted_cluster() as (nameserver, (broker,), network):
            broker.answer(RequestCode.SEND_BATCH_MESSAGE, stored())
            messages = [Message("T", body, tag=tag) for body, tag in items]
            async with producer(nameserver, network) as p:
                await p.send_many(messages)
            found = [
                (bytes(body), decode_properties(raw).get("TAGS", ""))
                for asked in broker.asked
                if asked.code == RequestCode.SEND_BATCH_MESSAGE
                for _, body, raw in iter_batch(asked.body)
            ]
            assert found == items

    trio.run(main)


# -- pipeline --------------------------------------------------------------------------------------


async def test_a_pipeline_sends_all_and_waits_for_the_answers():
    async with (
        scripted_cluster(2, queues=2) as (nameserver, brokers, network),
        producer(nameserver, network) as p,
    ):
        async with p.pipeline(max_in_flight=10) as pipeline:
            await pipeline.send_all(Message("T", b"%d" % n) for n in range(100))
        assert sum(broker.count(SEND) for broker in brokers) == 100


async def test_a_pipeline_reports_where_each_message_went():
    async with scripted_cluster(queues=2) as (nameserver, (broker,), network):
        broker.answer(SEND, *map(stored, range(20)))
        outcomes = []
        async with producer(nameserver, network) as p:
            pipeline = p.pipeline(on_result=lambda *outcome: outcomes.append(outcome))
            async with pipeline:
                await pipeline.send_all(Message("T", b"%d" % n) for n in range(20))
        assert [int(message.body) for message, _ in outcomes] == list(range(20))
        assert [result.queue_offset for _, result in outcomes] == list(range(20))
        assert len({result.message_id for _, result in outcomes}) == 20


@pytest.mark.parametrize(
    ("limits", "body_bytes"), [({"max_in_flight": 3}, 1), ({"max_bytes": 3000}, 1000)]
)
async def test_a_full_pipeline_makes_its_sender_wait(limits, body_bytes, autojump_clock):
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(SEND, None)
        async with producer(nameserver, network, timeout_ms=60_000) as p:
            with trio.move_on_after(1):
                async with p.pipeline(**limits) as pipeline:
                    for _ in range(10):
                        await pipeline.send(Message("T", bytes(body_bytes)))
        assert broker.count(SEND) == 3


@pytest.mark.parametrize("failure", [BUSY, close, None], ids=["busy", "closed", "silent"])
async def test_a_pipeline_tries_again_what_failed(failure, autojump_clock):
    async with scripted_cluster(2) as (nameserver, (bad, good), network):
        bad.answer(SEND, failure)
        async with producer(nameserver, network) as p, p.pipeline() as pipeline:
            await pipeline.send_all(Message("T", b"%d" % n) for n in range(10))
        assert {asked.body for asked in good.asked if asked.code == SEND} == {
            b"%d" % n for n in range(10)
        }


async def test_a_pipeline_that_lost_a_message_says_which():
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(SEND, stored(), ILLEGAL, stored())
        async with producer(nameserver, network) as p:
            with pytest.raises(PipelineError, match="MESSAGE_ILLEGAL") as caught:
                async with p.pipeline() as pipeline:
                    await pipeline.send_all(Message("T", b"%d" % n) for n in range(3))
        ((message, error),) = caught.value.failures
        assert message.body == b"1"
        assert isinstance(error, BrokerError)


async def test_a_pipeline_stops_at_the_first_loss():
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(SEND, ILLEGAL)
        async with producer(nameserver, network) as p:
            with pytest.raises(PipelineError):
                async with p.pipeline(max_in_flight=1) as pipeline:
                    await pipeline.send_all(Message("T", b"x") for _ in range(100))
        assert broker.count(SEND) == 1


async def test_losses_go_to_on_result_when_there_is_one(autojump_clock):
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(SEND, ILLEGAL, BUSY)
        outcomes = []
        async with producer(nameserver, network) as p:
            pipeline = p.pipeline(on_result=lambda *outcome: outcomes.append(outcome))
            async with pipeline:
                await pipeline.send_all(Message("T", b"%d" % n) for n in range(2))
        assert [(m.body, e.code) for m, e in outcomes] == [(b"0", 13), (b"1", 2)]
        assert broker.count(SEND) == 4, "one refused, one tried three times"


async def test_leaving_a_pipeline_by_an_exception_waits_for_nothing(autojump_clock):
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(SEND, None)
        async with producer(nameserver, network) as p:
            started = trio.current_time()
            with pytest.raises(KeyError):
                async with p.pipeline() as pipeline:
                    await pipeline.send(Message("T", b"x"))
                    raise KeyError
            assert trio.current_time() - started < 1


async def test_a_pipeline_to_nobody_raises_at_the_first_message():
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.address = "127.0.0.1:65001"
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(broker))
        async with producer(nameserver, network) as p:
            with pytest.raises(HeadraceError) as caught:
                async with p.pipeline() as pipeline:
                    await pipeline.send(Message("T", b"x"))
        assert isinstance(caught.value, ConnectFailed)


def test_the_frame_prefix_is_the_peers():
    outgoing = Outgoing(b"body", 0, 0, "", "id")
    prefix, header, body = SendTemplate("g", "T", "b", 0).frame(outgoing, 1)
    assert struct.unpack(">II", prefix) == (4 + len(header) + len(body), len(header))
