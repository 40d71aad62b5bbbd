"""The set-ups of docs/security.md, followed line by line in a shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace_protocol.drivers.address import local_ip
from tests.conformance.peer import free_ports
from tests.support.documents import ROOT
from tests.support.tokens import ec_key, public, token, write_keys
from tests.support.until import wait_until

pytestmark = pytest.mark.slow

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DONE = "done:"
# The address of the documents' machine.
_HOST = "10.0.0.5"
# The log of each daemon, and the event that it then serves.
_STARTED = {"nameserver.log": '"event": "serving"', "broker.log": '"event": "registered"'}


class Step(NamedTuple):
    """A command, and the lines that it prints."""

    command: str
    output: list[str]


def steps(section: str) -> Iterator[Step]:
    """The commands of a section of the page, as they stand there."""
    page = (ROOT / "docs" / "security.md").read_text()
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    command, output = "", list[str]()
    for block in _BLOCK.finditer(text):
        for line in block[1].splitlines():
            if line.startswith("> "):
                command += f"\n{line[2:]}"
            elif line.startswith("$ "):
                if command:
                    yield Step(command, output)
                command, output = line[2:], []
            else:
                output.append(line)
    yield Step(command, output)


def _write_curl(folder: Path) -> None:
    """What stands in for the provider of tokens."""
    write_keys(folder / "provider.json", public(ec_key(), "k"))
    exp = time.time() + 3600
    answer = {"access_token": token(sub="reports", iss="https://login.example.org", exp=exp)}
    (folder / "answer").write_text(json.dumps(answer))
    curl = folder / "curl"
    cases = f"*/token) cat {folder}/answer;; *) cat {folder}/provider.json;;"
    curl.write_text(f"#!/bin/sh\ncase $2 in {cases} esac\n")
    curl.chmod(0o700)


class Shell:
    """A shell of a user whose files are in the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        port = free_ports(4)
        self._ports = {"9876": str(port), "10911": str(port + 3)}
        _write_curl(folder)
        self._process = subprocess.Popen(
            ["bash"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                "XDG_CONFIG_HOME": str(folder),
                "HOME": str(folder),
                "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def follow(self, step: Step) -> None:
        """Run a command, and compare what it prints."""
        command = self._here(step.command)
        if command.startswith("headrace dev"):
            ports = " ".join(f"--{name}-port {self._ports[port]}" for name, port in _PORTS.items())
            command = command.replace("headrace dev", f"headrace dev {ports}")
        self._in.write(f"{command}\necho {_DONE}$?\n")
        self._in.flush()
        expected = [self._here(line) for line in step.output]
        printed = self._printed()
        if command.endswith("&"):
            while expected and not any(line.startswith("ready") for line in printed):
                printed.append(_plain(self._out.readline()))
            self._wait_started(command)
        code = printed.pop(next(n for n, line in enumerate(printed) if line.startswith(_DONE)))
        is_error = any(line.startswith("headrace: ") for line in expected)
        assert (code == f"{_DONE}0") != is_error, (command, code, printed)
        pattern = "\n".join(map(_pattern, expected))
        assert re.fullmatch(pattern, "\n".join(printed), re.DOTALL), (command, printed)

    def end(self) -> None:
        """End the daemons and the shell."""
        self._process.communicate("kill $(jobs -p); wait; exit\n")

    def _printed(self) -> list[str]:
        lines: list[str] = []
        while not (lines and lines[-1].startswith(_DONE)):
            line = self._out.readline()
            assert line, lines
            lines.append(_plain(line))
        return lines

    def _wait_started(self, command: str) -> None:
        """Wait until the daemon serves whose log the command names."""
        for log, event in _STARTED.items():
            if command.endswith(f" 2> {log} &"):
                wait_until(partial(_logs, self._folder / log, event))

    def _here(self, text: str) -> str:
        for port, own in self._ports.items():
            text = text.replace(port, own)
        return text.replace(_HOST, local_ip())


_PORTS = {"nameserver": "9876", "broker": "10911"}


def _logs(path: Path, event: str) -> bool:
    return path.exists() and event in path.read_text()


def _plain(line: str) -> str:
    return " ".join(line.split())


def _pattern(line: str) -> str:
    """What a line stands for; dots stand for anything, also more lines."""
    return re.escape(_plain(line)).replace(r"\.\.\.", ".*")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.end()


def test_laptop(shell: Shell) -> None:
    for step in steps("Laptop"):
        shell.follow(step)


def test_one_trusted_network(shell: Shell) -> None:
    for step in steps("One trusted network"):
        shell.follow(step)


def settings_of(*sections: str) -> Iterator[Step]:
    """The steps of sections up to the start of daemons."""
    for section in sections:
        for step in steps(section):
            if step.command.startswith("headrace nameserver"):
                break
            yield step


def test_the_open_internet(shell: Shell) -> None:
    for step in (*settings_of("One trusted network"), *steps("The open internet")):
        shell.follow(step)


def test_tokens(shell: Shell) -> None:
    for step in (*settings_of("One trusted network", "The open internet"), *steps("Tokens")):
        shell.follow(step)
