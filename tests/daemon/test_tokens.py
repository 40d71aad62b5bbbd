"""Log-ins by a token at a daemon: which tokens prove a user, and for how long."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from headrace_daemon.access.errors import AccessError
from headrace_daemon.access.sessions import HOST_RATE
from headrace_daemon.access.tokens import Tokens
from headrace_protocol.codes import ResponseCode
from headrace_protocol.rights.credentials import Credentials
from headrace_protocol.rights.proofs import EXPIRED
from headrace_protocol.rights.session_headers import BEARER, SCRAM_CHARS_MAX
from headrace_protocol.rights.users import User, UserKind, UserStatus
from tests.support.channel import MemoryChannel
from tests.support.sessions import PASSWORD, Door, user, users
from tests.support.tokens import (
    LIFETIME_S,
    NOW_S,
    ec_key,
    ed_key,
    public,
    rsa_key,
    settings,
    token,
    write_keys,
)

DENIED = ResponseCode.NO_PERMISSION


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    write_keys(path, public(ec_key(), "k"), public(rsa_key(), "r"), public(ed_key(), "e"))
    return path


@pytest.fixture
def door(keys: Path) -> Door:
    known = users("alice", "bob")
    known.put(User("reports", UserKind.NORMAL, UserStatus.ENABLE, None))
    return Door(known, settings(keys))


def secure() -> MemoryChannel:
    channel = MemoryChannel()
    channel.is_encrypted, channel.certificate = True, b"a certificate"
    return channel


def reason(door: Door, text: str) -> str:
    """Why a token is rejected."""
    channel = secure()
    code, remark = door.log_in_by(channel, text)
    assert (code, channel.user, channel.charged_bytes) == (DENIED, None, 0)
    assert text not in remark
    return str(remark).removeprefix("log-in rejected: the token proves no user: ")


# -- which tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        token(),
        token(rsa_key(), "r", "RS256"),
        token(rsa_key(), "r", "PS512"),
        token(ed_key(), "e", "EdDSA"),
        token(aud=["other", "headrace"], nbf=NOW_S + 30, iat=NOW_S + 30),
        token(exp=NOW_S + 0.5),
        token(groups=["g" * 40] * 250),
    ],
    ids=["ES256", "RS256", "PS512", "EdDSA", "one of its audiences", "half a second", "long"],
)
def test_a_token_of_the_provider_proves_its_user(door: Door, text: str) -> None:
    channel = secure()
    assert door.log_in_by(channel, text) is None
    assert door.who(channel) == (ResponseCode.SUCCESS, "alice")
    assert door.outcomes == [("alice", True)]
    assert channel.charged_bytes == 0


def test_a_user_without_a_password_comes_by_token_only(door: Door) -> None:
    channel = secure()
    assert door.log_in_by(channel, token(sub="reports")) is None
    assert door.who(channel) == (ResponseCode.SUCCESS, "reports")
    for password in (PASSWORD, "x"):
        code, _ = door.log_in(MemoryChannel(), Credentials("reports", password))
        assert code == DENIED


def unsigned(algorithm: str = "none", **more: object) -> str:
    """A token with a signature that says nothing."""
    head = json.dumps({"alg": algorithm, "kid": "k", **more}).encode()
    _, body, signature = token().split(".")
    return f"{base64.urlsafe_b64encode(head).decode().rstrip('=')}.{body}.{signature}"


def forged(key: Any, kid: str) -> str:
    """A token with HS256, whose secret is a public key that everybody has."""
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": kid}).encode())
    text = head.decode().rstrip("=") + "." + token().split(".")[1]
    digest = hmac.digest(pem, text.encode(), hashlib.sha256)
    return f"{text}.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def nested() -> str:
    deep = base64.urlsafe_b64encode(b"[" * 6000).decode().rstrip("=")
    return f"{deep}.{deep}.x"


def changed() -> str:
    """Another user's name under alice's signature."""
    head, _, signature = token().split(".")
    return f"{head}.{token(sub='bob').split('.')[1]}.{signature}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (token(ec_key(1)), "its signature is wrong"),
        (changed(), "its signature is wrong"),
        (token(exp=NOW_S), "it has expired"),
        (token(exp=NOW_S - 3600), "it has expired"),
        (token(exp=None), "it lacks one of exp, aud and iss"),
        (token(exp=1e300), "its exp is no time"),
        (token(exp="soon"), "its exp is no time"),
        (token(exp=True), "its exp is no time"),
        (token(exp=-1), "its exp is no time"),
        (token(nbf=NOW_S + 61), "it is not valid yet"),
        (token(aud="other"), "it is for another audience"),
        (token(aud=None), "it lacks one of exp, aud and iss"),
        (token(iss="https://other.example"), "another issuer has made it"),
        (token(iss=None), "it lacks one of exp, aud and iss"),
        (unsigned(), "it is signed by an algorithm that is not its key's"),
        (unsigned("HS256"), "it is signed by an algorithm that is not its key's"),
        (unsigned("RS256"), "it is signed by an algorithm that is not its key's"),
        (forged(ec_key(), "k"), "it is signed by an algorithm that is not its key's"),
        (forged(rsa_key(), "r"), "it is signed by an algorithm that is not its key's"),
        (token(kid="other"), "its key is not among those of authJwksFile"),
        (token(kid=None), "its key is not among those of authJwksFile"),
        (unsigned("ES256", kid=7), "it is malformed"),
        (unsigned("ES256", crit=["x"], x=1), "it is malformed"),
        (nested(), "it is malformed"),
        ("a.b", "it is malformed"),
        ("a.b.c", "it is malformed"),
        (token(sub=None), "its claim 'sub' is no user's name"),
        (token(sub=""), "its claim 'sub' is no user's name"),
        (token(sub="x" * 256), "its claim 'sub' is no user's name"),
        (token(sub="nobody"), "'nobody' is no user here, or disabled"),
    ],
)
def test_other_tokens_are_rejected_with_a_reason(door: Door, text: str, why: str) -> None:
    assert reason(door, text) == why
    assert [is_good for _, is_good in door.outcomes] == [False]


@pytest.mark.parametrize(
    ("message", "remark"),
    [
        ("n,,\x01auth=Bearer " + "x" * 1_000_000, "message of 1000016 characters"),
        ("n,,\x01auth=Bearer a b\x01\x01", "no bearer token in the message"),
        ("", "no bearer token in the message"),
    ],
)
def test_messages_without_a_token_are_rejected(door: Door, message: str, remark: str) -> None:
    channel = secure()
    assert door.answer(channel, "", BEARER) == ""
    assert channel.charged_bytes > 0
    _, said = door.answer(channel, message)
    assert remark in said
    assert (channel.user, channel.charged_bytes) == (None, 0)


def test_the_first_message_is_empty(door: Door) -> None:
    assert "must be empty" in door.answer(secure(), "n,,\x01auth=Bearer a\x01\x01", BEARER)[1]
    assert "characters" in door.answer(secure(), "x" * (SCRAM_CHARS_MAX + 1), BEARER)[1]


def test_a_disabled_user_is_rejected_now_and_later(door: Door) -> None:
    channel = secure()
    assert door.log_in_by(channel, token()) is None
    door.users.put(user("alice", UserStatus.DISABLE))
    assert door.who(channel) == (DENIED, "check signature failed.")
    assert reason(door, token()) == "'alice' is no user here, or disabled"


def test_a_flood_of_wrong_tokens_is_rejected_unread(door: Door) -> None:
    text = token(ec_key(1))
    for _ in range(int(HOST_RATE)):
        assert reason(door, text) == "its signature is wrong"
    code, remark = door.log_in_by(secure(), token())
    assert (code, remark[:17]) == (ResponseCode.SYSTEM_BUSY, "too many log-ins ")
    door.now_s += 1
    assert door.log_in_by(secure(), token()) is None


# -- where they are taken --------------------------------------------------------------------------


def test_a_token_needs_tls_unless_the_daemon_says_otherwise(keys: Path) -> None:
    code, remark = Door(users("alice"), settings(keys)).log_in_by(MemoryChannel(), token())
    assert (code, remark[:31]) == (DENIED, "log-in rejected: a token needs ")
    channel = MemoryChannel()
    open_door = Door(users("alice"), settings(keys), needs_tls=False)
    assert open_door.log_in_by(channel, token()) is None
    assert channel.user == "alice"


def test_a_daemon_without_keys_says_so() -> None:
    _, remark = Door(users("alice")).log_in_by(secure(), token())
    assert remark == "log-in rejected: this daemon takes no tokens: authJwksFile is not set"


# -- how long --------------------------------------------------------------------------------------


def test_the_user_is_lost_at_the_end_of_the_token(door: Door) -> None:
    channel = secure()
    assert door.log_in_by(channel, token()) is None
    assert door.lifetime_ms == LIFETIME_S * 1000
    door.now_s += LIFETIME_S - 0.1
    assert door.who(channel)[0] == ResponseCode.SUCCESS
    door.now_s += 0.1
    assert door.who(channel) == (DENIED, EXPIRED)


def test_a_connection_stays_by_another_token(door: Door) -> None:
    channel = secure()
    assert door.log_in_by(channel, token()) is None
    for lost in (False, True):
        door.now_s += LIFETIME_S if lost else LIFETIME_S - 1
        door.wall_s += LIFETIME_S if lost else LIFETIME_S - 1
        assert (door.who(channel)[1] == EXPIRED) is lost
        assert door.log_in_by(channel, token(exp=door.wall_s + LIFETIME_S)) is None
        assert door.who(channel) == (ResponseCode.SUCCESS, "alice")
    assert door.outcomes == [("alice", True)], "further log-ins are no events"


def test_a_connection_keeps_its_user(door: Door) -> None:
    channel = secure()
    assert door.log_in_by(channel, token()) is None
    for attempt in (
        door.log_in_by(channel, token(sub="bob")),
        door.log_in(channel, certificate=b"a certificate"),
    ):
        assert "belongs to 'alice'" in attempt[1]
    assert "the token proves no user" in door.log_in_by(channel, token(ec_key(1)))[1]
    assert door.who(channel) == (ResponseCode.SUCCESS, "alice")
    by_password = MemoryChannel()
    assert door.log_in(by_password) is None
    by_password.is_encrypted = True
    assert "belongs to 'alice'" in door.log_in_by(by_password, token())[1]


# -- keys ------------------------------------------------------------------------------------------


def test_new_keys_count_from_the_next_log_in_on(door: Door, keys: Path) -> None:
    old, new = token(), token(ec_key(1), "k2")
    assert reason(door, new) == "its key is not among those of authJwksFile"
    write_keys(keys, public(ec_key(1), "k2"))
    channel = secure()
    assert door.log_in_by(channel, new) is None
    assert reason(door, old) == "its key is not among those of authJwksFile"


@pytest.mark.parametrize("found", ["", "{", '{"keys":[]}', None])
def test_unusable_keys_leave_the_old_ones(door: Door, keys: Path, found: str | None) -> None:
    keys.unlink()
    if found is not None:
        keys.write_text(found)
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            assert door.log_in_by(secure(), token()) is None
    assert [line["event"] for line in lines] == ["keys of tokens not changed"]


def test_the_only_key_needs_no_id(keys: Path) -> None:
    write_keys(keys, public(ec_key(), None))
    assert Door(users("alice"), settings(keys)).log_in_by(secure(), token(kid=None)) is None


def test_another_claim_may_name_the_user(keys: Path) -> None:
    channel = secure()
    door = Door(users("alice"), settings(keys, user_claim="azp", issuer=""))
    assert door.log_in_by(channel, token(sub="x", azp="alice", iss="any")) is None
    assert channel.user == "alice"


SECRET = {"kty": "oct", "k": "c2VjcmV0", "kid": "k"}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"keys": {}}, "is no JWK set"),
        ({"keys": [1]}, "is no JWK set"),
        ([], "is no JWK set"),
        ({"keys": [SECRET]}, "has no key for"),
        ({"keys": [public(rsa_key(1024), "k")]}, "has no key for"),
        ({"keys": [public(ec_key(), "k", use="enc")]}, "has no key for"),
        ({"keys": [public(ec_key(), "k", alg="HS256")]}, "has no key for"),
        ({"keys": [public(ec_key(), "k", x="!")]}, "has no key for"),
        ({"keys": [public(ec_key(), "k", d="x")]}, "key 1 of 1 is a private one"),
        ({"keys": [], "x": "x" * 1024 * 1024}, "is no JWK set"),
    ],
)
def test_a_daemon_does_not_start_without_usable_keys(
    tmp_path: Path, found: object, why: str
) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps(found))
    with pytest.raises(AccessError, match=why):
        Tokens(settings(path))
    with pytest.raises(AccessError, match="No such file"):
        Tokens(settings(tmp_path / "none"))


@pytest.mark.parametrize("value", [7, True, ["P-256"], {"P-256": 1}], ids=str)
@pytest.mark.parametrize("name", ["kty", "kid", "use", "alg", "crv", "n", "e", "x", "y"])
def test_a_key_with_a_member_that_is_no_text_is_named(
    door: Door, keys: Path, name: str, value: object
) -> None:
    odd = {**public(rsa_key(), "r"), **public(ec_key(), "k"), name: value}
    write_keys(keys, public(ec_key(), "k"), odd)
    with pytest.raises(AccessError, match=f"key 2 of 2 has no text as its {name}: "):
        Tokens(settings(keys))
    assert door.log_in_by(secure(), token()) is None


def test_a_stated_algorithm_is_the_only_one(keys: Path) -> None:
    write_keys(keys, public(rsa_key(), "r", alg="RS256"), SECRET)
    door = Door(users("alice"), settings(keys))
    assert door.log_in_by(secure(), token(rsa_key(), "r", "RS256")) is None
    why = "it is signed by an algorithm that is not its key's"
    assert reason(door, token(rsa_key(), "r", "PS256")) == why


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()], ids=["ES384", "ES512"])
def test_longer_curves_have_their_algorithm(keys: Path, curve: ec.EllipticCurve) -> None:
    key = ec.generate_private_key(curve)
    write_keys(keys, public(key, "k"))
    algorithm = {"secp384r1": "ES384", "secp521r1": "ES512"}[curve.name]
    door = Door(users("alice"), settings(keys))
    assert door.log_in_by(secure(), token(key, "k", algorithm)) is None
