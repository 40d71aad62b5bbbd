"""Quotas hold clients back, refuse what can't wait, and say when to try again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import structlog.testing
import trio
from trio.testing import MockClock

from headrace_broker.quotas.metering import BrokerMetering
from headrace_broker.quotas.owners import Owners
from headrace_daemon.quotas.table import QuotaTable
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_protocol.bodies import GetConsumerListByGroupResponseBody
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import header_fields
from headrace_protocol.drivers.response import Response
from headrace_protocol.frame import Frame, FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import ConsumerGroupHeader
from headrace_protocol.nameserver_headers import GetRouteInfoHeader
from headrace_protocol.pop.batch_ack import BatchAck, BatchAckBody
from headrace_protocol.pop.handle import Handle, TopicKind
from headrace_protocol.quotas import Of, Quota, QuotaList
from headrace_protocol.rights.auth_requests import UserHeader, UserInfo
from headrace_protocol.rights.credentials import Credentials
from headrace_protocol.serving import LARGE_BODY_BYTES
from tests.support.broker import BrokerUnderTest, heartbeat
from tests.support.channel import MemoryChannel
from tests.support.metrics import parse, values
from tests.support.paused_clients import SEND, USERS, clients, codes, quota
from tests.support.wire import pull_header, send_header

PULL = RequestCode.PULL_MESSAGE
ASKED = pull_header(topic="T", consumer_group="g")
HELD, REFUSED = "headrace_quota_held_total", "headrace_quota_refused_total"


async def test_a_client_at_its_rate_is_not_read(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(tmp_path, mock_clock) as (_, [client]):
        assert codes(await client.send()) == [0]
        await client.set("user", "127.0.0.1", bytes_in=50_000)
        begin = trio.current_time()
        sent = 0
        while trio.current_time() < begin + 3:
            answers = await client.send()
            sent += 1
            while not answers:
                await client.passes(0.1)
            assert codes(answers) == [0]
        # A second's worth of tokens at first, and what comes back; the last send may be owed.
        assert 18 <= sent <= 21


async def test_metrics_tell_who_is_at_a_limit(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(tmp_path, mock_clock, 8, monitor_port=0) as (broker, several):
        await several[0].set("topic", "T", bytes_in=10_000)
        answers = [answer for client in several for answer in await client.send()]
        page = parse(await trio.to_thread.run_sync(broker.readiness.page))
        held, refused = (values(page, each, "name")["T"] for each in (HELD, REFUSED))
        # Each client has sent once; of those that were stored, all but the first owe something.
        assert refused == sum(map(bool, codes(answers)))
        assert 0 < refused < 7
        assert held == 7 - refused


async def test_a_topic_and_its_readers_have_rates(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(tmp_path, mock_clock) as (_, [client]):
        await client.send(topic="T")
        await client.send(topic="other")
        await client.set("topic", "T", bytes_in=5000)
        assert codes(await client.send(topic="T")) == [0]  # owes 5,000 bytes: a second
        assert not await client.send(topic="other")  # the connection is one
        await client.passes(0.9)
        assert not await client.send(topic="other")
        await client.passes(0.2)
        assert codes(await client.send(topic="other")) == [0]


@pytest.mark.parametrize(
    ("limit", "rate"), [("requests", 1.0), ("bytes_in", 60.0), ("bytes_out", 100.0), ("cpu", 1e-3)]
)
async def test_each_rate_of_a_user_holds_it_back(
    tmp_path: Path, mock_clock: MockClock, limit: str, rate: float
) -> None:
    async with clients(tmp_path, mock_clock) as (_, [client]):
        await client.set("user", "127.0.0.1", **{limit: rate})
        answered = 0
        for _ in range(50):
            if not await client.begin(RequestCode.GET_BROKER_RUNTIME_INFO):
                break
            answered += 1
        assert 0 < answered < 50


async def test_a_group_reads_at_its_rate(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(tmp_path, mock_clock) as (_, [client]):
        await client.send(topic="T")
        await client.set("group", "g", bytes_out=1000)
        read = await client.ask(
            RequestCode.PULL_MESSAGE, pull_header(topic="T", consumer_group="g")
        )
        assert read.command.code == ResponseCode.SUCCESS
        later = await client.begin(RequestCode.GET_BROKER_RUNTIME_INFO)
        await client.passes(8)
        assert not later
        await client.passes(2)
        assert codes(later) == [0]


NAMES: dict[Of, str] = {"topic": "T", "group": "g"}


@pytest.mark.parametrize("of", NAMES)
@pytest.mark.parametrize(("limit", "rate"), [("requests", 2.0), ("cpu", 1e-3)])
async def test_requests_about_a_topic_or_a_group_have_rates(
    tmp_path: Path, mock_clock: MockClock, of: Of, limit: str, rate: float
) -> None:
    async with clients(tmp_path, mock_clock) as (_, [client]):
        await client.send(topic="T")
        await client.set(of, NAMES[of], **{limit: rate})
        answered = 0
        while answered < 100 and await client.begin(PULL, ASKED):
            answered += 1
        assert 0 < answered < 100


STRANGERS: dict[str, tuple[Credentials | None, bool]] = {
    "nobody": (None, False),
    "a wrong secret": (Credentials("mallory", "guessed"), False),
    "a session": (Credentials("mallory", "a password"), True),
    "signatures": (Credentials("mallory", "a password"), False),
}
REQUESTS: dict[str, tuple[int, Any, bytes]] = {
    "pull": (PULL, ASKED, b""),
    "send": (SEND, send_header(topic="T"), b"x" * 100),
    # A thread digests it.
    "large send": (SEND, send_header(topic="T"), b"x" * (LARGE_BODY_BYTES + 1)),
    "heartbeat": (RequestCode.HEART_BEAT, None, heartbeat("g", "c", "T")),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("request_name", REQUESTS)
async def test_requests_without_rights_use_up_no_quota_of_others(
    tmp_path: Path, mock_clock: MockClock, stranger: str, request_name: str
) -> None:
    settings = {**USERS, "authorization_enabled": True}
    async with clients(tmp_path, mock_clock, 3, **settings) as (_, [root, other, member]):
        for each in (root, member):
            await each.become(Credentials("root", "a password of root"), by_session=True)
        user = UserInfo(username="mallory", password="a password", user_type="Normal")
        header = UserHeader(username="mallory")
        created = await root.ask(RequestCode.AUTH_CREATE_USER, header, user.encode())
        assert codes([created, *await root.send(topic="T")]) == [0, 0]
        await root.set("topic", "T", requests=2.0)
        await root.set("group", "g", requests=2.0)
        credentials, by_session = STRANGERS[stranger]
        if credentials is not None:
            await other.become(credentials, by_session=by_session)
        answers = [await other.ask(*REQUESTS[request_name]) for _ in range(10)]
        assert codes(answers) == [ResponseCode.NO_PERMISSION] * 10
        # Two are within the rate, and the client is still read for a third.
        assert codes([await member.ask(PULL, ASKED) for _ in range(3)]) == [0] * 3
        assert not await member.begin(PULL, ASKED)


@pytest.mark.parametrize("of", NAMES)
async def test_too_many_requests_about_a_topic_or_a_group_are_refused(
    tmp_path: Path, mock_clock: MockClock, of: Of
) -> None:
    async with clients(tmp_path, mock_clock, 16) as (_, several):
        admin, *others = several
        await admin.send(topic="T")
        await admin.set(of, NAMES[of], requests=1.0)
        answers = [answer for each in others for answer in await each.begin(PULL, ASKED)]
        refused = codes(answers).count(ResponseCode.FLOW_CONTROL)
        # Holding clients back settles what is owed at first; the rest is refused.
        assert codes(answers) == [0] * (15 - refused) + [ResponseCode.FLOW_CONTROL] * refused
        assert 0 < refused < 15
        error = answers[-1].error()
        assert f"[quota] {of} {NAMES[of]}: 1 requests/s" in (error.remark or "")
        other = pull_header(topic="other", consumer_group="h")
        assert (await admin.ask(PULL, other)).command.code == ResponseCode.TOPIC_NOT_EXIST
        await admin.passes(error.retry_after_ms / 1000)
        assert codes(await others[-1].begin(PULL, ASKED)) == [0]


async def test_heartbeats_count_for_their_groups(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(tmp_path, mock_clock) as (_, [client]):
        await client.set("group", "g", requests=2.0)
        answered = dict.fromkeys(("g", "other"), 0)
        for group in ("other", "g"):
            beat = heartbeat(group, "c", "T")
            while answered[group] < 20 and await client.begin(RequestCode.HEART_BEAT, body=beat):
                answered[group] += 1
        assert answered["other"] == 20
        assert 0 < answered["g"] < 20


LIMITED: dict[Of, str] = {"group": "g", "user": "*"}


@pytest.mark.parametrize("of", LIMITED)
async def test_no_rate_makes_a_member_look_dead(
    tmp_path: Path, mock_clock: MockClock, of: Of
) -> None:
    async with clients(tmp_path, mock_clock, 32) as (_, several):
        admin, *others = several
        await admin.send(topic="T")
        await admin.set(of, LIMITED[of], requests=1.0)
        answers: list[Response] = []
        while not answers or not answers[0].command.code:
            answers = await others.pop().begin(PULL, ASKED)
        assert codes(answers) == [ResponseCode.FLOW_CONTROL]
        members = {f"c{number}": each for number, each in enumerate(others)}
        assert len(members) > 10
        for name, member in members.items():
            beat = heartbeat("g", name, "T")
            assert codes(await member.begin(RequestCode.HEART_BEAT, body=beat)) == [0]
        # A member that sends more is not read for a while.
        assert not await member.begin(RequestCode.HEART_BEAT, body=beat)
        # Those that were served added nothing to what is owed.
        await admin.passes(answers[0].error().retry_after_ms / 1000)
        listed = await admin.ask(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupHeader(consumer_group="g")
        )
        joined = GetConsumerListByGroupResponseBody.decode(listed.body).consumer_id_list
        assert set(joined) == set(members)


async def test_requests_that_name_no_limited_topic_cost_it_nothing(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with clients(tmp_path, mock_clock, 2) as (_, [admin, client]):
        await admin.set("topic", "T", requests=1.0)
        for _ in range(10):
            # The names hold T, and are those of other topics.
            assert codes(await client.send(topic="Tea")) == [0]
        malformed = await client.ask(PULL, GetRouteInfoHeader(topic="T"))
        assert malformed.command.code == ResponseCode.INVALID_PARAMETER
        assert codes(await client.send(topic="T")) == [0]


async def test_what_can_not_wait_is_refused_with_the_time_to_wait(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with clients(tmp_path, mock_clock, 30) as (_, several):
        first = several[0]
        await first.send()
        await first.set("topic", "T", bytes_in=10_000)
        answers = [answer for client in several for answer in await client.send()]
        refused = [each for each in answers if each.command.code]
        assert 0 < len(refused) < 30
        error = refused[-1].error()
        assert error.code == ResponseCode.SYSTEM_BUSY
        found = re.fullmatch(
            r"\[quota\] topic T: 10000 bytes/s; again in (\d+) ms", error.remark or ""
        )
        assert found
        assert error.retry_after_ms == int(found[1])
        assert refused[-1].command.ext()["slowStage"] == "quota"
        # After that time it takes messages again.
        await first.passes(error.retry_after_ms / 1000)
        assert codes(await several[-1].send()) == [0]


async def test_users_share_one_rate_and_a_pull_gets_flow_control(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with clients(tmp_path, mock_clock, 40) as (_, several):
        await several[0].send()
        await several[0].set("user", "*", bytes_in=10_000)
        for client in several[:-3]:
            await client.send()
        (refused,) = await several[-3].send()
        assert refused.command.code == ResponseCode.SYSTEM_BUSY
        assert "[quota] user 127.0.0.1: 10000 bytes/s" in (refused.command.remark or "")
        pull = await several[-1].ask(RequestCode.PULL_MESSAGE, pull_header())
        pop = await several[-2].ask(RequestCode.POP_MESSAGE)
        assert codes([pull, pop]) == [ResponseCode.FLOW_CONTROL] * 2
        assert pull.error().retry_after_ms > 1000


async def test_a_client_held_back_is_read_again_without_its_quota(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with clients(tmp_path, mock_clock, 2) as (_, [admin, client]):
        await client.send()
        await admin.set("topic", "T", bytes_in=5000)
        assert codes(await client.send()) == [0]
        held = await client.send()
        assert not held
        await admin.set("topic", "T")
        await admin.rest()
        assert codes(held) == [0]


async def test_a_quota_that_is_too_small_can_be_removed(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with clients(tmp_path, mock_clock, 2) as (_, [admin, client]):
        await admin.set("user", "*", requests=0.001)
        for _ in range(3):
            await client.begin(RequestCode.GET_BROKER_RUNTIME_INFO)
            await admin.passes(2)
        answer = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        assert answer.command.code == ResponseCode.SYSTEM_BUSY
        await admin.set("user", "*")
        assert codes(await client.begin(RequestCode.GET_BROKER_RUNTIME_INFO)) == [0]


@pytest.mark.parametrize("by_session", [True, False])
async def test_a_user_at_its_limit_does_not_slow_another(
    tmp_path: Path, mock_clock: MockClock, by_session: bool
) -> None:
    async with clients(tmp_path, mock_clock, 2, **USERS) as (_, [root, inner]):
        await root.become(Credentials("root", "a password of root"), by_session=by_session)
        await inner.become(Credentials("inner", "of brokers"), by_session=by_session)
        await root.send()
        await inner.set("user", "root", bytes_in=5000)
        assert codes(await root.send()) == [0]
        for _ in range(10):
            assert not await root.send()
            assert codes(await inner.send()) == [0]
        await root.passes(2)
        assert codes(await inner.send()) == [0]


async def test_connections_of_a_user_are_limited(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(tmp_path, mock_clock, 3) as (_, several):
        await several[0].set("user", "*", connections=2)
        answers = [await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO) for client in several]
        assert codes(answers) == [0, 0, ResponseCode.SYSTEM_BUSY]
        assert "2 connections" in (answers[-1].command.remark or "")


async def test_a_connection_that_ends_makes_room(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(tmp_path, mock_clock, 3) as (_, [admin, one, other]):
        await admin.set("user", "*", connections=2)
        info = RequestCode.GET_BROKER_RUNTIME_INFO
        assert codes([await each.ask(info) for each in (admin, one, other)])[2]
        await one.close()
        assert codes([await other.ask(info)]) == [0]


async def test_a_log_in_counts_for_its_user_alone(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(tmp_path, mock_clock, 3, **USERS) as (_, [admin, one, other]):
        for client in (admin, one, other):
            await client.become(Credentials("inner", "of brokers"), by_session=True)
            await client.set("user", "127.0.0.1", connections=1)
        assert codes([await other.ask(RequestCode.GET_BROKER_RUNTIME_INFO)]) == [0]


async def test_a_refused_client_learns_who_refuses(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(tmp_path, mock_clock, 2) as (_, [admin, client]):
        await admin.set("user", "*", connections=1)
        await admin.ask(RequestCode.LIST_QUOTAS)
        answer = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        assert answer.command.code == ResponseCode.SYSTEM_BUSY
        assert client.peer_is_headrace


async def test_held_pulls_of_a_user_are_limited(tmp_path: Path, mock_clock: MockClock) -> None:
    async with clients(tmp_path, mock_clock, 2) as (_, [one, other]):
        await one.send()
        await one.set("user", "127.0.0.1", held_pulls=2)
        waiting = pull_header(queue_offset=1, sys_flag=6)
        held = [await client.begin(RequestCode.PULL_MESSAGE, waiting) for client in (one, other)]
        assert held == [[], []]
        refused = await one.ask(RequestCode.PULL_MESSAGE, waiting)
        assert refused.command.code == ResponseCode.FLOW_CONTROL
        assert "2 held pulls" in (refused.command.remark or "")
        await one.send()
        assert [codes(answers) for answers in held] == [[0], [0]]
        assert (
            await one.begin(RequestCode.PULL_MESSAGE, pull_header(queue_offset=2, sys_flag=6)) == []
        )


async def test_a_quota_outlives_a_restart(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    for body in (quota("topic", "T", bytes_in=1000), quota("user", "alice", cpu=0.5)):
        assert broker.ask(RequestCode.SET_QUOTA, body=body).code == ResponseCode.SUCCESS
    broker.close()
    again = BrokerUnderTest(tmp_path)
    listed = QuotaList.decode(again.ask(RequestCode.LIST_QUOTAS).body).quotas
    assert listed == [
        Quota(of="topic", name="T", bytes_in=1000),
        Quota(of="user", name="alice", cpu=0.5),
    ]
    again.close()


async def test_quotas_are_read_from_the_backup_of_a_torn_file(tmp_path: Path) -> None:
    path = tmp_path / "store/config/quotas.json"
    broker = BrokerUnderTest(tmp_path)
    for name in ("first", "second"):
        broker.ask(RequestCode.SET_QUOTA, body=quota("topic", name, bytes_in=1000))
    broker.close()
    torn = path.read_bytes()[:-50]
    path.write_bytes(torn)
    with structlog.testing.capture_logs() as lines:
        again = BrokerUnderTest(tmp_path)
    (line,) = (line for line in lines if line.get("path") == str(path))
    assert "backup used" in line["event"]
    again.ask(RequestCode.SET_QUOTA, body=quota("topic", "third", bytes_in=1000))
    listed = QuotaList.decode(again.ask(RequestCode.LIST_QUOTAS).body).quotas
    assert [each.name for each in listed] == ["first", "third"]
    assert path.with_name("quotas.json.damaged").read_bytes() == torn
    again.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"of": "user", "name": ""}, "without a name"),
        ({"of": "topic", "name": "*", "bytesIn": 1.0}, "only users have a quota in common"),
        ({"of": "topic", "name": "T", "connections": 5}, "connections is no limit of a topic"),
        (
            {"of": "group", "name": "g", "bytesIn": 5.0},
            "bytes_in is no limit of a group, which has requests, bytes_out, cpu",
        ),
        (
            {"of": "user", "name": "a", "requests": 0.0},
            "requests=0: must be a number, at least 0.001",
        ),
        ({"of": "user", "name": "a", "requests": -1.0}, "requests=-1: must be a number"),
        (
            {"of": "user", "name": "a", "connections": 0},
            "connections=0: must be a number, at least 1",
        ),
        ({"of": "user", "name": "a", "cpu": 1.5}, "above 1"),
        ({"of": "user", "name": "a", "requests": 1e999}, "malformed request SET_QUOTA"),
        ({"of": "nobody", "name": "a"}, "malformed request SET_QUOTA"),
        ({"of": "user"}, "malformed request SET_QUOTA"),
    ],
)
def test_a_quota_that_can_not_be_kept_is_rejected(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    broker = BrokerUnderTest(tmp_path)
    answer = broker.ask(RequestCode.SET_QUOTA, body=json.dumps(fields).encode())
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert reason in answer.remark
    assert not QuotaList.decode(broker.ask(RequestCode.LIST_QUOTAS).body).quotas


async def test_without_quotas_nothing_is_metered(tmp_path: Path) -> None:
    """Nothing is called for a message then."""
    broker = BrokerUnderTest(tmp_path)
    serving, statistics, owners = broker.core.serving, broker.statistics, broker.budget.makers
    assert isinstance(owners, Owners)

    def metered() -> set[bool]:
        hooks = (
            serving.frames.meter,
            statistics.on_put,
            statistics.on_get,
            broker.long_polling.check,
            owners.check_owned,
        )
        return {hook is not None for hook in hooks}

    assert metered() == {False}
    broker.ask(RequestCode.SET_QUOTA, body=quota("topic", "T", bytes_in=1e6))
    assert metered() == {True}
    broker.ask(RequestCode.SET_QUOTA, body=quota("topic", "T"))
    assert metered() == {False}


# -- what headers name -----------------------------------------------------------------------------


class Named(MemoryChannel):
    """A client that can be held back."""

    def read_little(self) -> None:
        pass


async def metering_of(broker: BrokerUnderTest, *topics: str) -> BrokerMetering:
    """Meters of topics that permit one request a second."""
    table, owners = QuotaTable(None), broker.budget.makers
    assert isinstance(owners, Owners)

    def hold_back(channel: ServerChannel, *, is_held_back: bool) -> None:
        pass

    for topic in topics:
        await table.put(Quota(of="topic", name=topic, requests=1.0))
    metering = BrokerMetering(
        table, broker.registry, hold_back, lambda: None, broker.long_polling, owners
    )
    metering.forget()
    return metering


def pull_frame(topic: str) -> Frame:
    """A pull whose header is JSON, with ``topic`` as it is written there."""
    fields = header_fields(pull_header(topic="TOPIC", consumer_group="g"))
    frame = encode_frame(SerializeType.JSON, PULL, 1, fields=fields)
    ((serialize_type, header, body),) = FrameReader().feed(frame)
    return serialize_type, bytes(header).replace(b"TOPIC", topic.encode()), body


@pytest.mark.parametrize("others", [0, 32])
@pytest.mark.parametrize(
    ("topic", "is_counted"),
    [
        ("orders", True),
        (r"\u006frders", True),
        (r"o\u0072der\u0073", True),
        (r"\u004frders", False),
        ("other", False),
    ],
)
async def test_a_limited_topic_is_found_however_a_header_names_it(
    tmp_path: Path, topic: str, is_counted: bool, others: int
) -> None:
    broker = BrokerUnderTest(tmp_path)
    names = (f"t{number}" for number in range(others))
    metering = await metering_of(broker, "orders", *names)
    served: list[Frame] = []

    def serve(_channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        served.extend(frames)
        return []

    for _ in range(10):
        metering.handle(cast("ServerChannel", Named()), [pull_frame(topic)], serve)
    assert metering.refused["topic", "orders"] == 10 - len(served)
    assert (len(served) < 10) == is_counted


@pytest.mark.parametrize("kind", [SerializeType.JSON, SerializeType.MSGPACK])
@pytest.mark.parametrize(
    ("group", "blanks", "is_counted"),
    [
        ("readers", (0, 0), True),
        ("readers", (1, 0), True),
        ("readers", (0, 20_000), True),
        (r"\u0072eaders", (0, 0), True),
        ("others", (0, 0), False),
    ],
)
async def test_a_limited_group_is_found_in_a_body(
    tmp_path: Path, kind: SerializeType, group: str, blanks: tuple[int, int], is_counted: bool
) -> None:
    metering = await metering_of(BrokerUnderTest(tmp_path))
    await metering.table.put(Quota(of="group", name="readers", requests=1.0))
    metering.forget()
    handle = Handle(0, 1, 1, 0, TopicKind.NORMAL, "broker-a", 0, 0)
    acks = BatchAckBody(acks=[BatchAck.of("T", "GROUP", handle, [0])], broker_name="broker-a")
    before, after = blanks
    body = b" " * before + acks.encode().replace(b"{", b"{" + b" " * after, 1)
    body = body.replace(b"GROUP", group.encode())
    frame = encode_frame(kind, RequestCode.BATCH_ACK_MESSAGE, 1, body_bytes=len(body)) + body
    served: list[Frame] = []

    def serve(_channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        served.extend(frames)
        return []

    for _ in range(30):
        metering.handle(cast("ServerChannel", Named()), FrameReader().feed(frame), serve)
    assert metering.refused["group", "readers"] == 30 - len(served)
    assert (len(served) < 30) == is_counted


async def test_frames_are_looked_at_in_pieces(tmp_path: Path) -> None:
    """Those for which a turn has no time are looked at again."""
    metering = await metering_of(BrokerUnderTest(tmp_path), "orders")
    frames = [pull_frame(f"other{number}") for number in range(1000)]
    served: list[Frame] = []

    def serve(_channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        served.extend(frames[:100])
        return frames[100:]

    rest = metering.handle(cast("ServerChannel", Named()), frames, serve)
    assert (served, rest) == (frames[:100], frames[100:])
    looked_at: list[int] = []

    def serve_all(_channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        looked_at.append(len(frames))
        return []

    assert metering.handle(cast("ServerChannel", Named()), rest, serve_all) == frames[356:]
    assert looked_at == [256]
