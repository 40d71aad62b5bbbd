"""Requests to other daemons: in order, over one connection each, within time and memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog.testing
import trio

from headrace_broker.peers import callers, peers
from headrace_broker.peers.callers import Caller, TooManyRequests
from headrace_broker.peers.nameservers import Nameservers, queues_in
from headrace_broker.peers.peers import Ask, Outcome, Peers
from headrace_broker.statictopic.answer import Answer, MalformedField
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.bodies import (
    BrokerData,
    BrokerMemberGroup,
    ClusterInfo,
    GetBrokerMemberGroupResponseBody,
    MessageQueue,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command
from headrace_protocol.departed import DepartedBroker
from headrace_protocol.drivers.errors import (
    BrokerError,
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    LogInFailed,
    MalformedAnswer,
    RequestTimeout,
)
from headrace_protocol.drivers.response import Response
from headrace_protocol.headers import OffsetResponseHeader
from headrace_protocol.nameserver_headers import GetRouteInfoHeader
from headrace_protocol.rights.credentials import Credentials
from headrace_protocol.serving import Reply
from headrace_protocol.statictopic.mapping import logic_broker_name
from headrace_protocol.tls.names import ServerNames
from headrace_protocol.tls.settings import ClientTls
from tests.support.scripted import Asked, Scripted, close, route, scripted, static_route

CODE = 30
TIMEOUT_MS = 3000
MANY = Caller("many", None, 10_000)
FEW = Caller("few", None, 2)
SCRIPT = Scripted("b:1")
QUICK = Caller("quick", 500, 10)


class Peer:
    """Another broker, and what is asked of it."""

    def __init__(self, network: MemoryNetwork, server: Scripted, **options: Any) -> None:
        self.server = server
        self.is_known = True
        self.lookups: list[str] = []
        self.outcomes: list[tuple[str, Outcome]] = []
        self.peers = Peers(network.connect, lambda: TIMEOUT_MS, **options)
        self.peers.find_address = self.find

    async def find(self, name: str) -> str:
        self.lookups.append(name)
        if name != "b" or not self.is_known:
            raise ConnectFailed(name, "no nameserver knows it")
        return self.server.address

    def begin(
        self, mark: str, name: str = "b", caller: Caller = MANY, answer_bytes: int = 0
    ) -> peers.Call:
        ask = Ask(name, CODE, {"n": mark}, answer_bytes=answer_bytes)
        return self.peers.begin(caller, ask, lambda outcome: self.outcomes.append((mark, outcome)))

    async def until(self, count: int) -> None:
        with trio.fail_after(60):
            while len(self.outcomes) < count:  # noqa: ASYNC110 - the mock clock jumps
                await trio.sleep(0.01)

    @property
    def asked(self) -> list[str]:
        """The marks of the requests that arrived."""
        return [asked.ext["n"] for asked in self.server.asked]


@asynccontextmanager
async def asking(**options: Any) -> AsyncIterator[Peer]:
    network = MemoryNetwork()
    async with scripted(network) as (server,), trio.open_nursery() as nursery:
        peer = Peer(network, server, **options)
        nursery.start_soon(peer.peers.run)
        yield peer
        nursery.cancel_scope.cancel()


async def test_answers_come_in_order_over_one_connection(autojump_clock: object) -> None:
    async with asking() as peer:
        peer.server.answer(CODE, Reply(OffsetResponseHeader(offset=7), (b"body",)))
        for mark in "abc":
            peer.begin(mark)
        await peer.until(3)
        peer.begin("d")
        await peer.until(4)
        assert [mark for mark, _ in peer.outcomes] == list("abcd")
        assert peer.asked == list("abcd")
        assert len({asked.channel for asked in peer.server.asked}) == 1
        assert peer.lookups == ["b"]
        response = peer.outcomes[0][1]
        assert isinstance(response, Response)
        answer = Answer.of(response)
        assert (answer.number("offset"), b"".join(answer.body)) == (7, b"body")


INNER = Credentials("inner", "innersecret")


async def test_connections_are_logged_in_first_and_sign_where_that_is_unknown(
    autojump_clock: object,
) -> None:
    async with asking(credentials=INNER) as peer:
        unknown = Reply(code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        peer.server.answer(RequestCode.AUTH_SESSION, unknown)
        peer.begin("a")
        await peer.until(1)
        login, request = peer.server.asked
        assert login.code == RequestCode.AUTH_SESSION
        assert INNER.signed({"n": "a"}, b"") == request.ext


async def test_a_daemon_that_rejects_the_log_in_is_alive(autojump_clock: object) -> None:
    async with asking(credentials=INNER) as peer:
        peer.server.is_headrace = True
        peer.server.answer(RequestCode.AUTH_SESSION, Reply(code=ResponseCode.NO_PERMISSION))
        assert await peer.peers.is_alive(peer.server.address)
        assert peer.server.asked == []


async def test_a_rejected_log_in_names_the_setting(autojump_clock: object) -> None:
    async with asking(credentials=INNER) as peer:
        peer.server.is_headrace = True
        rejected = Reply(code=ResponseCode.NO_PERMISSION, remark="log-in rejected")
        peer.server.answer(RequestCode.AUTH_SESSION, rejected)
        with structlog.testing.capture_logs() as lines:
            peer.begin("a")
            await peer.until(1)
        [(_, error)] = peer.outcomes
        assert isinstance(error, LogInFailed)
        [line] = lines
        for text in (str(error), str(line)):
            assert "as 'inner': log-in rejected (set innerClientAuthenticationCredentials" in text
            assert INNER.password not in text


@pytest.mark.parametrize(("caller", "time_s"), [(MANY, TIMEOUT_MS / 1000), (QUICK, 0.5)])
async def test_a_broker_that_does_not_answer_costs_its_time_only(
    autojump_clock: object, caller: Caller, time_s: float
) -> None:
    async with asking() as peer:
        peer.server.answer(CODE, None)
        began = trio.current_time()
        peer.begin("another", caller=MANY)
        peer.begin("slow", caller=caller)
        await peer.until(1)
        if caller is MANY:
            await peer.until(2)
        assert time_s <= trio.current_time() - began < time_s + 0.1
        mark, outcome = peer.outcomes[-1]
        assert mark == "slow"
        assert isinstance(outcome, RequestTimeout)
        count = len(peer.outcomes)
        peer.server.answer(CODE, Reply())
        peer.begin("next")
        await peer.until(count + 1)
        assert isinstance(peer.outcomes[-1][1], Response)


async def test_a_broker_that_nobody_knows(autojump_clock: object) -> None:
    async with asking() as peer:
        peer.begin("x", "nobody")
        peer.begin("y")
        await peer.until(2)
        outcomes = dict(peer.outcomes)
        assert isinstance(outcomes["x"], ConnectFailed)
        assert isinstance(outcomes["y"], Response)


async def test_a_broker_that_comes_back_is_connected_again(autojump_clock: object) -> None:
    async with asking() as peer:
        peer.begin("a")
        await peer.until(1)
        peer.server.answer(CODE, close)
        peer.begin("lost")
        await peer.until(2)
        assert isinstance(peer.outcomes[1][1], HeadraceError)
        peer.server.answer(CODE, Reply())
        peer.begin("b")
        await peer.until(3)
        assert isinstance(peer.outcomes[2][1], Response)
        assert peer.lookups == ["b", "b"]


async def test_a_broker_that_is_away_is_tried_at_growing_intervals(autojump_clock: object) -> None:
    """However often it is asked: each request fails at once, with the reason of the last try."""
    with structlog.testing.capture_logs() as logs:
        async with asking() as peer:
            peer.is_known = False
            end_s = trio.current_time() + 10
            while trio.current_time() < end_s:
                asked_s = trio.current_time()
                with pytest.raises(ConnectFailed, match="no nameserver knows it"):
                    await peer.peers.ask(MANY, Ask("b", CODE, {}))
                assert trio.current_time() == asked_s
                await trio.sleep(0.01)
            assert 20 <= len(peer.lookups) <= 30
            peer.is_known = True
            await trio.sleep(0.5)
            assert (await peer.peers.ask(MANY, Ask("b", CODE, {}))).command.code == 0
    assert [log["event"].split(":")[0] for log in logs] == [
        "broker b is unavailable, retrying",
        "broker b is available again after 11 s",
    ]


async def test_answers_have_room_or_wait(autojump_clock: object) -> None:
    async with asking(answer_bytes_max=100) as peer:
        peer.server.answer(CODE, None)
        peer.begin("fills", answer_bytes=80)
        peer.begin("waits", answer_bytes=80)
        await trio.sleep(1)
        assert peer.asked == ["fills"]
        peer.begin("too late", answer_bytes=1)
        await peer.until(2)
        assert [mark for mark, _ in peer.outcomes] == ["fills", "waits"]
        peer.server.answer(CODE, Reply())
        await peer.until(3)
        peer.begin("larger than all", answer_bytes=1000)
        await peer.until(4)
        assert isinstance(peer.outcomes[3][1], Response)


async def test_any_number_may_wait_for_the_room_of_a_broker_that_is_away(
    autojump_clock: object,
) -> None:
    async with asking(answer_bytes_max=100) as peer:
        for number in range(5000):
            peer.begin(str(number), "nobody", answer_bytes=100)
        peer.begin("next", answer_bytes=100)
        await peer.until(5001)
        assert [mark for mark, _ in peer.outcomes] == [*map(str, range(5000)), "next"]
        assert all(isinstance(outcome, ConnectFailed) for _, outcome in peer.outcomes[:5000])
        assert isinstance(peer.outcomes[5000][1], Response)


async def test_others_know_while_an_answer_is_awaited(autojump_clock: object) -> None:
    async with asking() as peer:
        waits: list[bool] = []
        peer.peers.on_waiting = waits.append
        for mark in "ab":
            peer.begin(mark)
        assert waits == [True]
        await peer.until(2)
        assert waits == [True, False]


# -- callers ---------------------------------------------------------------------------------------


def test_every_caller_has_limits() -> None:
    rows = [row for row in vars(callers).values() if isinstance(row, Caller)]
    assert len({row.name for row in rows}) == len(rows) >= 8
    assert all(0 < row.at_once <= 65_536 for row in rows)
    assert all(row.timeout_ms is None or row.timeout_ms > 0 for row in rows)


async def test_a_caller_has_a_few_requests_under_way(autojump_clock: object) -> None:
    async with asking() as peer:
        peer.server.answer(CODE, None)
        for mark in ("1", "2", "3"):
            peer.begin(mark, caller=FEW)
        peer.begin("other", caller=MANY)
        ((mark, outcome),) = peer.outcomes
        assert mark == "3"
        assert isinstance(outcome, TooManyRequests)
        assert "2 requests (few) already wait for b" in str(outcome)
        await peer.until(4)
        assert peer.asked == ["1", "2", "other"]
        peer.server.answer(CODE, Reply())
        peer.begin("4", caller=FEW)
        await peer.until(5)
        assert isinstance(peer.outcomes[4][1], Response)


async def test_a_request_of_a_cancelled_caller_is_dropped(autojump_clock: object) -> None:
    async with asking() as peer:
        waits: list[bool] = []
        peer.peers.on_waiting = waits.append
        peer.server.answer(CODE, None)
        for _ in range(5):
            with trio.move_on_after(0.1):
                await peer.peers.ask(FEW, Ask("b", CODE, {"n": "x"}, answer_bytes=20 << 20))
        assert len(peer.asked) == 5
        assert waits == [True, False] * 5


async def test_dropped_before_there_is_a_connection(autojump_clock: object) -> None:
    async with asking() as peer:
        peer.peers.drop(peer.begin("dropped"))
        peer.begin("asked")
        await peer.until(1)
        assert peer.asked == ["asked"]


async def test_many_are_asked_a_few_at_a_time(autojump_clock: object) -> None:
    async with asking() as peer, trio.open_nursery() as nursery:

        def answer(asked: Asked) -> Reply:
            return Reply(OffsetResponseHeader(offset=int(asked.ext["n"])))

        peer.server.answer(CODE, None, None, answer)
        asks = [Ask("b", CODE, {"n": str(number)}) for number in range(20)]
        outcomes: list[Outcome] = []

        async def ask_all() -> None:
            outcomes.extend(await peer.peers.ask_many(FEW, [*asks, Ask("nobody", CODE, {})]))

        nursery.start_soon(ask_all)
        await trio.sleep(1)
        assert sorted(peer.asked) == ["0", "1"]
        await trio.sleep(3)
        *slow, away = outcomes[0], outcomes[1], outcomes[20]
        assert [type(outcome) for outcome in slow] == [RequestTimeout] * 2
        assert isinstance(away, ConnectFailed)
        found = [outcome for outcome in outcomes if isinstance(outcome, Response)]
        offsets = [response.header(OffsetResponseHeader).offset for response in found]
        assert offsets == list(range(2, 20))


# -- held connections ------------------------------------------------------------------------------


async def test_a_held_connection_is_asked_by_its_address(autojump_clock: object) -> None:
    async with asking() as peer:
        address = peer.server.address
        header = GetRouteInfoHeader(topic="T")
        async with peer.peers.hold(address):
            with pytest.raises(ConnectFailed, match="another part of this broker"):
                async with peer.peers.hold(address):
                    pass
            await peer.peers.ask(FEW, Ask(address, CODE, header=header))
        assert peer.server.asked[0].ext == {"topic": "T", "headrace": "1"}
        assert not peer.lookups
        with pytest.raises(ConnectFailed):
            await peer.peers.ask(FEW, Ask(address, CODE, header=header))


async def test_a_block_ends_with_its_connection(autojump_clock: object) -> None:
    async with asking() as peer:
        address = peer.server.address
        peer.server.answer(CODE, close)

        async def hold(problem: Exception | None) -> None:
            async with peer.peers.hold(address):
                if problem is not None:
                    raise problem
                peer.peers.begin(MANY, Ask(address, CODE), lambda _outcome: None)
                await trio.sleep_forever()

        with pytest.raises(ConnectionLost, match="the peer closed it"):
            await hold(None)
        with pytest.raises(LookupError, match="its own"):
            await hold(LookupError("its own"))


async def test_whether_a_server_is_alive(autojump_clock: object) -> None:
    async with asking() as peer:
        assert await peer.peers.is_alive(peer.server.address)
        assert not await peer.peers.is_alive("127.0.0.1:9")


# -- nameservers -----------------------------------------------------------------------------------


def members(**addresses: str) -> Reply:
    group = BrokerMemberGroup(broker_addrs={int(key[1:]): at for key, at in addresses.items()})
    return Reply(body=(GetBrokerMemberGroupResponseBody(broker_member_group=group).encode(),))


@asynccontextmanager
async def two_nameservers(
    names: ServerNames | None = None,
) -> AsyncIterator[tuple[Nameservers, Scripted, Scripted]]:
    network = MemoryNetwork()
    async with scripted(network, 2) as (one, two), trio.open_nursery() as nursery:
        asked = Peers(network.connect, lambda: TIMEOUT_MS)
        nursery.start_soon(asked.run)
        nameservers = Nameservers(asked, "c", [one.address, two.address], names or network.names)
        async with nameservers.hold(one.address), nameservers.hold(two.address):
            yield nameservers, one, two
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "first",
    [members(), members(_1="slave:1"), Reply(code=1), Reply(body=(b"x",)), None],
    ids=["unknown", "slave", "refused", "malformed", "silent"],
)
async def test_what_one_nameserver_does_not_tell_another_does(
    autojump_clock: object, first: Reply | None
) -> None:
    async with two_nameservers() as (nameservers, one, two):
        one.answer(RequestCode.GET_BROKER_MEMBER_GROUP, first)
        two.answer(RequestCode.GET_BROKER_MEMBER_GROUP, members(_0="master:1"))
        assert await nameservers.find_address("b") == "master:1"


async def test_certificates_of_brokers_may_have_their_names(autojump_clock: object) -> None:
    names, address = ServerNames(), "10.0.0.5:10911"
    async with two_nameservers(names) as (nameservers, one, _):
        one.answer(RequestCode.GET_BROKER_MEMBER_GROUP, members(_0=address))
        assert await nameservers.find_address("broker-b") == address
    assert names.of(ClientTls(), address) == ("10.0.0.5", "broker-b.c")


async def test_a_broker_is_unknown_if_all_nameservers_say_so(autojump_clock: object) -> None:
    async with two_nameservers() as (nameservers, one, two):
        for nameserver in (one, two):
            nameserver.answer(RequestCode.GET_BROKER_MEMBER_GROUP, members())
        with pytest.raises(ConnectFailed, match="no nameserver knows a master of this name"):
            await nameservers.find_address("b")
        one.answer(RequestCode.GET_BROKER_MEMBER_GROUP, None)
        with pytest.raises(RequestTimeout):
            await nameservers.find_address("b")


async def test_a_broker_is_known_by_its_address(autojump_clock: object) -> None:
    brokers = {"b": BrokerData(cluster="c", broker_name="b", broker_addrs={0: "master:1"})}
    async with two_nameservers() as (nameservers, one, two):
        code = RequestCode.GET_BROKER_CLUSTER_INFO
        one.answer(code, Reply(body=(ClusterInfo().encode(),)))
        two.answer(code, Reply(body=(ClusterInfo(broker_addr_table=brokers).encode(),)))
        assert await nameservers.knows("master:1")
        assert not await nameservers.knows("master:2")
        two.answer(code, Reply(code=1, remark="no"))
        with pytest.raises(BrokerError, match="no"):
            await nameservers.knows("master:1")


@pytest.mark.parametrize(
    ("found", "queues"),
    [
        (route(SCRIPT, SCRIPT, queues=2), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (route(SCRIPT, perm=2), []),
        (route(queues=2), []),
        (static_route(SCRIPT, leads=[[0]], total=3), [(None, 0), (None, 1), (None, 2)]),
    ],
)
def test_queues_are_those_of_a_route(found: Reply, queues: list[tuple[int | None, int]]) -> None:
    names = {None: logic_broker_name(), 0: "broker-0", 1: "broker-1"}
    assert queues_in("T", routed(found)) == [
        MessageQueue("T", names[broker], queue_id) for broker, queue_id in queues
    ]


def test_a_route_with_too_many_queues_is_rejected() -> None:
    with pytest.raises(MalformedAnswer, match="over 65536 queues"):
        queues_in("T", routed(route(SCRIPT, SCRIPT, queues=40_000)))


def routed(reply: Reply) -> Response:
    return Response(
        "n:1", RequestCode.GET_ROUTEINFO_BY_TOPIC, Command(0), memoryview(reply.body[0])
    )


async def test_a_nameserver_names_the_brokers_that_left(autojump_clock: object) -> None:
    left = DepartedBroker(broker_name="b", broker_addr="master:1")
    async with two_nameservers() as (nameservers, one, two):
        code = RequestCode.GET_BROKER_CLUSTER_INFO
        one.answer(code, Reply(body=(ClusterInfo(departed_brokers=[left]).encode(),)))
        two.answer(code, Reply(body=(ClusterInfo().encode(),)))  # as Apache RocketMQ's answers
        assert await nameservers.departed(one.address) == [left]
        assert await nameservers.departed(two.address) == []
        two.answer(code, Reply(code=1, remark="no"))
        with pytest.raises(BrokerError, match="no"):
            await nameservers.departed(two.address)


async def test_mappings_come_from_the_nameserver_that_has_the_topic(autojump_clock: object) -> None:
    code = RequestCode.GET_ROUTEINFO_BY_TOPIC
    async with two_nameservers() as (nameservers, one, two):
        one.answer(code, Reply(code=ResponseCode.TOPIC_NOT_EXIST))
        two.answer(code, static_route(two, leads=[[0]], total=1))
        assert [info.bname for info in await nameservers.find_infos("T")] == ["broker-0"]
        found = await nameservers.infos(two.address, [f"T{number}" for number in range(100)])
        assert len(found) == 100
        assert await nameservers.infos(one.address, ["T"]) == {}
        two.answer(code, close)
        with pytest.raises(HeadraceError):
            await nameservers.infos(two.address, ["T"])


# -- answers ---------------------------------------------------------------------------------------


def test_a_field_that_is_not_a_number() -> None:
    assert Answer(0, fields={"offset": 5}).number("offset") == 5
    for fields in ({}, {"offset": "x"}, {"offset": None}):
        with pytest.raises(MalformedField, match="offset="):
            Answer(0, fields=fields).number("offset")
