"""Odd input of commands: a bad row costs no good one, and what is no text is an error by name."""

from __future__ import annotations

import errno
import io
import re

import click
import pytest

from headrace.admin import cli, options
from headrace.admin.rows import LINE_BYTES_MAX
from tests.support.cli import fail, succeed

pytestmark = pytest.mark.usefixtures("environment")

DEEP = "[" * 100_000 + "]" * 100_000
ODD = "caf\udce9"  # as Python passes an argument in Latin-1 on


def stored(topic: str) -> list[str]:
    return [message["body"] for message in succeed("consume", topic, "--json").json_lines()]


@pytest.mark.parametrize(
    ("row_format", "good", "bad", "reason"),
    [
        ("ndjson", '{"k":"a"}\n', f'{{"k":{DEEP}}}\n', "standard input:3: .*nested too deeply"),
        ("ndjson", '{"k":"a"}\n', '{"k":"\\ud83d"}\n', "standard input:3: key=.*lone surrogate"),
        ("csv", "k\na\n", '"a" b\n', "standard input:4: invalid CSV"),
        pytest.param(
            "csv",
            "k\na\n",
            f'"{"x" * (LINE_BYTES_MAX + 1)}"',
            "quote missing",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lines",
            "a\n",
            "x" * (LINE_BYTES_MAX + 1024 * 1024),
            "standard input:3: a line of more",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_bad_row_costs_no_good_one(
    topic: str, row_format: str, good: str, bad: str, reason: str
) -> None:
    last = good.splitlines(keepends=True)[-1]
    arguments = ["--key-column", "k"] if row_format != "lines" else []
    text = good + last + bad + last
    message = fail(1, "send", topic, "--format", row_format, *arguments, stdin=text.encode())
    assert "Messages sent before this row: 2, none after it" in message
    assert re.search(reason, message)
    assert len(stored(topic)) == 2


class Failing(io.RawIOBase):
    """A file that can be read once."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:  # noqa: ARG002
        if not self._data:
            raise OSError(errno.EIO, "Input/output error")
        data, self._data = self._data, b""
        return data


def test_rows_before_an_error_of_the_file_are_sent(topic: str) -> None:
    assert "Input/output error" in fail(1, "send", topic, stdin=Failing(b"a\nb\nhalf a li"))
    assert stored(topic) == ["a", "b"]


def test_line_ends_of_quoted_fields_arrive(topic: str) -> None:
    text = b'id,body\n1,"one\ntwo"\n2,"three\r\nfour"\n'
    succeed("send", topic, "--format", "csv", "--body-column", "body", stdin=text)
    assert stored(topic) == ["one\ntwo", "three\r\nfour"]


def test_a_row_of_kv_load_that_cannot_be_read(topic: str) -> None:
    text = f'{{"key":"a","value":"1"}}\n{{"key":"a","value":{DEEP}}}\n'
    message = fail(1, "kv", "load", topic, stdin=text.encode())
    assert "standard input:2: the JSON is nested too deeply" in message
    assert "Lines loaded before it: 1" in message
    assert stored(topic) == ["1"]


def test_a_body_is_any_bytes(topic: str) -> None:
    succeed("send", topic, ODD)
    succeed("kv", "put", topic, "k", ODD)
    messages = succeed("consume", topic, "--json").json_lines()
    assert [message["body_base64"] for message in messages] == ["Y2Fm6Q=="] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("send", "T", "body", "--key", ODD),
        ("send", "T", "body", "--tag", ODD),
        ("send", "T", "body", "--property", f"a={ODD}"),
        ("send", ODD, "body"),
        ("consume", "T", "--key", ODD),
        ("consume", "T", "--group", ODD),
        ("topic", "create", ODD),
        ("topic", "describe", "T", "--nameserver", ODD),
        ("message", "query", "T", ODD),
        ("kv", "get", "T", ODD),
        ("kv", "put", "T", ODD, "value"),
        ("group", "describe", ODD),
        ("context", "use", ODD),
    ],
    ids=ascii,
)
def test_other_arguments_are_text(arguments: tuple[str, ...]) -> None:
    message = fail(2, *arguments)
    assert "caf\\udce9' is not valid UTF-8; see `headrace " in message


def test_every_command_refuses_what_is_no_text() -> None:
    def texts(command: click.Command) -> list[click.Parameter]:
        found = [param for param in command.params if type(param.type) is type(click.STRING)]
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                each = command.get_command(context, name)
                assert each is not None
                found += texts(each)
        return found

    assert texts(cli.headrace) == []
    assert options.BYTES.convert("ü", None, None) == "ü".encode()
