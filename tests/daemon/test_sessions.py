"""Log-ins at a daemon: who gets in, what the others learn, and what they cost."""

from __future__ import annotations

import random

import pytest
import structlog.testing

from headrace_daemon.access.sessions import HOST_RATE, USER_RATE
from headrace_daemon.host_log import LINES_MAX
from headrace_protocol.codes import ResponseCode
from headrace_protocol.rights.credentials import Credentials
from headrace_protocol.rights.session import Login, verifier_of
from headrace_protocol.rights.session_headers import BOUND, PLAIN, SCRAM_CHARS_MAX
from headrace_protocol.rights.users import UserStatus
from tests.support.certificates import der_of
from tests.support.channel import MemoryChannel
from tests.support.sessions import ALICE, PASSWORD, Door, user, users

WRONG = Credentials("alice", "wrong")
REJECTED = (
    ResponseCode.NO_PERMISSION,
    "log-in rejected: unknown user, wrong password, or disabled",
)
CERTIFICATE = der_of("broker.example")
BINDING = "tls-server-end-point"


@pytest.fixture
def door() -> Door:
    return Door(users("alice", "bob"))


@pytest.mark.parametrize("certificate", [None, CERTIFICATE], ids=["tcp", "tls"])
def test_requests_belong_to_the_user_from_the_log_in_on(
    door: Door, certificate: bytes | None
) -> None:
    channel = MemoryChannel()
    channel.certificate = certificate
    assert door.who(channel) == (ResponseCode.NO_PERMISSION, "check signature failed.")
    assert door.log_in(channel, certificate=certificate) is None
    assert door.who(channel) == (ResponseCode.SUCCESS, "alice")
    assert door.outcomes == [("alice", True)]
    assert channel.charged_bytes == 0


def test_everybody_who_is_rejected_learns_the_same(door: Door) -> None:
    door.users.put(user("carol", UserStatus.DISABLE))
    for credentials in (WRONG, Credentials("nobody", PASSWORD), Credentials("carol", PASSWORD)):
        channel = MemoryChannel()
        assert door.log_in(channel, credentials) == REJECTED
        assert (channel.user, channel.login, channel.charged_bytes) == (None, None, 0)
    assert [is_good for _, is_good in door.outcomes] == [False] * 3


def test_a_name_that_nobody_has_is_answered_like_another(door: Door) -> None:
    def salt(name: str) -> str:
        first = Login(Credentials(name, "x"), None).first()
        _, salt, iterations = door.answer(MemoryChannel(), first, PLAIN).split(",")
        return f"{salt} {iterations}"

    assert salt("nobody") == salt("nobody") != salt("somebody")
    assert len(salt("nobody")) == len(salt("alice"))


def change_status(door: Door) -> None:
    door.users.put(user("alice", UserStatus.DISABLE))


def change_password(door: Door) -> None:
    door.users.put(user("alice")._replace(verifier=verifier_of("another")))


def remove(door: Door) -> None:
    door.users.remove("alice")


CHANGES = pytest.mark.parametrize("change", [change_status, change_password, remove])


@CHANGES
def test_a_user_who_changes_during_the_log_in_is_rejected(door: Door, change: object) -> None:
    channel, login = MemoryChannel(), Login(ALICE, None)
    second = login.second(door.answer(channel, login.first(), PLAIN))
    change(door)  # type: ignore[operator]
    assert door.answer(channel, second) == REJECTED
    assert channel.user is None


@CHANGES
def test_a_user_who_changes_later_is_rejected_from_the_next_request_on(
    door: Door, change: object
) -> None:
    channel = MemoryChannel()
    assert door.log_in(channel) is None
    door.users.put(user("bob"))
    assert door.who(channel)[0] == ResponseCode.SUCCESS
    change(door)  # type: ignore[operator]
    assert door.who(channel)[0] == ResponseCode.NO_PERMISSION


def test_requests_between_the_messages_are_nobodys(door: Door) -> None:
    channel, login = MemoryChannel(), Login(ALICE, None)
    answer = door.answer(channel, login.first(), PLAIN)
    assert door.who(channel)[0] == ResponseCode.NO_PERMISSION
    login.finish(door.answer(channel, login.second(answer)))
    assert door.who(channel) == (ResponseCode.SUCCESS, "alice")


def test_a_second_user_of_a_connection_is_rejected(door: Door) -> None:
    channel = MemoryChannel()
    assert door.log_in(channel) is None
    code, remark = door.log_in(channel, Credentials("bob", PASSWORD))
    assert (code, channel.user) == (ResponseCode.NO_PERMISSION, "alice")
    assert "belongs to 'alice'" in remark


def test_a_first_message_replaces_one_that_waits(door: Door) -> None:
    channel, old, new = MemoryChannel(), Login(ALICE, None), Login(ALICE, None)
    stale = old.second(door.answer(channel, old.first(), PLAIN))
    charged = channel.charged_bytes
    answer = door.answer(channel, new.first(), PLAIN)
    assert channel.charged_bytes == charged > 0
    assert door.answer(channel, stale) == REJECTED
    assert door.answer(channel, new.second(answer)) == REJECTED
    assert channel.charged_bytes == 0


def test_a_recorded_log_in_opens_no_other_connection(door: Door) -> None:
    login, channel = Login(ALICE, None), MemoryChannel()
    first = login.first()
    second = login.second(door.answer(channel, first, PLAIN))
    login.finish(door.answer(channel, second))
    replayed = MemoryChannel()
    assert isinstance(door.answer(replayed, first, PLAIN), str)
    assert door.answer(replayed, second) == REJECTED
    assert door.answer(MemoryChannel(), second) == REJECTED


@pytest.mark.parametrize("mechanism", [PLAIN, "SCRAM-SHA-1", "", "x" * 1000])
def test_a_connection_with_tls_takes_the_bound_mechanism_only(door: Door, mechanism: str) -> None:
    channel = MemoryChannel()
    channel.certificate = CERTIFICATE
    code, remark = door.answer(channel, Login(ALICE, None).first(), mechanism)
    assert (code, BOUND in remark) == (ResponseCode.NO_PERMISSION, True)
    assert len(remark) < 200


@pytest.mark.parametrize("scram", ["", "n,,", "n,,n=alice", "p=x,,n=a,r=b", "\0"])
def test_malformed_messages_are_rejected_like_wrong_ones(door: Door, scram: str) -> None:
    assert door.answer(MemoryChannel(), scram, PLAIN) == REJECTED
    channel, login = MemoryChannel(), Login(ALICE, None)
    door.answer(channel, login.first(), PLAIN)
    assert door.answer(channel, scram) == REJECTED


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_sent_has_an_answer(door: Door, seed: int) -> None:
    chance = random.Random(seed)
    alphabet = "npyrcsive=,*\0 é\u2028\U0001f600" + BINDING

    def changed(text: str) -> str:
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(text) + 1)
            text = text[:at] + chance.choice(alphabet) + text[at + chance.randint(0, 2) :]
        return text

    for _ in range(200):
        door.now_s += 60
        channel, login = MemoryChannel(), Login(ALICE, None)
        answer = door.answer(channel, changed(login.first()), PLAIN)
        if isinstance(answer, str):
            answer = door.answer(channel, changed(f"{answer.split(',')[0]},c=biws,p=AAAA"))
        assert answer == REJECTED


def test_messages_are_bounded(door: Door) -> None:
    code, _ = door.answer(MemoryChannel(), "n,,n=" + SCRAM_CHARS_MAX * "x", PLAIN)
    assert code == ResponseCode.INVALID_PARAMETER
    name = 255 * ","
    assert door.log_in(MemoryChannel(), Credentials(name, PASSWORD), None) == REJECTED


# -- floods ----------------------------------------------------------------------------------------


class Elsewhere(MemoryChannel):
    ip = "10.0.0.9"


def test_a_flood_for_one_name_shuts_out_that_name_at_that_host_for_a_while(door: Door) -> None:
    with structlog.testing.capture_logs() as lines:
        outcomes = [door.log_in(MemoryChannel(), WRONG) for _ in range(200)]
    codes = [code for code, _ in outcomes]
    assert codes.count(ResponseCode.NO_PERMISSION) <= 2 * USER_RATE
    assert codes[-1] == ResponseCode.SYSTEM_BUSY
    assert "too many log-ins from 127.0.0.1 have failed" in outcomes[-1][1]
    assert len(lines) <= LINES_MAX
    assert door.log_in(MemoryChannel()) == outcomes[-1]
    assert door.log_in(MemoryChannel(), Credentials("bob", PASSWORD)) is None
    assert door.log_in(Elsewhere()) is None
    door.now_s += 1.0
    assert door.log_in(MemoryChannel()) is None


def test_a_flood_of_names_shuts_out_its_host_for_a_while(door: Door) -> None:
    first = "n,,n={},r=x"
    for number in range(2000):
        channel = MemoryChannel()
        door.answer(channel, first.format(f"user-{number}"), PLAIN)
        door.answer(channel, "c=biws,r=x,p=AAAA")
    assert len(door.outcomes) <= 2 * HOST_RATE
    assert door.log_in(MemoryChannel())[0] == ResponseCode.SYSTEM_BUSY
    assert door.log_in(Elsewhere()) is None
    door.now_s += 1.0
    assert door.log_in(MemoryChannel()) is None


def test_right_passwords_are_never_too_many(door: Door) -> None:
    for _ in range(int(2 * HOST_RATE)):
        channel, login = MemoryChannel(), Login(ALICE, None)
        assert isinstance(door.answer(channel, login.first(), PLAIN), str)
    assert door.log_in(MemoryChannel()) is None
