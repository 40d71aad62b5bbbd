"""Every code that a daemon serves: as nobody, and without a rule, with wrong and right rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.rights.proofs import REJECTED
from headrace_protocol.rights.rules import Action, Decision, Entry, Kind, Pattern, Resource, Rules
from headrace_protocol.rights.users import Users
from headrace_protocol.rights.wanted import OWN_CLUSTER, TABLE, Wanted, wanted
from headrace_protocol.serving import Registry, Reply, Request
from tests.abuse.hostile import BODIES_OF_OTHERS, DEEP_BODIES, headers, plain_fields
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.nameserver import NameServerUnderTest
from tests.support.rights import plain_body, plain_request, rights_of, rules_of, signed, users_of


class Daemon:
    """A daemon's registry with access control. served: codes whose functions were called."""

    def __init__(self, users: Users, registry: Registry) -> None:
        self.users = users
        self.registry = registry
        self.served: list[int] = []
        self.codes = sorted(registry.functions)
        for code in self.codes:
            registry.functions[code] = partial(self._serve, code)

    def _serve(self, code: int, _request: Request) -> Reply:
        self.served.append(code)
        return Reply()

    def ask(self, code: int, user: str | None, codec: SerializeType, *, by_session: bool) -> str:
        """The remark of a refusal; empty if the request was served."""
        channel = MemoryChannel()
        channel.user = user if by_session else None
        fields: dict[str, Any] = plain_fields(code)
        body = plain_body(code)
        if user is not None and not by_session:
            fields = signed(user, fields, body)
        frame = encode_frame(codec, code, 7, fields=fields, body_bytes=len(body))
        self.served.clear()
        self.registry.handle(channel, FrameReader().feed(frame + body))
        (answer,) = (answer for answer, _ in channel.replies() if answer.is_response)
        if answer.code == ResponseCode.SUCCESS:
            assert self.served == [code]
            return ""
        assert (answer.code, self.served) == (ResponseCode.NO_PERMISSION, [])
        return answer.remark or "no remark"


def entry_for(want: Wanted, *actions: Action) -> Entry:
    name = "DefaultCluster" if want.name == OWN_CLUSTER and want.kind is Kind.CLUSTER else want.name
    resource = Resource(want.kind, Pattern.LITERAL, name)
    return Entry(resource, frozenset(actions), (), Decision.ALLOW)


def wrong_rules(want: Wanted) -> Iterator[Entry]:
    """Rules that permit everything but what a request needs."""
    yield entry_for(want, *(set(Action) - want.actions - {Action.ALL}))
    yield entry_for(want._replace(name="other"), Action.ALL)
    for kind in {Kind.TOPIC, Kind.GROUP, Kind.CLUSTER} - {want.kind}:
        yield entry_for(want, Action.ALL)._replace(resource=Resource(kind, Pattern.ANY, ""))
    yield entry_for(want, Action.ALL)._replace(decision=Decision.DENY)


@pytest.fixture(params=["broker", "nameserver"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Daemon:
    users = users_of(alice=[])
    rights = rights_of(users)
    if request.param == "broker":
        return Daemon(users, BrokerUnderTest(tmp_path, rights=rights).registry)
    return Daemon(users, NameServerUnderTest(access=rights).registry)


ways = pytest.mark.parametrize(
    ("codec", "by_session"),
    [(codec, by_session) for codec in SerializeType for by_session in (False, True)],
)


def judged(daemon: Daemon, codec: SerializeType) -> list[int]:
    """The codes of a daemon that need a subject, and that fit into a header of the codec."""
    fitting = [c for c in daemon.codes if codec is not SerializeType.ROCKETMQ or c < 2**15]
    assert len(fitting) > 20
    return [code for code in fitting if not TABLE[code].is_for_anybody]


@ways
def test_nobody_is_served(daemon: Daemon, codec: SerializeType, by_session: bool) -> None:
    for code in judged(daemon, codec):
        for name in (None, "unknown"):
            remark = daemon.ask(code, name, codec, by_session=by_session)
            assert remark == REJECTED, RequestCode(code).name


@ways
def test_wrong_rules_do_not_help(daemon: Daemon, codec: SerializeType, by_session: bool) -> None:
    ask = partial(daemon.ask, user="alice", codec=codec, by_session=by_session)
    for code in judged(daemon, codec):
        wants = list(wanted(plain_request(code)))
        daemon.users.put_rules("alice", Rules())
        assert bool(ask(code)) == bool(wants), RequestCode(code).name
        for want in wants:
            others = [entry_for(other, Action.ALL) for other in wants if other[:2] != want[:2]]
            for wrong in wrong_rules(want):
                daemon.users.put_rules("alice", Rules([*others, wrong]))
                name = RequestCode(code).name, wrong
                assert f"access {want.kind.value}:" in ask(code), name


@ways
def test_the_right_rules_are_enough(daemon: Daemon, codec: SerializeType, by_session: bool) -> None:
    ask = partial(daemon.ask, user="alice", codec=codec, by_session=by_session)
    for code in judged(daemon, codec):
        wants = list(wanted(plain_request(code)))
        for number in range(max((len(want.actions) for want in wants), default=1)):
            # One of the actions, another one each time.
            right = [
                entry_for(want, sorted(want.actions, key=str)[number % len(want.actions)])
                for want in wants
            ]
            daemon.users.put_rules("alice", Rules(right))
            assert ask(code) == "", (RequestCode(code).name, right)
        assert daemon.ask(code, "root", codec, by_session=by_session) == ""


def test_only_a_login_needs_nobody(daemon: Daemon) -> None:
    for code in daemon.codes:
        if TABLE[code].is_for_anybody:
            assert code == RequestCode.AUTH_SESSION
            assert daemon.ask(code, None, SerializeType.JSON, by_session=False) == ""


def test_hostile_names_and_bodies_are_judged_without_a_fault(daemon: Daemon) -> None:
    daemon.users.put_rules("alice", rules_of("Topic:T* All", "Group:g All", "Cluster:* Get"))
    channel = MemoryChannel()
    channel.log_in("alice")
    bodies = [b"", *BODIES_OF_OTHERS.values(), *DEEP_BODIES.values()]
    for code in judged(daemon, SerializeType.JSON):
        for fields, body in (
            *((fields, plain_body(code)) for fields in headers(code)),
            *((plain_fields(code), body) for body in bodies),
        ):
            frame = encode_frame(SerializeType.JSON, code, 7, fields=fields, body_bytes=len(body))
            daemon.registry.handle(channel, FrameReader().feed(frame + body))
            (answer,) = (answer for answer, _ in channel.replies() if answer.is_response)
            assert answer.code in {
                ResponseCode.SUCCESS,
                ResponseCode.NO_PERMISSION,
                ResponseCode.INVALID_PARAMETER,
            }, (RequestCode(code).name, answer.remark)
