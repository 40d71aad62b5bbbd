"""A person at a terminal: typing errors, narrow windows, forgotten options."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from headrace.admin.output import counted, print_rows
from headrace.errors import RouteNotFound
from headrace_daemon import command
from tests.support.cli import fail, headrace, succeed


class Terminal(io.StringIO):
    """A terminal that keeps what it shows."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("wrong", "right"), [("consum", "consume"), ("grp", "group"), ("topics", "topic")]
)
def test_a_misspelt_command_gets_a_suggestion(wrong: str, right: str) -> None:
    assert f"No such command {wrong!r}. Did you mean {right!r}?" in fail(2, wrong, "x")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("send", "t", "--file", "a", "--file", "b"), "--file"),
        (("send", "t", "--body-file", "a", "--body-file", "b"), "--body-file"),
        (("topic", "list", "-n", "a:1", "-n", "b:1"), "--nameserver"),
        (("group", "dlq", "list", "g", "--max", "3", "--max", "4"), "--max"),
    ],
)
def test_an_option_given_twice_is_rejected(arguments: tuple[str, ...], option: str) -> None:
    assert f"{option} is given 2 times; it takes one value" in fail(2, *arguments)


def test_a_context_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CONFIG", str(tmp_path / "headrace.toml"))
    succeed("context", "add", "one", "127.0.0.1:1")
    succeed("context", "use", "one")
    succeed("context", "remove", "one")
    assert succeed("context", "list", "--json").json() == []
    assert "has no context one" in fail(3, "context", "remove", "one")


def test_a_context_has_a_token_in_place_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "token"
    add = ("context", "add", "one", "127.0.0.1:1", "--token-file", str(file))
    assert "No such file" in fail(2, *add)
    file.touch(0o600)
    file.write_text("hidden")
    assert "leave out --user" in fail(2, *add, "--user", "alice")
    succeed(*add)
    assert succeed("context", "list", "--json").json()[0]["user"] == f"of the token in {file}"


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ("--set", "foo=1", "--set", "fileReservedTime=x"),
            ["--set:1: unknown key foo: ", "--set:2: fileReservedTime=x: expected a whole number"],
        ),
        (("--set", "listenPort=5"), ["--set:1: listenPort: use --broker-port"]),
        (("--set", "x"), ["--set:1: expected key=value"]),
    ],
)
def test_settings_of_dev_are_checked(arguments: tuple[str, ...], lines: list[str]) -> None:
    outcome = headrace("dev", *arguments)
    assert outcome.exit_code == 2
    found = outcome.stderr.splitlines()
    assert [text in line for text, line in zip(lines, found, strict=True)] == [True] * len(lines)


@pytest.mark.slow
def test_dev_runs_with_settings(tmp_path: Path) -> None:
    (tmp_path / "broker.conf").write_text("deleteWhen=05\nfileReservedTime=7\n")
    ports = ("--nameserver-port", "0", "--broker-port", "0")
    settings = ("-c", str(tmp_path / "broker.conf"), "--set", "fileReservedTime=9")
    running = subprocess.Popen(
        [sys.executable, "-m", "headrace", "dev", *ports, *settings],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout is not None
        nameserver = running.stdout.readline().split("nameserver=")[1].split()[0]
        found = succeed("broker", "config", "get", "-n", nameserver, "--json").json()
        values = {row["name"]: row["value"] for row in found}
        assert (values["deleteWhen"], values["fileReservedTime"]) == ("05", "9")
    finally:
        running.terminate()
        running.communicate(timeout=30)


@pytest.mark.parametrize("width", [20, 40, 110])
def test_words_of_tables_stay_whole(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    row = {"topic": "orders-of-yesterday", "last_message": "2026-11-26T23:59:54.536Z", "count": 12}
    with redirect_stdout(terminal):
        print_rows([row, row], as_json=False, empty="")
    shown = terminal.getvalue()
    for text in map(str, row.values()):
        assert shown.count(text) == 2, shown
    assert "count" in shown


def test_counts_agree_with_their_nouns() -> None:
    assert [counted(count, "timer") for count in (0, 1, 2)] == ["0 timers", "1 timer", "2 timers"]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_errors_are_red_on_a_terminal(monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    terminal = Terminal()
    monkeypatch.setenv("NO_COLOR", no_color)
    with redirect_stderr(terminal):
        command.fail("bad\nthing")
    red = "headrace:" if no_color else "\x1b[31mheadrace:\x1b[0m"
    assert terminal.getvalue() == f"{red} bad\\nthing\n"


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("orders", "create it with `headrace topic create orders`"),
        ("%DLQ%shop", "it begins with the first dead letter of group shop"),
        ("%RETRY%shop", "it begins with the first member of group shop"),
    ],
)
def test_a_missing_topic_says_what_makes_it(topic: str, hint: str) -> None:
    assert hint in str(RouteNotFound(topic))
