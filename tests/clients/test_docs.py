"""Runs every example of docs/clients.md, each as a program of its own.

An example that begins with the name of a file needs something around it: a test of its own runs it.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import Message, blocking
from headrace.config import NAMESERVER_VARIABLE

DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
EXAMPLE = re.compile(r"```python\n(?P<code>.*?)```\n(?:```text\n(?P<output>.*?)```)?", re.DOTALL)


FILE = re.compile(r"# (\w+\.py)\n")


def file_example(folder: Path, name: str) -> Path:
    """The example with this file's name, as a file."""
    (code,) = (
        match["code"]
        for match in EXAMPLE.finditer(DOCUMENT.read_text())
        if match["code"].startswith(f"# {name}\n")
    )
    path = folder / name
    path.write_text(code)
    return path


def examples() -> Iterator[Any]:
    text = DOCUMENT.read_text()
    for match in EXAMPLE.finditer(text):
        if FILE.match(match["code"]):
            continue
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


def test_a_worker_ends_on_sigterm_and_handles_each_message_once(
    nameserver: str, tmp_path: Path
) -> None:
    worker = file_example(tmp_path, "worker.py")
    with blocking.Producer(nameserver=nameserver) as producer:
        producer.send_many([b"%d" % n for n in range(5)], topic="jobs")
        done = []
        for _ in range(2):
            with subprocess.Popen(
                [sys.executable, worker],
                env=os.environ | {NAMESERVER_VARIABLE: nameserver},
                stdout=subprocess.PIPE,
                text=True,
            ) as process:
                assert process.stdout
                done.append(process.stdout.readline())
                process.terminate()
                done += process.stdout.readlines()
                assert process.wait() == 0
            producer.send(Message("jobs", b"last"))
    numbers = [line.removeprefix("done: ").strip() for line in done]
    assert sorted(numbers) == ["0", "1", "2", "3", "4", "last"]


def test_an_application_opens_its_producer_in_its_life_span(
    nameserver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testclient = pytest.importorskip("fastapi.testclient", exc_type=ImportError)
    monkeypatch.setenv(NAMESERVER_VARIABLE, nameserver)
    app = runpy.run_path(str(file_example(tmp_path, "app.py")))["app"]
    with testclient.TestClient(app) as client:
        assert client.post("/jobs/paint").json()["message_id"]


def test_a_fixture_for_pytest_asyncio(tmp_path: Path) -> None:
    pytest.importorskip("pytest_asyncio")
    file_example(tmp_path, "test_jobs.py")
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr


def test_a_traced_program_prints_its_spans(nameserver: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, file_example(tmp_path, "traced.py")],
        env=os.environ | {NAMESERVER_VARIABLE: nameserver},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (output,) = (
        match["output"]
        for match in EXAMPLE.finditer(DOCUMENT.read_text())
        if match["code"].startswith("# traced.py\n")
    )
    assert done.stdout == output
