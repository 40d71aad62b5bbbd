"""Untrusted names, tags, bodies and remarks must not control the terminal that shows them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest

from headrace.admin.failures import report
from headrace.admin.messages import print_message
from headrace.admin.output import print_json_line, print_record, print_rows, time_text
from headrace.admin.terminal import show_logs_plainly
from headrace.errors import BrokerError
from headrace.received import ReceivedMessage
from headrace_daemon.command import warn
from headrace_protocol.compression import COMPRESSED
from headrace_protocol.message import decode_record, encode_record
from tests.support.cli import _Capture

# Escape sequences by C0 and C1, another direction, other lines and columns.
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202e\u2066\u2028\r\n\tfake"
HARMLESS = r"\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202e\u2066\u2028\r\n\tfake"
STEERING = frozenset(EVIL) - frozenset("]0;ownd[2J31mfake\n\t")


class Terminal(_Capture):
    def isatty(self) -> bool:
        return True


class Printed:
    """Output of a function to a pipe or a terminal."""

    def __init__(self, kind: type[_Capture]) -> None:
        self.is_terminal = kind is Terminal
        self._kind = kind

    def bytes(self, function: Callable[..., None], *args: Any, **options: Any) -> bytes:
        with redirect_stdout(self._kind()) as out:
            function(*args, **options)
        assert isinstance(out.buffer, io.BytesIO)
        return out.buffer.getvalue()

    def text(self, function: Callable[..., None], *args: Any, **options: Any) -> str:
        return self.bytes(function, *args, **options).decode()


@pytest.fixture(params=[_Capture, Terminal], ids=["pipe", "terminal"])
def printed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.setenv("TERM", "dumb")
    return Printed(request.param)


def test_cells_are_one_line_of_printable_characters(printed: Printed) -> None:
    rows = [{"tag": cell} for cell in (EVIL, [EVIL], {EVIL: "x"})]
    text = printed.text(print_rows, rows, as_json=False, empty="")
    assert not STEERING & set(text)
    assert [HARMLESS in line for line in text.splitlines() if "fake" in line] == [True] * 3


def test_records_are_a_line_for_each_value(printed: Printed) -> None:
    text = printed.text(print_record, {"topic": "T", "body": f"a\tb\n{EVIL}"}, as_json=False)
    assert not STEERING & set(text)
    assert text.count("\n") == 2
    assert rf"a\tb\n{HARMLESS}" in text


def test_json_has_the_same_values_without_such_characters(printed: Printed) -> None:
    rows = [{EVIL: EVIL, "ü": "航空"}]
    for text in (
        printed.text(print_rows, rows, as_json=True, empty=""),
        printed.text(print_json_line, rows[0]).join("[]"),
    ):
        assert not STEERING & set(text)
        assert "航空" in text
        assert json.loads(text) == rows


def message(body: bytes, sys_flag: int = 0) -> ReceivedMessage:
    record = encode_record(topic="T", queue_id=0, body=body, sys_flag=sys_flag)
    return ReceivedMessage.from_stored(decode_record(record), "b")


def test_bodies_are_bytes_in_a_pipe_and_text_on_a_terminal(printed: Printed) -> None:
    shown = printed.bytes(print_message, message(EVIL.encode()), as_json=False)
    if printed.is_terminal:
        assert not STEERING & set(shown.decode())
        assert b"\n\tfake" in shown, "lines of a body stay lines"
    else:
        assert shown == EVIL.encode() + b"\n"


def test_a_body_that_cannot_be_read_is_left_out(
    printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = message(b"no zlib", COMPRESSED)
    assert printed.text(print_message, broken, as_json=False) == ""
    assert capsys.readouterr().err.startswith("headrace: skipped T/b/0@0: ")
    told = json.loads(printed.text(print_message, broken, as_json=True))
    assert "ZLIB body does not decompress" in told["problem"]
    assert "body" not in told
    assert told["message_id"]


def test_errors_and_warnings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(BrokerError(1, EVIL, "10.0.0.1:1", 11)) == 1
    warn(EVIL)
    text = capsys.readouterr().err
    assert not STEERING & set(text)
    assert text.count("\n") == 2
    assert text.count(HARMLESS) == 2


def test_client_logs_are_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a handler of the program's own, as in the command line, warnings are shown."""
    monkeypatch.setattr(logging.lastResort, "formatter", None)
    show_logs_plainly()
    record = logging.LogRecord("headrace", logging.WARNING, "", 0, "%s is away", (EVIL,), None)
    assert logging.lastResort is not None
    assert logging.lastResort.format(record) == f"{HARMLESS} is away"


@pytest.mark.parametrize("timestamp_ms", [2**63 - 1, 10**15])
def test_invalid_times_are_shown_as_numbers(timestamp_ms: int) -> None:
    assert time_text(timestamp_ms) == f"{timestamp_ms} ms"
