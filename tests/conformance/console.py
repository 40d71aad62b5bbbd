"""Apache's client and ``mqadmin`` in one JVM that serves all tests; see Console.java."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Timer

from tests.conformance.peer import QUICK_JVM, Peer, driver_command

TIMEOUT_S = 600


class Console:
    """The running JVM.

    home: where the official client keeps offsets, and mqadmin and the JVM's errors go.
    """

    def __init__(self, home: Path, options: Sequence[str] = ()) -> None:
        """options: more of the JVM's."""
        self.home = home
        self._errors = home / "console.stderr"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                driver_command("conformance.Console", home=home, options=(*QUICK_JVM, *options)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=home,  # where mqadmin writes what consumerStatus finds
            )

    def dump(self, peer: Peer, topics: Iterable[str], groups: Iterable[str]) -> set[str]:
        """Dump.java's lines for the broker's topics and groups."""
        printed = self._ask("dump", peer.nameserver, ",".join(topics), ",".join(groups))
        return set(printed.splitlines())

    def mqadmin(self, peer: Peer, *command: str) -> list[str]:
        """The rows of the table that the command prints.

        They name the broker, or begin with a message id.
        """
        lines = self.printed(peer, *command).splitlines()
        return sorted(ln for ln in lines if "broker-a" in ln or re.match("[0-9A-F]{32} ", ln))

    def printed(self, peer: Peer, *command: str) -> str:
        """All that the command prints."""
        return self.run(peer.nameserver, *command)

    def run(self, nameserver: str, *command: str) -> str:
        """As ``printed``."""
        return self._ask("mqadmin", nameserver, *command)

    def join(self, nameserver: str, group: str, topic: str, *words: str) -> str:
        """Start a member of a group; returns its client id. words: see Members.java."""
        return self._ask("join", nameserver, group, topic, *words)

    def received(self, client_id: str) -> list[str]:
        """The bodies that a member has received."""
        return self._ask("received", client_id).splitlines()

    def leave(self, client_id: str) -> None:
        """Stop a member."""
        self._ask("leave", client_id)

    def ask(self, nameserver: str, topic: str, body: str) -> str:
        """Send a request; returns the body of its reply."""
        return self._ask("ask", nameserver, topic, body)

    @contextlib.contextmanager
    def replier(self, nameserver: str, group: str, topic: str) -> Iterator[None]:
        """Reply to all messages of a topic with their bodies, after ``re: ``."""
        self._ask("serve", nameserver, group, topic)
        try:
            yield
        finally:
            self._ask("hush", group)

    def compacted(self, *words: str) -> list[str]:
        """The lines that a step on a compacted topic returns; see Compacted.java."""
        return self._ask("compacted", *words).splitlines()

    def _ask(self, *words: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = Timer(TIMEOUT_S, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        assert line, f"{words}: the JVM ended\n{self._errors.read_text()[-4000:]}"
        answer: dict[str, str] = json.loads(line)
        assert "failure" not in answer, f"{words}: {answer['failure'][-4000:]}"
        return answer["printed"]

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT_S)


@contextlib.contextmanager
def console(home: Path, options: Sequence[str] = ()) -> Iterator[Console]:
    """A console for the length of a block."""
    running = Console(home, options)
    try:
        yield running
    finally:
        running.close()
