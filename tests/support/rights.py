"""Users with rules, and their signed requests."""

from __future__ import annotations

import json
from typing import Any

from headrace_daemon.access.opening import NoUsers, OpenedAccess
from headrace_protocol.codes import RequestCode
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, decode_header, encode_frame
from headrace_protocol.rights.access import Access, AccessSettings
from headrace_protocol.rights.rules import Entry, Rules
from headrace_protocol.rights.signature import ACCESS_KEY, SIGNATURE, sign
from headrace_protocol.rights.users import User, UserKind, Users, UserStatus, Verifier
from headrace_protocol.serving import Request
from tests.abuse.hostile import plain_fields
from tests.support.channel import MemoryChannel

NO_VERIFIER = Verifier(b"", 1, b"", b"")
_BODIES: dict[int, Any] = {
    RequestCode.LOCK_BATCH_MQ: {
        "consumerGroup": "Foreign",
        "clientId": "c",
        "mqSet": [{"topic": "Foreign", "brokerName": "b", "queueId": 0}],
    },
    RequestCode.CHECK_CLIENT_CONFIG: {"group": "Foreign", "subscriptionData": {"topic": "Foreign"}},
    RequestCode.QUERY_ASSIGNMENT: {"consumerGroup": "Foreign", "topic": "Foreign"},
    RequestCode.SET_MESSAGE_REQUEST_MODE: {"consumerGroup": "Foreign", "topic": "Foreign"},
    RequestCode.BATCH_ACK_MESSAGE: {"acks": [{"c": "Foreign", "t": "Foreign"}]},
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: {"topicConfigList": [{"topicName": "Foreign"}]},
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: {
        "groupConfigList": [{"groupName": "Foreign"}]
    },
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: {"groupName": "Foreign"},
}
_BODIES[RequestCode.UNLOCK_BATCH_MQ] = _BODIES[RequestCode.LOCK_BATCH_MQ]


def user_of(
    name: str,
    kind: UserKind = UserKind.NORMAL,
    status: UserStatus = UserStatus.ENABLE,
    secret: str | None = "secret",
) -> User:
    """A user who signs with ``secret``."""
    return User(name, kind, status, NO_VERIFIER, secret)


def users_of(**rules: list[str]) -> Users:
    """Users with their rules, and ``root``, who is Super.

    rules: by user, as ``"Topic:T Pub,Sub"``; with ``Deny`` or an address behind it if need be.
    """
    users = Users()
    users.put(user_of("root", UserKind.SUPER))
    for name, lines in rules.items():
        users.put(user_of(name))
        users.put_rules(name, rules_of(*lines))
    return users


def rights_of(users: Users, **settings: Any) -> OpenedAccess:
    """Authentication and authorization, without the need for TLS."""
    plain = AccessSettings(authentication=True, authorization=True, needs_tls=False)
    access = Access(plain._replace(**settings), users, "DefaultCluster")
    return OpenedAccess(users, access, NoUsers(), None)


def client_of(user: str) -> MemoryChannel:
    """A client that has logged in, and has sent a request before."""
    channel = MemoryChannel()
    channel.log_in(user)
    channel.is_greeted = True
    return channel


def rules_of(*lines: str) -> Rules:
    """Rules as in ``users_of``."""
    return Rules([_entry(*line.split(" ")) for line in lines])


def _entry(resource: str, actions: str, decision: str = "Allow", *addresses: str) -> Entry:
    return Entry.parse(resource, actions.split(","), addresses, decision)


def signed(
    user: str, fields: dict[str, Any], body: bytes = b"", secret: str = "secret"
) -> dict[str, str]:
    """Fields with a user's signature, as in a request of Apache RocketMQ's clients."""
    texts = {
        name: text if isinstance(text, str) else json.dumps(text) for name, text in fields.items()
    }
    texts[ACCESS_KEY] = user
    return {**texts, SIGNATURE: sign(secret, texts, body)}


def request_of(
    code: int,
    fields: dict[str, Any],
    body: bytes = b"",
    codec: SerializeType = SerializeType.JSON,
    channel: MemoryChannel | None = None,
    version: int = 513,
) -> Request:
    """A request as the registry makes it of a frame."""
    frame = encode_frame(codec, code, 1, fields=fields, body_bytes=len(body), version=version)
    ((_, header, received),) = FrameReader().feed(frame + body)
    command = decode_header(codec, header)
    return Request(channel or MemoryChannel(), codec, command, received, len(header))


def plain_body(code: int) -> bytes:
    """A body with each name that the rights of a code depend on."""
    return json.dumps(_BODIES[code]).encode() if code in _BODIES else b""


def plain_request(code: int, codec: SerializeType = SerializeType.JSON) -> Request:
    """A request with each field that its header has."""
    return request_of(code, plain_fields(code), plain_body(code), codec)
