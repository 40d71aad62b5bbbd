"""Clients with a token: where they send it, and log-ins before it ends."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace import Message, Producer
from headrace.errors import ConfigurationError, LogInFailed
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.rights.session_headers import AuthSessionHeader
from headrace_protocol.serving import Reply
from tests.support.scripted import Asked, Scripted, scripted_cluster, storing

LOG_IN = RequestCode.AUTH_SESSION
EXPIRED = Reply(code=ResponseCode.NO_PERMISSION, remark="log-in rejected: it has expired")
LIFETIME_S = 100.0


def accepting(lifetime_s: Callable[[], float] = lambda: LIFETIME_S) -> Callable[[Asked], Reply]:
    """Both answers of a log-in by a token."""

    def answer(asked: Asked) -> Reply:
        if "mechanism" in asked.ext:
            assert (asked.ext["mechanism"], asked.ext["message"]) == ("OAUTHBEARER", "")
            return Reply(AuthSessionHeader(message=""))
        return Reply(AuthSessionHeader(message="", lifetime_ms=int(lifetime_s() * 1000)))

    return answer


def tokens_at(server: Scripted) -> list[str]:
    """The tokens that a server has got."""
    messages = [asked.ext["message"] for asked in server.asked if asked.code == LOG_IN]
    return [each.removeprefix("n,,\x01auth=Bearer ").rstrip("\x01") for each in messages if each]


class TokenFile:
    """A file that a provider's agent writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.put("token-0")

    def __fspath__(self) -> str:
        return str(self.path)

    def put(self, text: str) -> None:
        self.path.touch(0o600)
        self.path.write_text(f"{text}\n")

    def remove(self) -> None:
        self.path.unlink()


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "token")


async def test_connections_log_in_again_before_the_token_ends(
    file: TokenFile, autojump_clock: object
) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, [broker], network):
        nameserver.is_headrace = True
        for server in (nameserver, broker):
            server.answer(LOG_IN, accepting())
        broker.answer_sends(storing())
        at: Any = {"nameserver": nameserver.address, "connect": network.connect}
        async with Producer(**at, token_file=file) as producer:
            await producer.send(Message("T", b"one"))
            await trio.sleep(1)
            for number in range(1, 4):
                file.put(f"token-{number}")
                await trio.sleep(0.8 * LIFETIME_S)
            expected = ["token-0", "token-1", "token-2", "token-3"]
            assert tokens_at(broker) == tokens_at(nameserver) == expected


async def test_a_token_that_stays_is_looked_at_more_often(
    file: TokenFile, autojump_clock: object
) -> None:
    end_s = trio.current_time() + LIFETIME_S
    async with scripted_cluster(headrace=True) as (nameserver, [broker], network):
        nameserver.is_headrace = True
        nameserver.answer(LOG_IN, accepting())
        broker.answer(LOG_IN, accepting(lambda: max(0.0, end_s - trio.current_time())))
        broker.answer_sends(storing())
        at: Any = {"nameserver": nameserver.address, "connect": network.connect}
        async with Producer(**at, token_file=file) as producer:
            await producer.send(Message("T", b"one"))
            await trio.sleep(0.99 * LIFETIME_S)
            assert 3 <= len(tokens_at(broker)) <= 6


async def test_a_log_in_without_an_end_is_the_last(file: TokenFile, autojump_clock: object) -> None:
    open_now = Reply(code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark="not supported")
    async with scripted_cluster(headrace=True) as (nameserver, [broker], network):
        nameserver.is_headrace = True
        nameserver.answer(LOG_IN, accepting())
        broker.answer(LOG_IN, accepting(), accepting(), open_now)
        broker.answer_sends(storing())
        at: Any = {"nameserver": nameserver.address, "connect": network.connect}
        async with Producer(**at, token_file=file) as producer:
            await producer.send(Message("T", b"one"))
            await trio.sleep(5 * LIFETIME_S)
            assert broker.count(LOG_IN) == 3
            await producer.send(Message("T", b"two"))


async def test_a_function_is_asked_for_each_log_in() -> None:
    count = itertools.count()
    async with scripted_cluster(headrace=True) as (nameserver, [broker], network):
        nameserver.is_headrace = True
        for server in (nameserver, broker):
            server.answer(LOG_IN, accepting())
        broker.answer_sends(storing())
        at: Any = {"nameserver": nameserver.address, "connect": network.connect}
        async with Producer(**at, token=lambda: f"token-{next(count)}") as producer:
            await producer.send(Message("T", b"one"))
    assert tokens_at(nameserver) + tokens_at(broker) == ["token-0", "token-1"]


async def test_a_token_that_is_missing_is_looked_for_again(
    file: TokenFile, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, [broker], network):
        nameserver.is_headrace = True
        nameserver.answer(LOG_IN, accepting())
        broker.answer(LOG_IN, accepting())
        broker.answer_sends(storing())
        at: Any = {"nameserver": nameserver.address, "connect": network.connect}
        async with Producer(**at, token_file=file) as producer:
            await producer.send(Message("T", b"one"))
            file.remove()
            with caplog.at_level(logging.WARNING, "headrace.client"):
                await trio.sleep(LIFETIME_S)
                file.put("token-1")
                await trio.sleep(20)
            assert tokens_at(broker) == ["token-0", "token-1"]
    said = [line for line in caplog.messages if f"the log-in at {broker.address}" in line]
    assert f"is unavailable, retrying: token file {file.path}: No such file" in said[0]
    assert "is available again" in said[-1]


async def test_a_token_that_never_changes_is_not_sent_again(autojump_clock: object) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, [broker], network):
        nameserver.is_headrace = True
        nameserver.answer(LOG_IN, accepting())
        broker.answer(LOG_IN, accepting())
        broker.answer_sends(storing())
        at: Any = {"nameserver": nameserver.address, "connect": network.connect}
        async with Producer(**at, token="fixed") as producer:
            await producer.send(Message("T", b"one"))
            await trio.sleep(3 * LIFETIME_S)
            assert tokens_at(broker) == ["fixed"]


async def test_a_connection_that_ends_needs_no_further_log_in(
    file: TokenFile, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, [broker], network):
        nameserver.is_headrace = True
        nameserver.answer(LOG_IN, accepting())
        broker.answer(LOG_IN, accepting())
        broker.answer_sends(storing())
        at: Any = {"nameserver": nameserver.address, "connect": network.connect}
        async with Producer(**at, token_file=file) as producer:
            await producer.send(Message("T", b"one"))
            broker.asked[-1].channel.close("the broker leaves")
            file.remove()
            await trio.sleep(LIFETIME_S)
    assert not any(f"the log-in at {broker.address}" in line for line in caplog.messages)


async def test_a_token_is_not_sent_to_servers_of_others(autojump_clock: object) -> None:
    unknown = Reply(code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark="not supported")
    async with scripted_cluster() as (nameserver, _, network):
        nameserver.answer(LOG_IN, unknown)
        at: Any = {"nameserver": nameserver.address, "connect": network.connect}
        async with Producer(**at, token="hidden") as producer:
            with pytest.raises(LogInFailed, match="is not headrace's, and takes no tokens"):
                await producer.send(Message("T", b"one"))
        assert tokens_at(nameserver) == []


three: Any = lambda: 3  # noqa: E731


async def test_an_unusable_token_is_named_at_once(autojump_clock: object) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, _, network):
        nameserver.is_headrace = True
        nameserver.answer(LOG_IN, EXPIRED)
        at: Any = {"nameserver": nameserver.address, "connect": network.connect}
        async with Producer(**at, token=three) as producer:
            with pytest.raises(ConfigurationError, match="a int, where a text belongs"):
                await producer.send(Message("T", b"one"))
        async with Producer(**at, token="t") as producer:
            with pytest.raises(LogInFailed, match=r"it has expired .check HEADRACE_TOKEN_FILE"):
                await producer.send(Message("T", b"one"))
        with pytest.raises(ConfigurationError, match="token file nowhere"):
            Producer(**at, token_file="nowhere")
