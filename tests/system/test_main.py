"""Each daemon starts where the clients' package is not installed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_broker import main as broker_main
from headrace_daemon.network import TcpNetwork
from headrace_nameserver import main as nameserver_main
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.support.processes import TIMEOUT_S, run
from tests.support.wire import ask, send_header

# As if nobody had installed it: an import raises ModuleNotFoundError.
_WITHOUT_CLIENTS = """
import runpy, sys
sys.modules["headrace"] = None
module = sys.argv[1]
sys.argv = sys.argv[1:]
runpy.run_module(module, run_name="__main__")
"""


@contextmanager
def daemon(module: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A daemon in a process of its own, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WITHOUT_CLIENTS, module, *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, address_of(process)
    finally:
        process.kill()
        process.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("{") and (entry := json.loads(line))["event"] == "serving":
            return str(entry["address"])
    raise AssertionError(lines)


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    return process.returncode


@pytest.mark.slow
async def test_both_daemons_run_without_the_clients(tmp_path: Path) -> None:
    network, settings = TcpNetwork(), tmp_path / "broker.conf"
    with daemon("headrace_nameserver.main", "--port", "0") as (nameserver, nameserver_address):
        settings.write_text(
            f"brokerName=b\nlistenPort=0\nbindAddress=127.0.0.1\nnamesrvAddr={nameserver_address}\n"
            f"storePathRootDir={tmp_path}/store\nmappedFileSizeCommitLog=1048576\n"
        )
        with daemon("headrace_broker.main", "-c", str(settings)) as (broker, address):
            sent = await ask(network, address, RequestCode.SEND_MESSAGE_V2, send_header(), b"body")
            assert sent.command.code == ResponseCode.SUCCESS, sent.command.remark
            known = await ask(network, nameserver_address, RequestCode.GET_BROKER_CLUSTER_INFO)
            assert address.encode() in bytes(known.body)
            assert stop(broker) == 0
        assert stop(nameserver) == 0
    assert not (tmp_path / "store" / "abort").exists()


def test_settings_are_checked_without_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.conf", tmp_path / "bad.conf"
    good.write_text(f"brokerName=b\nstorePathRootDir={tmp_path}/store\nenableMultiDispatch=false\n")
    bad.write_text("listenPort=9876\nlisten=1\n")
    assert broker_main.main(["-c", str(good), "--check-config"]) == 0
    said = capsys.readouterr().err
    assert "no client will find this broker" in said
    assert f"{good} is valid: broker " in said
    assert nameserver_main.main(["--check-config", "--log-level", "INFO"]) == 0
    assert "Traceback" not in capsys.readouterr().err
    for main in (broker_main.main, nameserver_main.main):
        assert main(["-c", str(bad), "--check-config"]) == 2
        assert f"headrace: {bad}:2" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "arguments", [["--port", "70000"], ["--port", "many"], ["--log-level", "foo"], ["--confg", "x"]]
)
def test_options_are_checked_before_a_start(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        nameserver_main.main(arguments)
    assert end.value.code == 2


@pytest.mark.parametrize("port", ["70000", "many", "-1", "²"])
def test_a_wrong_port_is_named(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nameserver_main.main([f"--port={port}"])
    error = capsys.readouterr().err
    assert f"argument --port: {port!r} is not a port: expected a number up to 65535" in error


def test_an_address_in_use_is_reported_in_a_line(tmp_path: Path) -> None:
    taken = TcpNetwork().listen("127.0.0.1", 0)
    settings = tmp_path / "namesrv.conf"
    settings.write_text(f"bindAddress=127.0.0.1\nlistenPort={taken.port}\n")
    try:
        done = run("nameserver", "-c", str(settings))
    finally:
        taken.close()
    assert done.returncode == 1
    (line,) = (each for each in done.stderr.splitlines() if not each.startswith("{"))
    assert line.startswith("headrace: ")
    assert str(taken.port) in line


def _said(kind: str, config: Path, capsys: pytest.CaptureFixture[str]) -> str:
    main = broker_main.main if kind == "broker" else nameserver_main.main
    assert main(["-c", str(config), "--check-config"])
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", ["broker", "nameserver"])
@pytest.mark.parametrize(("name", "reason"), [("gone", "No such file"), (".", "Is a directory")])
def test_settings_that_cannot_be_read_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str, reason: str
) -> None:
    path, config = tmp_path / name, tmp_path / "daemon.conf"
    own = f"storePathRootDir={tmp_path / 'store'}\n" if kind == "broker" else ""
    config.write_text(f"{own}tlsConfigFile={path}")
    for said in (_said(kind, path, capsys), _said(kind, config, capsys)):
        assert reason in said
        assert said.startswith(f"headrace: {path}: can")
        assert "Errno" not in said


@pytest.mark.parametrize("name", ["kv.json", "departedBrokers.json", "quotas.json", "users.json"])
def test_files_of_a_nameserver_that_cannot_be_read_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = tmp_path / "namesrv.conf"
    config.write_text(f"kvConfigPath={tmp_path}/kv.json\nauthenticationEnabled=true")
    (tmp_path / name).mkdir()
    said = _said("nameserver", config, capsys)
    assert said.startswith(f"headrace: {tmp_path / name}: cannot read ")
    assert "Is a directory" in said
    assert said.count(str(tmp_path)) == 1
    assert "Errno" not in said
