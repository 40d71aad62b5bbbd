"""The files of ``deploy/`` work."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import TIMEOUT_S, run, without_stalls

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}


needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="no systemd on this machine"
)


def free_ports(count: int) -> list[int]:
    """Ports that nobody had a moment ago, the first and each ten after it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            first = int(probe.getsockname()[1])
        ports = [first + 10 * index for index in range(count)]
        try:
            for port in ports:
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return ports


def used_bytes(folder: Path) -> int:
    """The bytes that a folder's files take on their disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


@pytest.mark.slow
def test_the_local_cluster_comes_up_and_goes_down(tmp_path: Path) -> None:
    nameserver_port, broker_port, _ = free_ports(3)
    cluster = subprocess.Popen(
        [DEPLOY / "local-cluster", "2", tmp_path],
        env={
            **ENVIRONMENT,
            "NAMESERVER_PORT": str(nameserver_port),
            "BROKER_PORT": str(broker_port),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert cluster.stdout is not None
        nameserver = f"127.0.0.1:{nameserver_port}"
        line = cluster.stdout.readline()
        assert line == f"ready nameserver={nameserver} brokers=2 data={tmp_path}\n"
        assert run("doctor", nameserver=nameserver).returncode == 0
        assert run("topic", "create", "t", "--queues", "2", nameserver=nameserver).returncode == 0
        assert run("send", "t", stdin="1\n2\n3\n4\n", nameserver=nameserver).returncode == 0
        printed = run("consume", "t", nameserver=nameserver).stdout
        assert sorted(printed.split()) == ["1", "2", "3", "4"]
        # Two brokers with next to no messages.
        assert used_bytes(tmp_path) < 300 << 20
        assert listens_on(nameserver_port) == {"0100007F"}
        kill_broker(tmp_path / "broker-1.conf")
        assert cluster.stderr is not None
        assert cluster.stderr.readline() == (
            "local-cluster: ended with 137; to start it again: headrace broker -c "
            f"{tmp_path}/broker-1.conf\n"
        )
        part = run("consume", "t", nameserver=nameserver)
        assert (part.returncode, "broker-1" in part.stderr) == (3, True), part.stderr
        assert run("consume", "t", "--allow-partial", nameserver=nameserver).returncode == 0
    finally:
        cluster.send_signal(signal.SIGTERM)
        _, err = cluster.communicate(timeout=TIMEOUT_S)
    assert (cluster.returncode, without_stalls(err)) == (0, "")
    # A clean stop takes the mark away.
    assert not (tmp_path / "broker-0" / "abort").exists()
    assert (tmp_path / "broker-1" / "abort").exists()


def listens_on(port: int) -> set[str]:
    """The addresses, as the kernel writes them, on which somebody listens on a port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    places = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


def kill_broker(config: Path) -> None:
    """Kill the process that runs with a configuration file."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(config) in process.read_bytes().split(b"\0"):
                os.kill(int(process.parent.name), signal.SIGKILL)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_start_commands_that_there_are(unit: Path) -> None:
    commands = [
        line.partition("=")[2].split()
        for line in unit.read_text().splitlines()
        if line.startswith(("ExecStart=", "ExecStartPre="))
    ]
    assert len(commands) == 2
    for program, daemon, *options in commands:
        assert Path(program).name == "headrace"
        help_text = run(daemon, "--help").stdout
        assert all(option in help_text for option in options if option.startswith("--"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_confine_their_daemon(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    confined = {
        "UMask=0077",
        "CapabilityBoundingSet=",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
        "SystemCallFilter=@system-service",
        "NoNewPrivileges=true",
        "ProtectSystem=strict",
        "ProtectKernelTunables=true",
        "PrivateDevices=true",
    }
    assert confined <= set(lines)
    assert any(line.startswith("MemoryMax=") for line in lines)


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_finds_little_exposed(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd is older than 250")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@needs_systemd
def test_systemd_reads_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        # The program and the user are made by the installation.
        text = unit.read_text().replace("/opt/headrace/bin/headrace", "/bin/true")
        (tmp_path / unit.name).write_text(text.replace("User=headrace\n", ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", *tmp_path.glob("*.service")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert not [line for line in done.stderr.splitlines() if "headrace" in line], done.stderr
