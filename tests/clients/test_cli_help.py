"""The command line as a whole: what it loads, its help, its answers to signals."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import headrace as library
from headrace.admin import cli
from headrace.embedded import Embedded
from headrace_protocol.bodies import SubscriptionGroupConfig
from tests.support.cli import headrace
from tests.support.processes import HEADRACE, TIMEOUT_S

_ROOT = cli.headrace.make_context("headrace", [], resilient_parsing=True)


def commands(context: click.Context = _ROOT) -> Iterator[tuple[str, ...]]:
    """Every command and group below ``context``, as the words that a user types."""
    group = context.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        here = click.Context(command, context, info_name=name)
        yield tuple(here.command_path.split()[1:])
        if isinstance(command, click.Group):
            yield from commands(here)


ALL = sorted(commands())


def command_of(words: tuple[str, ...]) -> click.Command:
    command: click.Command | None = cli.headrace
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(_ROOT, word)
    assert command is not None
    return command


# -- loading ---------------------------------------------------------------------------------------

LOADED = (
    "import sys; from headrace.admin.cli import main\ntry: main()\nfinally: print(*sys.modules)"
)


def loaded_by(*arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_version_and_help_load_no_command(option: str) -> None:
    loaded = loaded_by(option)
    heavy = {"trio", "anyio", "msgspec", "numpy", "pydantic", "rich", "structlog", "logging"}
    assert not heavy & loaded
    assert not {name for name in loaded if name.startswith("headrace.admin.commands")}


@pytest.mark.slow
def test_a_command_loads_itself_alone() -> None:
    with library.embedded() as mq:
        loaded = loaded_by("topic", "list", "--nameserver", mq.nameserver)
    assert {name for name in loaded if name.startswith("headrace.admin.commands.")} == {
        "headrace.admin.commands.topic"
    }
    assert not {"asyncio", "numpy", "pydantic", "rich", "structlog", "headrace_broker"} & loaded


# -- help ------------------------------------------------------------------------------------------


def test_the_commands_are_in_panels() -> None:
    text = headrace("-h").stdout
    panels = ["Run:", "Messages:", "Manage:", "Diagnose:"]
    assert [line for line in text.splitlines() if line in panels] == panels
    assert text == headrace("--help").stdout
    assert {words[0] for words in ALL} <= set(text.split())


@pytest.mark.parametrize("name", [words[0] for words in ALL if len(words) == 1])
def test_a_panel_and_a_command_say_the_same(name: str) -> None:
    summary = next(panel[name] for panel in cli.PANELS.values() if name in panel)
    assert (command_of((name,)).help or "").partition("\n")[0] == summary


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_each_command_has_a_help_for_people(words: tuple[str, ...]) -> None:
    outcome = headrace(*words, "-h")
    assert outcome.exit_code == 0
    assert outcome.stdout == headrace(*words, "--help").stdout
    assert "Examples:" in outcome.stdout
    for type_name in ("INTEGER", "TEXT", "FLOAT", "PATH", "BOOLEAN", "["):
        usage, _, options = outcome.stdout.partition("Options:")
        assert f" {type_name} " not in options, usage
    assert "...\n" not in options.partition("Commands:")[2], "a summary is cut off"


def examples() -> list[str]:
    return [
        line.strip()
        for words in ALL
        for line in (command_of(words).epilog or "").splitlines()
        if "headrace " in line
    ]


@pytest.mark.parametrize("example", examples())
def test_examples_have_valid_options(example: str) -> None:
    words = shlex.split(example[example.index("headrace ") :].removesuffix(')"'))[1:]
    command: click.Command | None = cli.headrace
    context = click.Context(cli.headrace, info_name="headrace")
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        name, command, words = command.resolve_command(context, words)
        assert command is not None
        context = click.Context(command, context, info_name=name)
    assert command is not None
    command.make_context(context.info_name, words, context.parent)


# To delete one key is a write like any other.
DELETIONS = [words for words in ALL if words[-1] == "delete" and words[0] != "kv"]


@pytest.mark.parametrize("words", DELETIONS, ids=" ".join)
def test_a_delete_without_a_terminal_needs_yes(words: tuple[str, ...]) -> None:
    outcome = headrace(*words, "something")
    assert outcome.exit_code == 2
    assert "add --yes" in outcome.stderr


# -- completion ------------------------------------------------------------------------------------


def completed(monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """The words that bash offers for the last word of ``line``."""
    words = line.split(" ")
    monkeypatch.setenv("_HEADRACE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    outcome = headrace()
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stderr == ""
    return [word.partition(",")[2] for word in outcome.stdout.splitlines() if word]


def test_commands_and_options_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed(monkeypatch, "headrace con") == ["consume", "context"]
    assert completed(monkeypatch, "headrace topic de") == ["delete", "describe"]
    assert completed(monkeypatch, "headrace topic create --qu") == ["--queues"]
    assert completed(monkeypatch, "headrace topic create --perm r") == ["r", "rw"]


def test_topics_groups_and_contexts_are_completed(
    mq: Embedded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with library.blocking.Admin(nameserver=mq.nameserver) as admin:
        admin.create_group(SubscriptionGroupConfig(group_name="warehouse"))
    monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)
    assert completed(monkeypatch, "headrace consume s") == ["signals"]
    assert completed(monkeypatch, "headrace topic describe sig") == ["signals"]
    assert completed(monkeypatch, "headrace topic create sig") == []
    assert completed(monkeypatch, "headrace group lag w") == ["warehouse"]
    assert completed(monkeypatch, "headrace consume signals --group w") == ["warehouse"]
    monkeypatch.setenv("HEADRACE_NAMESERVER", "127.0.0.1:1")
    assert completed(monkeypatch, "headrace consume s") == []
    where = f"--nameserver {mq.nameserver}"
    assert completed(monkeypatch, f"headrace consume {where} s") == ["signals"]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("_HEADRACE_COMPLETE")
    assert headrace("context", "add", "staging", "a:1").exit_code == 0
    assert completed(monkeypatch, "headrace context use s") == ["staging"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    assert f"_HEADRACE_COMPLETE={shell}_complete" in headrace("completion", shell).stdout


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    with library.embedded() as mq:
        with library.blocking.Producer(nameserver=mq.nameserver) as producer:
            producer.send(library.Message("signals", b"one"))
        yield mq


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
@pytest.mark.parametrize("group", [(), ("--group", "g")], ids=["reader", "member"])
def test_the_exit_code_of_a_signal(
    number: signal.Signals, code: int, group: tuple[str, ...], mq: Embedded
) -> None:
    where = ("--nameserver", mq.nameserver)
    group = group and ("--group", f"g{code}")
    command = [HEADRACE, "consume", "signals", "--follow", *where, *group]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "one\n"
        process.send_signal(number)
        assert process.communicate(timeout=TIMEOUT_S) == ("", "")
    assert process.returncode == code
    if group:
        rows = headrace("group", "lag", group[1], "--topic", "signals", "--json", *where).json()
        assert sum(row["lag"] for row in rows) == 0
