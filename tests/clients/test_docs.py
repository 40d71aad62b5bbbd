"""Runs every example of docs/clients.md, each as a program of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headrace
from headrace.config import NAMESERVER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator


DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
EXAMPLE = re.compile(r"```python\n(?P<code>.*?)```\n(?:```text\n(?P<output>.*?)```)?", re.DOTALL)


def examples() -> Iterator[Any]:
    text = DOCUMENT.read_text()
    for match in EXAMPLE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        yield pytest.param(match["code"], match["output"], line, id=f"line-{line}")


@pytest.fixture(scope="module")
def nameserver() -> Iterator[str]:
    with headrace.embedded() as mq:
        yield mq.nameserver


@pytest.mark.parametrize(("code", "output", "line"), list(examples()))
def test_example(
    code: str,
    output: str | None,
    line: int,
    nameserver: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(NAMESERVER_VARIABLE, nameserver)
    # Blank lines before it, so that a traceback's line numbers are the document's.
    exec(compile("\n" * (line - 1) + code, DOCUMENT, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == (output or "")


def test_there_are_examples() -> None:
    assert len(list(examples())) >= 6
