"""The commands and options that documents, samples and messages mention exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from headrace.admin import cli
from tests.support.documents import ROOT

_FILES = (
    "*.md",
    "Makefile",
    "conf/*",
    "deploy/**/*",
    "docs/**/*.md",
    "examples/*",
    "*/headrace*/**/*.py",
)
_FENCED = re.compile(r"^```(\w*)\n.*?^```$", re.MULTILINE | re.DOTALL)
_WHOLE = re.compile("()(.*)", re.DOTALL)
_QUOTED = re.compile(r"`headrace((?:\s[^`]*)?)`")
_TYPED = re.compile(r"(?:^|[|;&(]) *(?:[$>] )?headrace( [^|;&#>\n]*)", re.MULTILINE)
_ROOT_CONTEXT = click.Context(cli.headrace, info_name="headrace")


def mentions(text: str, *, is_script: bool) -> Iterator[tuple[int, list[str]]]:
    """Line and words of each command: in backticks, and in a script or a document's blocks."""
    for found in _QUOTED.finditer(_FENCED.sub(_blank, text)):
        # A literal of Python may continue in the next line.
        yield _line(text, found), re.sub(r'"\s+f?"', "", found[1]).split()
    for block in (_WHOLE if is_script else _FENCED).finditer(text):
        if block[1] in {"python", "java", "text"}:
            continue
        for found in _TYPED.finditer(block[0].replace("\\\n", "  ")):
            yield _line(text, block), found[1].split()


def _blank(block: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", block[0])


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def problem(words: list[str]) -> str | None:
    """The first word that is no command or option."""
    command: click.Command = cli.headrace
    for word in words:
        if isinstance(command, click.Group) and re.fullmatch(r"[a-z][a-z-]*", word):
            found = command.get_command(_ROOT_CONTEXT, word)
            if found is None and command.invoke_without_command:
                continue
            if found is None:
                return word
            command = found
        elif re.match(r"--?[a-z]", word):
            name = re.split(r"[=\]]", word)[0]
            if name not in {"-h", "--help"} | options(command):
                return name
    return None


def options(command: click.Command) -> set[str]:
    return {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def test_every_command_that_is_mentioned_exists() -> None:
    unknown = {}
    count = 0
    for path in {path for pattern in _FILES for path in ROOT.glob(pattern)}:
        # The history names commands that are gone.
        if not path.is_file() or path.name == "CHANGELOG.md":
            continue
        for line, words in mentions(path.read_text(), is_script=path.suffix in {"", ".sh"}):
            count += 1
            if found := problem(words):
                unknown[f"{path.relative_to(ROOT)}:{line}: headrace {' '.join(words)}"] = found
    assert count > 100
    assert not unknown
