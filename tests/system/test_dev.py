"""``headrace dev`` as its users meet it: a process, talked to by other processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import HEADRACE, TIMEOUT_S, Dev, dev, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(sign: signal.Signals) -> None:
    with dev() as broker:
        assert broker.data.is_dir()
        broker.process.send_signal(sign)
        # Standard output held the one line only, and there was nothing to warn of.
        assert broker.end() == (0, "", "")
        assert not broker.data.exists()


def test_messages_outlive_a_restart_on_the_same_folder(tmp_path: Path) -> None:
    lines = "".join(f"message {number}\n" for number in range(1000))
    with dev("--data", str(tmp_path)) as broker:
        broker.run("topic", "create", "t", "--queues", "1")
        broker.run("send", "t", stdin=lines)
        assert broker.run("consume", "t", "--group", "g", "--max", "600") == "".join(
            f"message {number}\n" for number in range(600)
        )
        broker.process.terminate()
        assert broker.end()[0] == 0
    assert not (tmp_path / "abort").exists()
    with dev("--data", str(tmp_path)) as broker:
        assert broker.run("consume", "t") == lines
        assert broker.run("consume", "t", "--group", "g").startswith("message 600\n")
        assert broker.run("send", "t", "more", "--key", "k")
        assert broker.run("message", "query", "t", "k").endswith("\tmore\n")


def test_a_message_takes_little_of_the_disk(tmp_path: Path) -> None:
    with dev("--data", str(tmp_path)) as broker:
        broker.run("send", "t", "one")
        running = disk_bytes(tmp_path)
        broker.process.terminate()
        assert broker.end()[0] == 0
    assert (tmp_path / "commitlog" / f"{0:020}").stat().st_size == 64 << 20
    assert running < 72 << 20
    # The reserve stays, so that the next start can save its tables on a full disk.
    reserve_bytes = disk_bytes(tmp_path / "headrace.reserve")
    assert disk_bytes(tmp_path) - reserve_bytes < 1 << 20
    assert reserve_bytes < 5 << 20


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


def test_a_store_keeps_the_size_of_its_log_files(tmp_path: Path) -> None:
    for option in (["--log-file-mib", "16"], [], ["--log-file-mib", "32"]):
        with dev("--data", str(tmp_path), *option) as broker:
            broker.run("send", "t", "one")
            broker.process.terminate()
            assert broker.end()[0] == 0
        assert (tmp_path / "commitlog" / f"{0:020}").stat().st_size == 16 << 20


def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    lines = "".join(f"message {number}\n" for number in range(1000))
    with dev("--data", str(tmp_path)) as broker:
        broker.run("topic", "create", "t", "--queues", "1")
        broker.run("send", "t", stdin=lines)
        broker.process.kill()
        assert broker.end()[0] == -signal.SIGKILL
    assert (tmp_path / "abort").exists()
    with dev("--data", str(tmp_path)) as broker:
        assert broker.run("consume", "t") == lines


def test_two_on_one_folder_is_refused_and_says_who_has_it(tmp_path: Path) -> None:
    with dev("--data", str(tmp_path)) as first:
        ports = ("--nameserver-port", "0", "--broker-port", "0")
        second = run("dev", *ports, "--data", str(tmp_path))
        assert (second.returncode, second.stdout) == (1, "")
        assert second.stderr == (
            f"headrace: store {tmp_path} is in use by another broker (process "
            f"{first.process.pid}): stop it, or give this broker its own directory\n"
        )
        assert first.run("topic", "list") == ""


@pytest.fixture(scope="module")
def broker() -> Iterator[Dev]:
    """The daemon of the tests that don't need one of their own."""
    with dev() as running:
        yield running


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic of this test alone."""
    return re.sub(r"\W", "_", request.node.name)


@pytest.mark.parametrize("daemon", ["nameserver", "broker"])
def test_a_port_in_use_is_named(daemon: str, broker: Dev) -> None:
    taken = broker.nameserver if daemon == "nameserver" else broker.broker
    ports = {"nameserver": "0", "broker": "0", daemon: taken.rpartition(":")[2]}
    second = run("dev", "--nameserver-port", ports["nameserver"], "--broker-port", ports["broker"])
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert f"can't listen on {taken}: Address already in use" in second.stderr


def test_follow_prints_what_comes_until_it_is_interrupted(broker: Dev, topic: str) -> None:
    broker.run("topic", "create", topic)
    reader = subprocess.Popen(
        [HEADRACE, "consume", topic, "--follow", "--nameserver", broker.nameserver],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout is not None
    for text in ("one", "two"):
        broker.run("send", topic, text)
        assert reader.stdout.readline() == f"{text}\n"
    reader.send_signal(signal.SIGINT)
    assert reader.communicate(timeout=TIMEOUT_S) == ("", "")
    assert reader.returncode == 130


def test_an_interrupted_member_has_committed_what_it_printed(broker: Dev, topic: str) -> None:
    broker.run("send", topic, stdin="one\n")
    member = [HEADRACE, "consume", topic, "--follow", "--group", "g", "-n", broker.nameserver]
    reader = subprocess.Popen(member, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "one\n"
    reader.send_signal(signal.SIGINT)
    assert reader.communicate(timeout=TIMEOUT_S) == ("", "")
    assert reader.returncode == 130
    assert sum(row["lag"] for row in broker.json("group", "lag", "g")) == 0


def sender(*arguments: str) -> subprocess.Popen[str]:
    """A ``headrace send`` whose standard input stays open."""
    return subprocess.Popen(
        [HEADRACE, "send", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def say(sender: subprocess.Popen[str], text: str) -> None:
    assert sender.stdin is not None
    sender.stdin.write(text)
    sender.stdin.flush()


def test_lines_typed_one_by_one_are_sent_at_once(broker: Dev, topic: str) -> None:
    broker.run("topic", "create", topic, "--queues", "1")
    with sender(topic, "-n", broker.nameserver) as typing:
        say(typing, "typed\n")
        assert broker.run("consume", topic, "--follow", "--max", "1") == "typed\n"
        typing.communicate(timeout=TIMEOUT_S)
        assert typing.returncode == 0


def test_standard_input_that_does_not_block_is_waited_for(broker: Dev, topic: str) -> None:
    ours, its = os.pipe()
    os.set_blocking(ours, False)
    command = [HEADRACE, "send", topic, "-n", broker.nameserver]
    with subprocess.Popen(command, stdin=ours, stdout=subprocess.PIPE) as reading:
        os.close(ours)
        broker.run("topic", "list")  # long enough for it to come to its first read
        os.write(its, b"late\n")
        os.close(its)
        reading.communicate(timeout=TIMEOUT_S)
        assert reading.returncode == 0
    assert broker.run("consume", topic) == "late\n"


def test_an_interrupt_ends_send_that_waits_for_standard_input(broker: Dev, topic: str) -> None:
    with sender(topic, "-n", broker.nameserver) as waiting:
        broker.run("topic", "create", topic, "--queues", "1")
        say(waiting, "typed\n")
        assert broker.run("consume", topic, "--follow", "--max", "1") == "typed\n"
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(timeout=TIMEOUT_S) == 130
        assert waiting.stderr is not None
        assert waiting.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        # Only when the time to deliver is over: half a minute.
        pytest.param(
            *(("t", "-n", "127.0.0.1:1"), 3, "cannot connect to 127.0.0.1:1"),
            marks=pytest.mark.long,
        ),
        (("a b", "-n", "127.0.0.1:1"), 2, "'a b' is not a valid topic name"),
    ],
)
def test_an_error_ends_send_that_waits_for_standard_input(
    arguments: tuple[str, ...], exit_code: int, words: str
) -> None:
    with sender(*arguments) as waiting:
        say(waiting, "typed\n")
        assert waiting.wait(timeout=TIMEOUT_S) == exit_code
        assert waiting.stderr is not None
        *retries, last = waiting.stderr.read().splitlines()
        assert words in last
        # The outage began once, and was repeated after half a minute at most.
        assert [" unavailable" in line for line in retries] == [True] * len(retries)
        assert len(retries) <= 2


@pytest.mark.parametrize("group", ["", "--group g"])
def test_a_reader_that_goes_away_ends_consume_quietly(group: str, broker: Dev, topic: str) -> None:
    broker.run("send", topic, stdin="x" * 1000 + "\n" + ("y" * 1000 + "\n") * 2000)
    line = f"({HEADRACE} consume {topic} {group} -n {broker.nameserver}; echo $? >&2) | head -n 1"
    done = subprocess.run(line, check=False, shell=True, capture_output=True, text=True)
    assert (done.stdout.count("\n"), done.stderr) == (1, "1\n")


@pytest.mark.parametrize(
    ("command", "exit_code", "said"),
    [
        ("--version >&-", 2, "headrace: stdout is closed, but this command needs it\n"),
        ("send t <&-", 2, "headrace: stdin is closed, but this command needs it\n"),
        ("topic list -n 127.0.0.1:1 2>&-", 3, ""),
        ("nameserver --check-config <&- >&- 2>&-", 0, ""),
    ],
)
def test_a_standard_stream_that_is_closed_matters_only_where_it_is_used(
    command: str, exit_code: int, said: str
) -> None:
    line = f"{HEADRACE} {command}"
    done = subprocess.run(line, check=False, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "", said)


def test_a_secure_one_keeps_its_authority_and_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    data = tmp_path / "data"
    kept = []
    for _ in range(2):
        with dev("--secure", "--data", str(data)) as broker:
            files = sorted((data / "config" / "security").glob("*.p[ea][ms]*"))
            assert [file.name for file in files if "server" not in file.name] == [
                "ca.pem",
                "headrace-daemons.password",
                "root.password",
            ]
            kept.append([file.read_text() for file in files if "server" not in file.name])
            others = [file for file in data.rglob("*") if file.stat().st_mode & 0o077]
            assert {file.suffix for file in others if file.is_file()} <= {".pem"}
            broker.process.terminate()
            assert broker.end() == (0, "", "")
    assert kept[0] == kept[1]
    assert not (tmp_path / "headrace.toml").read_text()
