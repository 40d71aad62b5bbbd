"""Who makes a request, and what that subject may do, decided in one place."""

from __future__ import annotations

import hmac
from functools import partial
from typing import Any

import pytest

from headrace_protocol.bounds import OutOfBounds
from headrace_protocol.codes import RequestCode as C
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.frame import Frame, FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.rights.access import Access, AccessSettings, AnonymousAccess
from headrace_protocol.rights.proofs import REJECTED
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.rights.users import UserKind, Users, UserStatus
from headrace_protocol.serving import Request
from headrace_protocol.subject import Subject
from headrace_protocol.system_topics import READER_GROUP
from tests.support.channel import MemoryChannel
from tests.support.rights import request_of, rules_of, signed, user_of, users_of

SECURED = AccessSettings(authentication=True, authorization=True)
OFFSET = {"topic": "T", "queueId": 0}
PULL = {
    "consumerGroup": "g",
    "topic": "T",
    "queueId": 0,
    "queueOffset": 0,
    "maxMsgNums": 1,
    "sysFlag": 0,
    "commitOffset": 0,
    "suspendTimeoutMillis": 0,
    "subVersion": 0,
}
CREATED = {
    "topic": "T",
    "readQueueNums": 1,
    "writeQueueNums": 1,
    "perm": 6,
    "topicFilterType": "SINGLE_TAG",
}


def channel_of(user: str | None = None, ip: str = "127.0.0.1") -> MemoryChannel:
    channel = MemoryChannel()
    channel.user, channel.ip = user, ip
    return channel


def refused(access: Access, request: Request) -> str:
    """The remark of the refusal."""
    with pytest.raises(RequestError) as caught:
        access.check(request)
    assert caught.value.code == ResponseCode.NO_PERMISSION
    return caught.value.remark


def offset_of(user: str, **also: Any) -> Request:
    """A signed request for the end of a queue."""
    return request_of(C.GET_MAX_OFFSET, signed(user, OFFSET), **also)


# -- subjects --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(SerializeType))
def test_a_signed_request_is_that_of_its_user(codec: SerializeType) -> None:
    access = Access(SECURED, users_of(alice=["Topic:T Get"]), "c")
    request = offset_of("alice", codec=codec)
    access.check(request)
    assert request.subject == Subject("alice", "127.0.0.1")


@pytest.mark.parametrize("codec", list(SerializeType))
def test_an_empty_value_is_signed_as_it_is(codec: SerializeType) -> None:
    users = users_of(alice=["Topic:T Create"])
    access = Access(SECURED._replace(needs_tls=False), users, "c")
    fields = signed("alice", {**CREATED, "attributes": ""})
    access.check(request_of(C.UPDATE_AND_CREATE_TOPIC, fields, codec=codec))


def test_a_body_is_signed() -> None:
    access = Access(SECURED, users_of(alice=["* All"]), "c")
    body = b'{"consumerGroup":"g","mqSet":[]}'
    access.check(request_of(C.LOCK_BATCH_MQ, signed("alice", {}, body), body))
    assert refused(access, request_of(C.LOCK_BATCH_MQ, signed("alice", {}), body)) == REJECTED


@pytest.mark.parametrize(("version", "is_signed"), [(399, False), (401, True)])
def test_old_clients_do_not_sign_a_field(version: int, is_signed: bool) -> None:
    access = Access(SECURED, users_of(alice=["Topic:T Get"]), "c")
    fields = {"topic": "T", "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1}
    late = {"_UNIQUE_KEY_QUERY": "true"}
    signed_fields = (
        signed("alice", {**fields, **late}) if is_signed else {**signed("alice", fields), **late}
    )
    access.check(request_of(C.QUERY_MESSAGE, signed_fields, version=version))
    other = 401 if version == 399 else 399
    assert refused(access, request_of(C.QUERY_MESSAGE, signed_fields, version=other)) == REJECTED


def strangers() -> dict[str, dict[str, str]]:
    right = signed("alice", OFFSET)
    return {
        "no name": {"topic": "T", "queueId": "0"},
        "an empty name": {**right, "AccessKey": ""},
        "an unknown user": signed("bob", OFFSET),
        "an unknown user without a signature": {**right, "AccessKey": "bob", "Signature": ""},
        "a wrong secret": signed("alice", OFFSET, secret="other"),
        "another topic": {**right, "topic": "U"},
        "one more field": {**right, "z": "1"},
        "no signature": {k: v for k, v in right.items() if k != "Signature"},
        "a cut signature": {**right, "Signature": right["Signature"][:-1]},
        "a line end": {**right, "Signature": right["Signature"] + "\n"},
        "letters of others": {**right, "Signature": "ä" * 28},
        "a disabled user": signed("off", OFFSET),
        "a user without signatures": signed("session", OFFSET),
        "the secret of nobody": signed("session", OFFSET, secret="0" * 32),
    }


@pytest.mark.parametrize("why", strangers())
def test_nobody_learns_why_a_name_is_rejected(why: str) -> None:
    users = users_of(alice=["* All"])
    users.put(user_of("off", status=UserStatus.DISABLE))
    users.put(user_of("session", secret=None))
    access = Access(SECURED, users, "c")
    assert refused(access, request_of(C.GET_MAX_OFFSET, strangers()[why])) == REJECTED


def test_each_name_costs_one_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the time of the answer tells whether there is such a user."""
    users = users_of(alice=["* All"])
    users.put(user_of("off", status=UserStatus.DISABLE))
    users.put(user_of("session", secret=None))
    access = Access(SECURED, users, "c")
    for fields in strangers().values():
        if fields.get("AccessKey"):
            lengths: list[int] = []
            with monkeypatch.context() as patch:
                patch.setattr(hmac, "digest", partial(counted, lengths, hmac.digest))
                refused(access, request_of(C.GET_MAX_OFFSET, fields))
            assert len(lengths) == 1


def counted(lengths: list[int], digest: Any, key: bytes, text: bytes, name: str) -> Any:
    lengths.append(len(text))
    return digest(key, text, name)


def test_a_session_makes_all_requests_of_its_channel() -> None:
    users = users_of(alice=["Topic:T Get"])
    access, channel = Access(SECURED, users, "c"), channel_of("alice")
    # Fields of another's request, as a broker forwards them, count for nothing.
    fields = signed("root", OFFSET, secret="wrong")
    request = request_of(C.GET_MAX_OFFSET, fields, channel=channel)
    access.check(request)
    assert request.subject == access.subject(channel) == Subject("alice", "127.0.0.1")
    users.put(user_of("alice", status=UserStatus.DISABLE))
    assert refused(access, request_of(C.GET_MAX_OFFSET, OFFSET, channel=channel)) == REJECTED
    users.remove("alice")
    assert refused(access, request_of(C.GET_MAX_OFFSET, OFFSET, channel=channel)) == REJECTED


def test_a_request_that_has_waited_is_judged_again_as_its_user() -> None:
    users = users_of(alice=["* All"])
    access = Access(SECURED, users, "c")
    body = b'{"consumerGroup":"g","mqSet":[]}'
    request = request_of(C.LOCK_BATCH_MQ, signed("alice", {}, body), body)
    access.check(request)
    request.body = b'{"consumerGroup": "g", "mqSet": []}'  # in another form
    access.check(request)
    users.put_rules("alice", rules_of("Group:other Sub"))
    assert "access Group:g" in refused(access, request)
    users.put(user_of("alice", status=UserStatus.DISABLE))
    assert refused(access, request) == REJECTED


def test_a_channel_without_a_session_is_identified_by_each_request() -> None:
    assert Access(SECURED, users_of(), "c").subject(channel_of()) is None
    assert Access(AccessSettings(anonymous="read"), Users(), "c").subject(
        channel_of(ip="10.0.0.1")
    ) == Subject(None, "10.0.0.1")


def test_a_body_that_is_too_large_is_refused_before_its_digest() -> None:
    """A wrong signature shows that there was none."""
    access = Access(SECURED, users_of(alice=["Topic:T Get"]), "c")
    request = offset_of("alice")
    request.body = bytes(1 << 20)
    with pytest.raises(OutOfBounds, match="GET_MAX_OFFSET with a body of 1048576 bytes"):
        access.check(request)
    request.body = bytes(100_000)
    assert refused(access, request) == REJECTED


def test_to_log_in_needs_no_name() -> None:
    Access(SECURED, Users(), "c").check(request_of(C.AUTH_SESSION, {}))


def send_frame(fields: dict[str, Any]) -> Frame:
    frame = encode_frame(SerializeType.JSON, C.SEND_MESSAGE_V2, 1, fields=fields, body_bytes=4)
    (read,) = FrameReader().feed(frame + b"body")
    return read


SEND = {"a": "p", "b": "T", "e": 0, "f": 0, "g": 1, "h": 0, "i": ""}


@pytest.mark.parametrize(
    ("fields", "user"),
    [
        (signed("alice", SEND, b"body"), "alice"),
        (signed("alice", SEND, b"other"), None),
        (signed("alice", SEND, b"body", secret="other"), None),
        (signed("bob", SEND, b"body"), None),
        (signed("root", SEND, b"body"), None),  # in plain TCP
        ({**signed("alice", SEND, b"body"), "b": "U"}, None),
        (SEND, None),
    ],
)
def test_a_send_is_identified_by_its_header_alone(fields: dict[str, Any], user: str | None) -> None:
    access, channel = Access(SECURED, users_of(alice=[]), "c"), channel_of()
    request = request_of(C.SEND_MESSAGE_V2, fields, b"body", channel=channel)
    frame = send_frame(fields)
    runs = [(subject, list(run)) for subject, run in access.senders(channel, [frame, frame])]
    subject = runs[0][0]
    assert runs == [(subject, [frame, frame])]
    if user is None:
        assert subject is None
        with pytest.raises(RequestError):
            access.identify(request)
    else:
        assert subject == access.identify(request) == Subject(user, "127.0.0.1")


def test_sends_are_told_apart_by_their_signers() -> None:
    access, channel = Access(SECURED, users_of(alice=[], bob=[]), "c"), channel_of()
    alice, bob = (send_frame(signed(user, SEND, b"body")) for user in ("alice", "bob"))
    header = bytes(alice[1])
    unreadable = [
        (0, other, b"body") for other in (b"", header[:-9], header.replace(b'"b"', b'"b\xff"'))
    ]
    runs = access.senders(channel, [alice, alice, bob, *unreadable, alice])
    assert [(subject and subject.user, len(list(run))) for subject, run in runs] == [
        ("alice", 2),
        ("bob", 1),
        (None, 3),
        ("alice", 1),
    ]
    channel.log_in("alice")
    assert access.senders(channel, [bob]) == [(Subject("alice", "127.0.0.1"), [bob])]
    channel.log_in("nobody")
    assert access.senders(channel, [bob]) == [(None, [bob])]


# -- signed requests that somebody else could send again -------------------------------------------


@pytest.mark.parametrize(
    ("user", "code", "fields"),
    [
        ("root", C.GET_MAX_OFFSET, OFFSET),
        ("alice", C.UPDATE_AND_CREATE_TOPIC, CREATED),
        ("alice", C.REGISTER_BROKER, {"brokerName": "b"}),
        ("alice", C.AUTH_LIST_USER, {}),
    ],
)
def test_dear_requests_that_are_signed_need_tls(
    user: str, code: int, fields: dict[str, Any]
) -> None:
    users = users_of(alice=["* All"])
    access = Access(SECURED, users, "c")
    request = request_of(code, signed(user, fields))
    assert "needs TLS" in refused(access, request)
    # A handshake of a session can't be sent again.
    access.identify(request_of(code, fields, channel=channel_of(user)))
    request.channel.is_encrypted = True
    access.identify(request)
    plain = Access(SECURED._replace(needs_tls=False), users, "c")
    plain.identify(request_of(code, signed(user, fields)))


def test_who_may_not_sign_does_not_learn_that_tls_is_needed() -> None:
    access = Access(SECURED, users_of(), "c")
    request = request_of(C.GET_MAX_OFFSET, signed("root", OFFSET, secret="wrong"))
    assert refused(access, request) == REJECTED


# -- rights ----------------------------------------------------------------------------------------


def test_refusals_read_as_apaches() -> None:
    users = users_of(alice=["Topic:T Sub", "Group:g Sub Deny", "Topic:U Get Allow 10.0.0.0/8"])
    access = Access(SECURED, users, "c")
    assert refused(access, request_of(C.PULL_MESSAGE, signed("alice", PULL))) == (
        "User:alice has no permission to access Group:g from 127.0.0.1, the decision is deny."
    )
    fields = signed("alice", {**OFFSET, "topic": "U"})
    assert refused(access, request_of(C.GET_MAX_OFFSET, fields)) == (
        "User:alice has no permission to access Topic:U from 127.0.0.1, no matched policies."
    )
    access.check(request_of(C.GET_MAX_OFFSET, fields, channel=channel_of(ip="10.1.1.1")))


def test_the_cluster_of_a_daemon_is_its_own() -> None:
    access = Access(SECURED, users_of(alice=["Cluster:c Get"]), "c")
    access.check(request_of(C.GET_BROKER_CONFIG, signed("alice", {})))
    other = Access(SECURED, users_of(alice=["Cluster:c Get"]), "d")
    assert "access Cluster:d" in refused(
        other, request_of(C.GET_BROKER_CONFIG, signed("alice", {}))
    )


def test_a_code_without_a_row_is_for_super_users() -> None:
    access = Access(SECURED, users_of(alice=["* All"]), "c")
    assert "Super users only" in refused(
        access, request_of(29_999, {}, channel=channel_of("alice"))
    )
    access.check(request_of(29_999, {}, channel=channel_of("root")))


def test_without_authorization_known_users_may_do_everything() -> None:
    access = Access(SECURED._replace(authorization=False), users_of(alice=[]), "c")
    access.check(offset_of("alice"))
    assert access.may(Subject("alice", "127.0.0.1"), Kind.TOPIC, "T", Action.DELETE)
    assert refused(access, request_of(C.GET_MAX_OFFSET, OFFSET)) == REJECTED


def test_a_change_counts_at_once() -> None:
    users = users_of(alice=["Topic:T Pub"])
    access, channel = Access(SECURED, users, "c"), channel_of("alice")
    version = access.version

    def may_send(topic: str) -> bool:
        subject = access.subject(channel)
        assert subject is not None
        return access.may(subject, Kind.TOPIC, topic, Action.PUB)

    assert (may_send("T"), may_send("U")) == (True, False)
    assert access.subject(channel_of()) is None, "each of its requests must be signed"
    users.put_rules("alice", rules_of("Topic:U Pub"))
    assert access.version > version
    assert (may_send("T"), may_send("U")) == (False, True)
    users.put(user_of("alice", UserKind.SUPER))
    assert may_send("T")
    users.remove("alice")
    with pytest.raises(RequestError, match=REJECTED):
        access.subject(channel)


# -- requests without a name -----------------------------------------------------------------------

POLICIES: dict[AnonymousAccess, list[bool]] = {
    "deny": [False, False, False],
    "read": [True, True, False],
    "allow": [True, True, True],
}


@pytest.mark.parametrize("anonymous", POLICIES)
@pytest.mark.parametrize("authentication", [False, True])
def test_anonymous_has_the_rights_of_its_policy(
    authentication: bool, anonymous: AnonymousAccess
) -> None:
    settings = AccessSettings(authentication, authentication, anonymous=anonymous)
    access = Access(settings, users_of(), "c")
    assert access.is_open == (not authentication and anonymous != "read")
    kinds: tuple[tuple[C, dict[str, Any]], ...] = (
        (C.PULL_MESSAGE, PULL),
        (C.GET_BROKER_CONFIG, {}),
        (C.UPDATE_AND_CREATE_TOPIC, CREATED),
    )
    for (code, fields), is_allowed in zip(kinds, POLICIES[anonymous], strict=True):
        request = request_of(code, fields)
        if is_allowed:
            access.check(request)
            assert request.subject == Subject(None, "127.0.0.1")
        else:
            remark = refused(access, request)
            assert remark == REJECTED or "User:anonymous has no permission" in remark


def test_readers_register_where_nobody_can_prove_a_name() -> None:
    request = request_of(C.REGISTER_BROKER, {})
    Access(AccessSettings(anonymous="read"), Users(), "c").check(request)
    with_names = Access(SECURED._replace(anonymous="read"), Users(), "c")
    assert not with_names.may(Subject(None, "127.0.0.1"), Kind.CLUSTER, "c", Action.UPDATE)


def test_readers_make_what_they_use() -> None:
    access = Access(AccessSettings(anonymous="read"), users_of(alice=["Topic:T Create"]), "c")
    nobody = Subject(None, "127.0.0.1")
    assert access.may_create(nobody, Kind.TOPIC, "U")
    assert not access.may(nobody, Kind.TOPIC, "U", Action.CREATE)
    secured = Access(SECURED, users_of(alice=["Topic:T Create"]), "c")
    assert secured.may_create(Subject("alice", "127.0.0.1"), Kind.TOPIC, "T")
    assert not secured.may_create(Subject("alice", "127.0.0.1"), Kind.TOPIC, "U")


@pytest.mark.parametrize("claimed", [None, "alice", "root"])
def test_a_code_of_the_whitelist_gives_nobody_the_rights_of_a_name(claimed: str | None) -> None:
    users = users_of(alice=["Topic:T Get"])
    settings = SECURED._replace(authentication_whitelist=frozenset({C.GET_MAX_OFFSET}))
    fields = signed(claimed, OFFSET, secret="wrong") if claimed else OFFSET
    request = request_of(C.GET_MAX_OFFSET, fields)
    assert "User:anonymous" in refused(Access(settings, users, "c"), request)
    both = settings._replace(authorization_whitelist=frozenset({C.GET_MAX_OFFSET}))
    Access(both, users, "c").check(request)
    Access(settings._replace(authorization=False), users, "c").check(request)
    known = SECURED._replace(authorization_whitelist=frozenset({C.GET_MAX_OFFSET}))
    assert refused(Access(known, users, "c"), request) == REJECTED
    users.put_rules("alice", rules_of())
    Access(known, users, "c").check(offset_of("alice"))


def test_lists_ask_for_each_name() -> None:
    access = Access(SECURED, users_of(alice=["Topic:T* Get", "Group:g Sub"]), "c")
    alice = Subject("alice", "127.0.0.1")
    assert access.may(alice, Kind.TOPIC, "T1", Action.PUB, Action.GET)
    assert not access.may(alice, Kind.TOPIC, "U", Action.PUB, Action.GET)
    assert access.may(alice, Kind.TOPIC, "%RETRY%g", Action.SUB)
    assert not access.may(alice, Kind.TOPIC, "SCHEDULE_TOPIC_XXXX", Action.GET)
    assert access.may(Subject("root", "127.0.0.1", is_super=True), Kind.TOPIC, "U", Action.GET)


def test_readers_without_a_group_need_no_right_on_their_common_one() -> None:
    access = Access(SECURED, users_of(alice=["Topic:T Sub"]), "c")
    alice = Subject("alice", "127.0.0.1")
    assert access.may(alice, Kind.GROUP, READER_GROUP, Action.SUB)
    assert access.may_create(alice, Kind.GROUP, READER_GROUP)
    for action in (Action.UPDATE, Action.DELETE):
        assert not access.may(alice, Kind.GROUP, READER_GROUP, action)
    assert not access.may(alice, Kind.GROUP, "shop", Action.SUB)
    pull = {"topic": "T", "consumerGroup": READER_GROUP, "queueId": 0, "queueOffset": 0}
    access.check(request_of(C.QUERY_CONSUMER_OFFSET, signed("alice", pull)))
