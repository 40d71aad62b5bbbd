"""A standard error that can't be written costs log lines, never a daemon or its time."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import blocking
from headrace_daemon.logs import LogLines, renderer
from tests.support.processes import HEADRACE, TIMEOUT_S


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)


def test_lines_come_whole_and_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = LogLines(writer)
    for number in range(100):
        lines.info(f"line {number} \udcff")
    assert lines.drain(TIMEOUT_S)
    expected = b"".join(b"line %d \\udcff\n" % number for number in range(100))
    assert os.read(reader, 1 << 16) == expected
    assert lines.dropped_count == 0
    os.close(reader)


def test_a_full_disk_costs_lines() -> None:
    with Path("/dev/full").open("wb") as full:
        lines = LogLines(full.fileno())
        lines.error("one")
        lines.error("two")
        assert lines.drain(TIMEOUT_S)
        assert lines.dropped_count == 2


def test_a_pipe_whose_reader_left_costs_lines(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = LogLines(writer)
    os.close(reader)
    lines.warning("one")
    assert lines.drain(TIMEOUT_S)
    assert lines.dropped_count == 1


def test_a_pipe_that_nobody_reads_costs_lines_and_no_time(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = LogLines(writer)
    sent = 40_000
    for _ in range(sent):  # 4 MB: more than the pipe and the buffer hold, or this never ends
        lines.info("x" * 99)
    assert lines.dropped_count > sent // 2
    assert not lines.drain(0)
    kept = sent - lines.dropped_count
    for _ in range(kept):
        got = os.read(reader, 100)
        while len(got) < 100:
            got += os.read(reader, 100 - len(got))
        assert got == b"x" * 99 + b"\n"
    assert lines.drain(TIMEOUT_S)
    os.close(reader)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_strangers_control_characters_reach_no_terminal(is_terminal: bool) -> None:
    event = {"event": "client closed", "level": "warning", "reason": "no code \x1b]0;title\x07\r"}
    line = renderer(is_terminal=is_terminal)(None, "warning", event)
    assert isinstance(line, str)
    assert "]0;title" in line
    assert "\x1b]" not in line
    assert "\x07" not in line
    assert "\r" not in line


@pytest.mark.slow
def test_a_broker_outlives_its_standard_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    path = tmp_path / "broker.conf"
    path.write_text(f"brokerRole=ASYNC_MASTER\nlistenPort={port}\nstorePathRootDir={tmp_path}/s\n")
    with Path("/dev/full").open("wb") as full:
        broker = subprocess.Popen([HEADRACE, "broker", "-c", str(path)], stderr=full)
    try:
        _wait_up(port, broker)
        with blocking.Admin(nameserver="127.0.0.1:1") as admin:
            info = admin.runtime_info(f"127.0.0.1:{port}")
        assert int(info["droppedLogLines"]) > 0
    finally:
        broker.terminate()
    assert broker.wait(TIMEOUT_S) == 0


def _wait_up(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError(f"ended with {process.poll()}")
