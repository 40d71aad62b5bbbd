"""A newcomer's first minute: the README's commands, `make try` and a wheel."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import ROOT, run_blocks
from tests.support.processes import HEADRACE, TIMEOUT_S

SUGGESTION = re.compile(r"^  (\S*headrace \S.*?) +# .+$", re.MULTILINE)


def planned(target: str) -> str:
    """The commands of a make target in a fresh clone."""
    make = ["make", "--always-make", "--dry-run", target]
    return subprocess.run(make, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_first_commands_of_the_readme_do_all_of_the_set_up() -> None:
    block = (ROOT / "README.md").read_text().split("```console\n")[1].partition("```")[0]
    commands = [line.split("#")[0].strip("$ ") for line in block.splitlines()]
    assert commands == ["make try", "make demo", "make test"]
    for command in commands:
        assert "-m venv .venv" in planned(command.removeprefix("make "))
    assert commands[-1] in (ROOT / ".ci/run").read_text().splitlines()


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("try", set()),
        ("demo", {"spark", "--group demo"}),
        ("test", {"spark", "--group demo", "--group test"}),
        ("check", {"spark", "--group demo", "--group test", "--group check"}),
        ("bench", {"spark", "--group demo", "--group test", "--group bench"}),
    ],
)
def test_a_target_installs_what_it_needs_and_no_more(target: str, parts: set[str]) -> None:
    options = r"spark|--group (?:test|check|bench|demo|dev)\b"
    installs = [line for line in planned(target).splitlines() if "pip install" in line]
    assert set(re.findall(options, "\n".join(installs))) == parts


@pytest.mark.slow
def test_the_first_minute_shows_a_broker_a_message_and_the_flights(tmp_path: Path) -> None:
    # The flights have a test of their own.
    (tmp_path / "headrace").symlink_to(HEADRACE)
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    script = [str(ROOT / "examples/try"), str(tmp_path)]
    done = subprocess.run(script, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.findall(r"^\$ headrace (\S+)", done.stdout, re.MULTILINE)
    assert shown == ["dev", "send", "consume"]
    assert '"body":"coffee"' in done.stdout
    assert done.stdout.endswith("-m examples.flights --no-spark\n")


def on_a_terminal(command: list[str], line_count: int) -> str:
    """The first lines that a daemon writes to a terminal; then it is stopped."""
    ours, its = pty.openpty()
    with subprocess.Popen(command, stdout=its, stderr=its) as process:
        os.close(its)
        text = b""
        while text.count(b"\n") < line_count:
            text += os.read(ours, 4096)
        process.terminate()
    os.close(ours)
    return text.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_dev_suggests_two_commands_on_a_terminal() -> None:
    ports = ["--nameserver-port", "0", "--broker-port", "0"]
    text = on_a_terminal([HEADRACE, "dev", *ports], line_count=3)
    nameserver = re.search(r"nameserver=(\S+)", text)
    assert nameserver is not None
    commands = SUGGESTION.findall(text)
    assert [command.split()[1] for command in commands] == ["consume", "send"]
    assert all(command.endswith(f"-n {nameserver[1]}") for command in commands)


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_runs_the_quickstart(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    assert len(list(dist.glob("*.tar.gz"))) == 1
    (wheel,) = dist.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "empty"], check=True)
    python = tmp_path / "empty/bin/python"
    install(python, wheel)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    broker = subprocess.Popen(
        [python.with_name("headrace"), "dev", "--nameserver-port", "0", "--broker-port", "0"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert broker.stdout is not None
        nameserver = broker.stdout.readline().split()[1].removeprefix("nameserver=")
        run_blocks("docs/quickstart.md", tmp_path, nameserver, python)
    finally:
        broker.terminate()
        broker.communicate(timeout=TIMEOUT_S)


def install(python: Path, wheel: Path) -> None:
    """Install a wheel and its dependencies, as the Makefile does: by uv or by pip."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv:
        command = [uv, "pip", "install", "--python", str(python)]
    else:
        command = [str(python), "-m", "pip", "install"]
    subprocess.run([*command, "--quiet", wheel], check=True)
