"""Log-ins by OAUTHBEARER: the messages of both sides."""

from __future__ import annotations

import pytest

from headrace_protocol.rights.bearer import (
    BEARER_CHARS_MAX,
    TOKEN_CHARS_MAX,
    TokenLogin,
    TokenRejected,
    token_in,
)
from headrace_protocol.rights.credentials import BadCredentials, Token
from headrace_protocol.rights.proofs import EXPIRED, REJECTED, PasswordProof, TokenProof
from headrace_protocol.rights.users import User, UserKind, UserStatus, Verifier


@pytest.mark.parametrize("text", ["a", "aA0._~+/-==", "x" * TOKEN_CHARS_MAX])
def test_the_server_finds_the_token_of_the_client(text: str) -> None:
    login = TokenLogin(Token(text))
    assert (login.mechanism, login.first()) == ("OAUTHBEARER", "")
    message = login.second("")
    assert message == f"n,,\x01auth=Bearer {text}\x01\x01"
    assert len(message) <= BEARER_CHARS_MAX
    assert token_in(message) == text
    login.finish("")


@pytest.mark.parametrize("text", ["", "=", "a b", "a\x01\x01", "ü", "a\n", "x" * 1_000_000])
def test_what_is_no_token_is_not_sent(text: str) -> None:
    with pytest.raises(BadCredentials) as caught:
        TokenLogin(Token(text))
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "n,,",
        "a",
        "n,,\x01auth=Bearer \x01\x01",
        "n,,\x01auth=Basic a\x01\x01",
        "n,,\x01auth=Bearer a\x01",
        "n,,\x01auth=Bearer a\x01\x01\n",
        "y,,\x01auth=Bearer a\x01\x01",
    ],
)
def test_other_messages_have_no_token(message: str) -> None:
    with pytest.raises(TokenRejected):
        token_in(message)


def test_a_token_is_not_shown() -> None:
    assert "hidden" not in repr(Token("hidden"))
    assert Token("hidden").who == "by a token"


def user(verifier: Verifier | None) -> User:
    return User("alice", UserKind.NORMAL, UserStatus.ENABLE, verifier)


def test_a_password_proves_a_user_until_it_changes() -> None:
    verifier = Verifier(b"s", 4096, b"a", b"b")
    proof = PasswordProof(verifier)
    assert not proof.refusal(user(verifier))
    assert proof.refusal(user(verifier._replace(salt=b"t"))) == REJECTED
    assert proof.refusal(user(None)) == REJECTED
    assert proof.lifetime_s is None


@pytest.mark.parametrize(
    ("wall_s", "now_s", "lifetime_s"),
    [(1000.0, 10.0, 60.0), (1059.0, 69.0, 1.0), (1060.0, 11.0, 0.0), (0.0, 70.0, 0.0)],
    ids=["fresh", "late", "put on", "put back"],
)
def test_a_token_ends_by_the_first_of_two_clocks(
    wall_s: float, now_s: float, lifetime_s: float
) -> None:
    proof = TokenProof(1060.0, 70.0, lambda: wall_s, lambda: now_s)
    assert proof.lifetime_s == lifetime_s
    assert proof.refusal(user(None)) == ("" if lifetime_s else EXPIRED)
