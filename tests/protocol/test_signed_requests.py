"""Requests of clients to Apache RocketMQ's servers, which have no sessions: each is signed.

The signatures are those of Apache's own client.
"""

from __future__ import annotations

from typing import Any

import pytest

from headrace_protocol.codes import RequestCode
from headrace_protocol.command import FLAG_ONEWAY
from headrace_protocol.connection import Connection
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.rights.credentials import Credentials
from headrace_protocol.rights.signature import SIGNATURE

ROOT = Credentials("root", "rootsecret")
CODECS = pytest.mark.parametrize("codec", [SerializeType.JSON, SerializeType.ROCKETMQ])

CREATE_TOPIC = {
    "topicFilterType": "SINGLE_TAG",
    "order": "false",
    "topicSysFlag": "0",
    "force": "false",
    "attributes": "",
    "writeQueueNums": "2",
    "topic": "T1",
    "perm": "6",
    "defaultTopic": "TBW102",
    "readQueueNums": "2",
}
SEND = {
    "a": "acl_4d8y2ya_p4",
    "b": "acl_4d8y2ya_t1",
    "c": "TBW102",
    "d": "4",
    "e": "1",
    "f": "0",
    "g": "1795702740760",
    "h": "0",
    "i": "UNIQ_KEY\x017F00000150D54E0E2F2A83D16F170000\x02WAIT\x01true\x02",
    "j": "0",
    "k": "false",
    "m": "false",
    "n": "broker-a",
}
VECTORS = [
    (ROOT, {}, b"", "WbQNCQ0xgsSuMzo1JALyJlrPRIY="),
    (Credentials("inner", "innersecret"), {}, b"", "cDmYW9iYFHRcS6iYD/ctLPSJVtA="),
    (
        ROOT,
        {"username": "alice"},
        b'{"password":"alicepw","username":"alice"}',
        "8ro/Otvv1GaAgS5jCshNLUIAlIc=",
    ),
    (ROOT, CREATE_TOPIC, b"", "oTKqoTrbUjp1TmVU0dNDTXZThgk="),
    (
        Credentials("acl_4d8y2ya_u2", "acl_4d8y2ya_secret3"),
        SEND,
        b"sync",
        "r6QV6G6+nyeSJGejTrqhhwRAUwY=",
    ),
]


def sent(buffers: list[Any]) -> tuple[Any, bytes]:
    """The request in a frame."""
    [(serialize_type, header, body)] = FrameReader().feed(b"".join(buffers))
    return decode_header(serialize_type, header), bytes(body)


@pytest.mark.parametrize(("credentials", "fields", "body", "signature"), VECTORS)
def test_fields_are_signed_as_by_the_java_client(
    credentials: Credentials, fields: dict[str, str], body: bytes, signature: str
) -> None:
    signed = credentials.signed(fields, body)
    assert signed[SIGNATURE] == signature
    kept = {name: value for name, value in fields.items() if value}
    assert signed == {**kept, "AccessKey": credentials.user, SIGNATURE: signature}


@CODECS
@pytest.mark.parametrize("is_oneway", [False, True])
def test_each_request_of_a_connection_is_signed(codec: SerializeType, is_oneway: bool) -> None:
    connection: Connection[None] = Connection(codec)
    # The first one has a mark, which is signed as well.
    connection.oneway(RequestCode.GET_BROKER_CLUSTER_INFO)
    connection.sign = ROOT.signed
    body = b'{"password":"alicepw","username":"alice"}'
    header: Any = {"username": "alice"}
    if is_oneway:
        buffers = connection.oneway(3001, header, body)
    else:
        _, buffers = connection.request(3001, header, body, waiter=None)
    command, arrived = sent(buffers)
    assert command.ext()[SIGNATURE] == "8ro/Otvv1GaAgS5jCshNLUIAlIc="
    assert (command.is_oneway, arrived) == (is_oneway, body)


@CODECS
def test_frames_that_a_caller_encodes_are_signed(codec: SerializeType) -> None:
    connection: Connection[None] = Connection()
    frame = encode_frame(
        codec, 310, 7, flag=FLAG_ONEWAY, fields=SEND, body_bytes=4, language="JAVA"
    )
    assert connection.signed([frame, b"sync"]) == [frame, b"sync"]
    credentials, _, _, signature = VECTORS[-1]
    connection.sign = credentials.signed
    command, body = sent(connection.signed([frame, b"sync"]))
    assert command.ext() == {**SEND, "AccessKey": credentials.user, SIGNATURE: signature}
    assert (command.code, command.opaque, command.flag, body) == (310, 7, FLAG_ONEWAY, b"sync")
