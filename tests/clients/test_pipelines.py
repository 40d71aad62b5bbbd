"""Pipelines against scripted brokers: requests, order, retries, losses, limits."""

# ruff: noqa: PT012 - what blocks raise after a few statements is the point here

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from headrace import Message, SendResult
from headrace.errors import (
    BrokerError,
    ClientClosed,
    ConfigurationError,
    HeadraceError,
    InvalidMessage,
    OutcomeUnknown,
    PipelineError,
    RouteNotFound,
)
from headrace.producer.pipeline import Pipeline
from headrace_protocol.codes import RequestCode
from headrace_protocol.serving import Reply
from tests.support.scripted import (
    BUSY,
    ILLEGAL,
    Asked,
    both_kinds,
    close,
    no_topic,
    producing,
    route,
    sent_bodies,
    sent_queue,
    stored,
    storing,
)

SEND = RequestCode.SEND_MESSAGE_V2


async def test_pipelines_that_would_never_send_are_refused() -> None:
    async with producing() as (p, _, _):
        refused: list[dict[str, Any]] = [{"max_in_flight": 0}, {"max_bytes": 0}]
        for options in refused:
            with pytest.raises(ConfigurationError, match="at least 1"):
                p.pipeline(**options)


async def test_a_pipeline_outside_its_block_is_an_error() -> None:
    async with producing() as (p, _, (broker,)):
        pipeline = p.pipeline()
        with pytest.raises(ClientClosed, match=r"async with producer\.pipeline"):
            await pipeline.send(Message("T", b"x"))
        async with pipeline:
            await pipeline.send(Message("T", b"x"))
        with pytest.raises(ClientClosed):
            await pipeline.send(Message("T", b"y"))
        assert broker.sent == [b"x"]


@both_kinds
async def test_a_pipeline_sends_all_and_waits_for_the_answers(ours: bool) -> None:
    async with producing(2, queues=2, headrace=ours) as (p, _, brokers):
        async with p.pipeline(max_in_flight=10) as pipeline:
            await pipeline.send_all(Message("T", b"%d" % n) for n in range(100))
        sent = [body for broker in brokers for body in broker.sent]
        assert sorted(sent, key=int) == [b"%d" % n for n in range(100)]
        assert all(broker.sends for broker in brokers)


@both_kinds
async def test_a_pipeline_sends_what_is_there_as_one_request(ours: bool) -> None:
    async with producing(headrace=ours) as (p, _, (broker,)):
        async with p.pipeline() as pipeline:
            await pipeline.send(Message("T", b"0"))
            await pipeline.flush()
            await pipeline.send_all(Message("T", b"%d" % n) for n in range(1, 200))
            await pipeline.flush()
            await pipeline.send_all(Message("T", b"%d" % n) for n in range(200, 203))
        assert [len(sent_bodies(asked)) for asked in broker.sends] == [1, 199, 3]
        assert broker.sent == [b"%d" % n for n in range(203)]


async def test_a_lone_message_of_a_pipeline_does_not_wait(autojump_clock: object) -> None:
    async with (
        producing(headrace=True) as (p, _, (broker,)),
        p.pipeline() as pipeline,
    ):
        for n in range(5):
            await pipeline.send(Message("T", b"%d" % n))
            await trio.testing.wait_all_tasks_blocked()
            assert len(broker.sent) == n + 1


@both_kinds
async def test_a_pipeline_reports_where_each_message_went(ours: bool) -> None:
    async with producing(queues=2, headrace=ours) as (p, _, (broker,)):
        broker.answer_sends(storing())
        outcomes = []
        pipeline = p.pipeline(max_in_flight=20, on_result=lambda *outcome: outcomes.append(outcome))
        async with pipeline:
            await pipeline.send_all(Message("T", b"%d" % n) for n in range(100))
        found = {
            (result.queue.queue_id, result.queue_offset): message.body
            for message, result in outcomes
        }
        stored_there: dict[tuple[int, int], bytes] = {}
        for asked in broker.sends:
            for body in sent_bodies(asked):
                queue_id = sent_queue(asked)
                offset = sum(queue == queue_id for queue, _ in stored_there)
                stored_there[queue_id, offset] = body
        assert found == stored_there
        assert len(found) == 100
        assert all(len(result.message_id) == 32 for _, result in outcomes)


@both_kinds
async def test_keys_of_a_pipeline_stay_in_order_also_in_retries(
    ours: bool, autojump_clock: object
) -> None:
    async with producing(2, queues=2, headrace=ours, delivery_timeout_ms=100) as (p, _, brokers):
        ok, stored_bodies = stored(), []

        def now_and_then(asked: Asked) -> Reply:
            if len(asked.body) % 3 == 0:
                return BUSY
            stored_bodies.extend(sent_bodies(asked))
            return ok(asked)

        for broker in brokers:
            broker.answer_sends(BUSY, now_and_then)
        messages = [Message("T", b"%d" % n * (n % 5 + 1), key=f"k{n % 7}") for n in range(300)]
        lost = []
        pipeline = p.pipeline(
            max_in_flight=40,
            on_result=lambda m, r: lost.append(m.body) if isinstance(r, HeadraceError) else None,
        )
        async with pipeline:
            await pipeline.send_all(messages)
        for key in {message.key for message in messages}:
            of_key = [m.body for m in messages if m.key == key and m.body not in lost]
            assert [body for body in stored_bodies if body in of_key] == of_key
        assert len(lost) + len(stored_bodies) == 300


@both_kinds
async def test_delayed_messages_of_a_pipeline_leave_singly(ours: bool) -> None:
    async with producing(headrace=ours) as (p, _, (broker,)):
        levels = [0, 0, 3, 0, 0, 5, 5, 0]
        async with p.pipeline() as pipeline:
            for n, level in enumerate(levels):
                await pipeline.send(Message("T", b"%d" % n, delay_level=level))
        assert broker.sent == [b"%d" % n for n in range(8)]
        assert [len(sent_bodies(asked)) for asked in broker.sends] == [2, 1, 2, 1, 1, 1]
        assert broker.sends[1].properties["DELAY"] == "3"


@both_kinds
async def test_large_bodies_of_a_pipeline_are_compressed(ours: bool) -> None:
    async with producing(headrace=ours) as (p, _, (broker,)):
        bodies = [b"small", b"large " * 1000, b"small too", b"small as well"]
        async with p.pipeline() as pipeline:
            await pipeline.send_all(Message("T", body) for body in bodies)
        if ours:
            assert broker.sent == bodies
            assert len(broker.sends[0].body) < 2000
        else:
            small, large, others = broker.sends
            assert (zlib.decompress(large.body), large.ext["f"]) == (bodies[1], str(0x301))
            assert sent_bodies(small) + sent_bodies(others) == [bodies[0], *bodies[2:]]


async def test_retry_topics_get_messages_singly() -> None:
    async with producing(headrace=True) as (p, _, (broker,)):
        async with p.pipeline() as pipeline:
            await pipeline.send_all([Message("%RETRY%" + "g" * 130, b"x")] * 3)
        assert [asked.code for asked in broker.sends] == [SEND] * 3


@both_kinds
@pytest.mark.parametrize(
    ("limits", "body_bytes"), [({"max_in_flight": 3}, 1), ({"max_bytes": 3000}, 1000)]
)
async def test_a_full_pipeline_makes_its_sender_wait(
    limits: dict[str, Any], body_bytes: int, ours: bool, autojump_clock: object
) -> None:
    async with producing(queues=3, headrace=ours, timeout_ms=60_000) as (p, _, (broker,)):
        broker.answer_sends(None)
        sent = []
        with trio.move_on_after(1):
            async with p.pipeline(**limits) as pipeline:
                for n in range(10):
                    await pipeline.send(Message("T", bytes(body_bytes)))
                    sent.append(n)
        assert len(sent) == 3
        assert 2 <= len(broker.sent) <= 3, "two requests are under way"


@both_kinds
@pytest.mark.parametrize("failure", [BUSY, close, None], ids=["busy", "closed", "silent"])
async def test_a_pipeline_tries_again_what_failed(
    failure: Callable[..., Any] | Reply | None, ours: bool, autojump_clock: object
) -> None:
    async with producing(2, headrace=ours) as (p, _, (bad, good)):
        bad.answer_sends(failure)
        async with p.pipeline(max_in_flight=3) as pipeline:
            await pipeline.send_all(Message("T", b"%d" % n) for n in range(10))
        assert bad.sent
        assert sorted(good.sent) == [b"%d" % n for n in range(10)]


@both_kinds
async def test_a_broker_that_is_gone_does_not_stop_a_pipeline(ours: bool) -> None:
    async with producing(2, headrace=ours) as (p, nameserver, (_, good)):
        gone = type(good)(address="127.0.0.1:65001")
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(gone, good))
        async with p.pipeline() as pipeline:
            await pipeline.send_all(Message("T", b"%d" % n) for n in range(10))
        assert sorted(good.sent) == [b"%d" % n for n in range(10)]


@both_kinds
async def test_a_pipeline_follows_a_broker_that_moved(ours: bool, autojump_clock: object) -> None:
    async with producing(2, queues=4, headrace=ours) as (p, nameserver, (old, new)):
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(old, queues=4))

        def move(asked: Asked) -> None:
            nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(new, queues=4))
            close(asked)

        old.answer_sends(stored(), stored(), move)
        messages = [Message("T", b"%03d" % n, key=f"k{n % 9}") for n in range(300)]
        async with p.pipeline(max_in_flight=20) as pipeline:
            await pipeline.send_all(messages)
        assert {*old.sent, *new.sent} == {message.body for message in messages}
        for key in {message.key for message in messages}:
            of_key = [message.body for message in messages if message.key == key]
            at_new = [body for body in new.sent if body in of_key]
            assert at_new == of_key[len(of_key) - len(at_new) :]


def refusing(body: bytes) -> Callable[..., Any]:
    ok = stored()
    return lambda asked: ILLEGAL if body in sent_bodies(asked) else ok(asked)


@both_kinds
async def test_a_pipeline_that_lost_a_message_says_which(ours: bool) -> None:
    async with producing(headrace=ours) as (p, _, (broker,)):
        broker.answer_sends(refusing(b"1"))
        with pytest.raises(PipelineError, match="MESSAGE_ILLEGAL") as caught:
            async with p.pipeline() as pipeline:
                await pipeline.send_all(Message("T", b"%d" % n) for n in range(3))
        ((message, error),) = caught.value.failures
        assert message.body == b"1"
        assert isinstance(error, BrokerError)
        assert broker.sent[-3:] == [b"0", b"1", b"2"], "the others are stored"


async def test_a_pipeline_stops_at_the_first_loss() -> None:
    async with producing() as (p, _, (broker,)):
        broker.answer_sends(ILLEGAL)
        with pytest.raises(PipelineError):
            async with p.pipeline(max_in_flight=1) as pipeline:
                await pipeline.send_all(Message("T", b"x") for _ in range(100))
        assert len(broker.sent) == 1


@both_kinds
async def test_losses_go_to_on_result_when_there_is_one(ours: bool, autojump_clock: object) -> None:
    async with producing(headrace=ours, delivery_timeout_ms=100) as (p, _, (broker,)):
        broker.answer_sends(ILLEGAL, BUSY)
        outcomes = []
        pipeline = p.pipeline(max_in_flight=1, on_result=lambda *outcome: outcomes.append(outcome))
        async with pipeline:
            await pipeline.send_all(Message("T", b"%d" % n) for n in range(2))
        assert [(m.body, e.code) for m, e in outcomes] == [(b"0", 13), (b"1", 2)]
        assert broker.sent[0] == b"0"
        assert broker.sent[1:] == [b"1"] * (len(broker.sent) - 1)
        assert len(broker.sent) > 2, "the first was refused, the other retried"


class Outcomes:
    """The outcomes that a pipeline's ``on_result`` was called with, by body."""

    def __init__(self) -> None:
        self.of: dict[bytes, list[SendResult | HeadraceError]] = {}

    def __call__(self, message: Message, result: SendResult | HeadraceError) -> None:
        self.of.setdefault(message.body, []).append(result)

    def kinds(self) -> dict[bytes, type]:
        """The type of each message's outcome; each must have exactly one."""
        assert all(len(outcomes) == 1 for outcomes in self.of.values())
        return {body: type(outcomes[0]) for body, outcomes in self.of.items()}


async def test_on_result_gets_what_could_not_even_be_accepted(autojump_clock: object) -> None:
    async with producing() as (p, nameserver, (broker,)):
        broker.address = "127.0.0.1:65001"
        nameserver.answer(
            RequestCode.GET_ROUTEINFO_BY_TOPIC, route(broker), no_topic(awaits_broker=False)
        )
        outcomes = Outcomes()
        async with p.pipeline(on_result=outcomes) as pipeline:
            await pipeline.send(Message("T", b"gone"))
            await pipeline.send(Message("T", b"gone too"))
            await pipeline.send(Message("Missing", b"no topic"))
            await pipeline.send(Message("T", b""))
        assert outcomes.kinds() == {
            b"": InvalidMessage,
            b"no topic": RouteNotFound,
            b"gone": RouteNotFound,
            b"gone too": RouteNotFound,
        }


@both_kinds
async def test_messages_of_a_pipeline_share_the_time_of_an_outage(
    ours: bool, autojump_clock: object
) -> None:
    async with producing(headrace=ours) as (p, _, (broker,)):
        broker.answer_sends(BUSY)
        waited: list[float] = []

        def note(message: Message, result: SendResult | HeadraceError) -> None:
            assert isinstance(result, HeadraceError)
            waited.append(trio.current_time() - float(message.body))

        async with p.pipeline(on_result=note) as pipeline:
            for _ in range(20):
                body = str(trio.current_time()).encode()
                await pipeline.send(Message("T", body, key="k"))
                await trio.sleep(1)
        assert len(waited) == 20
        assert min(waited) >= 28, "each has its time"
        assert max(waited) <= 30 + 20 + 1, "not one delivery timeout after the other"


@both_kinds
async def test_on_result_hears_of_all_when_an_exception_ends_the_block(
    ours: bool, autojump_clock: object
) -> None:
    async with producing(2, queues=2, headrace=ours) as (p, _, brokers):
        brokers[0].answer_sends(stored(), BUSY)
        brokers[1].answer_sends(stored(), None)
        outcomes = Outcomes()
        with pytest.raises(KeyError):
            async with p.pipeline(on_result=outcomes) as pipeline:
                for n in range(200):
                    await pipeline.send(Message("T", b"%d" % n, key=f"k{n}"))
                    if n % 20 == 0:
                        await trio.testing.wait_all_tasks_blocked()
                raise KeyError
        kinds = outcomes.kinds()
        assert kinds.keys() == {b"%d" % n for n in range(200)}
        assert set(kinds.values()) == {SendResult, OutcomeUnknown}


@both_kinds
async def test_several_tasks_share_a_pipeline(ours: bool) -> None:
    async with producing(2, queues=2, headrace=ours) as (p, _, brokers):

        async def send(pipeline: Pipeline, name: bytes) -> None:
            for n in range(50):
                await pipeline.send(Message("T", b"%s %d" % (name, n), key=name.decode()))

        async with (
            p.pipeline(max_in_flight=7) as pipeline,
            trio.open_nursery() as nursery,
        ):
            for name in (b"a", b"b", b"c"):
                nursery.start_soon(send, pipeline, name)
        for name in (b"a", b"b", b"c"):
            of_it = [b for broker in brokers for b in broker.sent if b.startswith(name)]
            assert of_it == [b"%s %d" % (name, n) for n in range(50)]


async def test_leaving_a_pipeline_by_an_exception_waits_for_nothing(autojump_clock: object) -> None:
    async with producing() as (p, _, (broker,)):
        broker.answer(SEND, None)
        started = trio.current_time()
        with pytest.raises(KeyError):
            async with p.pipeline() as pipeline:
                await pipeline.send(Message("T", b"x"))
                raise KeyError
        assert trio.current_time() - started < 1


async def test_a_pipeline_to_nobody_fails_after_the_delivery_timeout(
    autojump_clock: object,
) -> None:
    async with producing() as (p, nameserver, (broker,)):
        broker.address = "127.0.0.1:65001"
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, route(broker))
        started = trio.current_time()
        with pytest.raises(PipelineError, match="cannot connect"):
            async with p.pipeline() as pipeline:
                await pipeline.send(Message("T", b"x"))
        assert 29 <= trio.current_time() - started <= 30
