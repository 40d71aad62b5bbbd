"""A guard sees every request before anything is done about it, however it would be served."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.fastjson import PARSED_BYTES_MAX
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.rights.wanted import is_administrative
from headrace_protocol.serving import Registry, Reply, Request
from tests.abuse.hostile import plain_fields
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.nameserver import NameServerUnderTest
from tests.support.rights import plain_body

ONEWAY = 2
READS_OF_USERS = {
    RequestCode.AUTH_GET_USER,
    RequestCode.AUTH_LIST_USER,
    RequestCode.AUTH_GET_ACL,
    RequestCode.AUTH_LIST_ACL,
}


class StrangerChannel(MemoryChannel):
    """A client that the guard refuses."""

    address = "10.0.0.66:1"


def refuse_strangers(request: Request) -> Reply | None:
    if request.channel.address.startswith("10.0.0.66:"):
        return Reply(code=ResponseCode.NO_PERMISSION, remark="who are you?")
    return None


def refuse_by_error(request: Request) -> Reply | None:
    if reply := refuse_strangers(request):
        raise RequestError(reply.code, reply.remark or "")
    return None


guards = pytest.mark.parametrize("guard", [refuse_strangers, refuse_by_error])


class Executed:
    """The requests whose functions were called."""

    def __init__(self, registry: Registry) -> None:
        self.codes: list[int] = []
        self.routed = sorted(registry.functions)
        for code, function in registry.functions.items():
            registry.functions[code] = partial(self._note, code, function)

    def _note(self, code: int, _function: Any, _request: Request) -> Reply:
        self.codes.append(code)
        return Reply()


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T", 1)
    return broker


def registry_of(kind: str, broker: BrokerUnderTest) -> Registry:
    return broker.registry if kind == "broker" else NameServerUnderTest().registry


@guards
@pytest.mark.parametrize("kind", ["broker", "nameserver"])
@pytest.mark.parametrize("codec", list(SerializeType))
def test_nothing_of_a_refused_request_is_executed(
    broker: BrokerUnderTest, kind: str, codec: SerializeType, guard: Any
) -> None:
    registry = registry_of(kind, broker)
    registry.guard(guard)
    executed = Executed(registry)
    refused, served = StrangerChannel(), MemoryChannel()
    routed = [
        code for code in executed.routed if codec is not SerializeType.ROCKETMQ or code < 2**15
    ]
    for code in routed:
        # A body that no request may have: it is not even looked at.
        frame = encode_frame(
            codec, code, 7, fields=plain_fields(code), body_bytes=PARSED_BYTES_MAX + 1
        )
        frames = FrameReader().feed(frame + b"[" * (PARSED_BYTES_MAX + 1))
        registry.handle(refused, frames)
        (answer,) = (answer for answer, _ in refused.replies() if answer.is_response)
        assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, "who are you?")
    assert executed.codes == []
    for code in routed:
        frame = encode_frame(codec, code, 7, fields=plain_fields(code))
        registry.handle(served, FrameReader().feed(frame))
    assert executed.codes == routed


@guards
def test_a_one_way_request_is_refused_without_an_answer(
    broker: BrokerUnderTest, guard: Any
) -> None:
    broker.registry.guard(guard)
    executed, channel = Executed(broker.registry), StrangerChannel()
    frame = encode_frame(SerializeType.JSON, RequestCode.UPDATE_CONSUMER_OFFSET, 7, flag=ONEWAY)
    broker.registry.handle(channel, FrameReader().feed(frame))
    assert executed.codes == []
    assert channel.written == b""


def send_frame(opaque: int) -> bytes:
    fields = {"a": "p", "b": "T", "c": "TBW102", "d": 1, "e": 0, "f": 0, "g": 1, "h": 0, "i": ""}
    frame = encode_frame(
        SerializeType.JSON, RequestCode.SEND_MESSAGE_V2, opaque, fields=fields, body_bytes=4
    )
    return frame + b"body"


@pytest.mark.parametrize("is_early", [True, False])
def test_sends_that_come_together_do_not_pass_a_guard(tmp_path: Path, is_early: bool) -> None:
    broker = BrokerUnderTest(tmp_path, ring_rows=4096)
    broker.create_topic("T", 1)
    refused, served = StrangerChannel(), MemoryChannel()
    # Both are known, so their sends are served together.
    for channel in (refused, served):
        broker.take(send_frame(0) * 3, channel)
        assert {answer.code for answer, _ in channel.replies()} == {ResponseCode.SUCCESS}
    end = broker.store.commit_log.max_offset
    broker.registry.guard(refuse_strangers, {RequestCode.SEND_MESSAGE_V2})
    if is_early:  # what sets the fast way up later does not undo the guard
        broker.registry.route_ready(RequestCode.SEND_MESSAGE_V2, _fail)
    broker.take(b"".join(map(send_frame, range(64))), refused)
    answers = [answer for answer, _ in refused.replies()]
    assert [answer.opaque for answer in answers] == list(range(64))
    assert {answer.code for answer in answers} == {ResponseCode.NO_PERMISSION}
    assert broker.store.commit_log.max_offset == end
    broker.take(b"".join(map(send_frame, range(64))), served)
    assert [answer.code for answer, _ in served.replies()] == [ResponseCode.SUCCESS] * 64
    assert broker.store.commit_log.max_offset > end


def _fail(*_arguments: Any) -> None:
    raise AssertionError("served without the guard")


def test_a_guard_that_fails_refuses(broker: BrokerUnderTest) -> None:
    def fail(_request: Request) -> None:
        raise ZeroDivisionError("a bug")

    broker.registry.guard(fail)
    executed = Executed(broker.registry)
    answer = broker.ask(RequestCode.GET_BROKER_CONFIG)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert executed.codes == []
    broker.faults = 1


def test_each_guard_is_asked_until_one_refuses(broker: BrokerUnderTest) -> None:
    asked: list[str] = []

    def guard(name: str, reply: Reply | None, _request: Request) -> Reply | None:
        asked.append(name)
        return reply

    refusal = Reply(code=ResponseCode.NO_PERMISSION, remark="no")
    for name, reply in (("first", None), ("second", refusal), ("third", None)):
        broker.registry.guard(partial(guard, name, reply))
    assert broker.ask(RequestCode.GET_BROKER_CONFIG).code == ResponseCode.NO_PERMISSION
    assert asked == ["first", "second"]


def test_anonymous_access_to_read_refuses_administration_only(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path, broker_config(tmp_path, anonymous_access="read"))
    executed, refused, channel = Executed(broker.registry), set(), MemoryChannel()
    for code in executed.routed:
        body = plain_body(code)
        frame = encode_frame(
            SerializeType.JSON, code, 7, fields=plain_fields(code), body_bytes=len(body)
        )
        broker.take(frame + body, channel)
        (answer,) = (answer for answer, _ in channel.replies() if answer.is_response)
        if answer.code == ResponseCode.NO_PERMISSION:
            assert "User:anonymous has no permission to access" in (answer.remark or "")
            refused.add(code)
    administration = {code for code in executed.routed if is_administrative(code)}
    # It reads one group, and changes the other.
    assert refused == administration - READS_OF_USERS | {RequestCode.CLONE_GROUP_OFFSET}
    assert set(executed.codes) == set(executed.routed) - refused
    # What another daemon would serve is unknown here, not refused.
    assert broker.ask(RequestCode.PUT_KV_CONFIG).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
