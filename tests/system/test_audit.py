"""The audit log of a real daemon: kills, a full disk, a disk that takes nothing."""

from __future__ import annotations

import json
import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.drivers.response import Response
from headrace_protocol.nameserver_headers import GetRouteInfoHeader, PutKVConfigHeader
from headrace_protocol.rights.credentials import Credentials
from tests.support.audit import checked, files_of, lines_of, names_of
from tests.support.cluster import Daemon
from tests.support.own_disk import Filler, OwnDisk, may_mount
from tests.support.ports import free_port
from tests.support.processes import run
from tests.support.until import wait_until

pytestmark = pytest.mark.slow

needs_disk = pytest.mark.skipif(not may_mount(), reason="may not mount")


def nameserver(folder: Path, path: Path, disk: OwnDisk | None = None, **settings: object) -> Daemon:
    """One whose audit log is at a path; not started."""
    port = free_port()
    config = folder / "nameserver.conf"
    lines = {"listenPort": port, "auditLogPath": path, **settings}
    config.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    before = disk.command if disk is not None else ()
    return Daemon(folder, "nameserver", "nameserver", "-c", str(config), port=port, before=before)


@contextmanager
def running(daemon: Daemon) -> Iterator[BlockingConnection]:
    """A connection to a daemon that is killed at the end."""
    daemon.start()
    try:
        daemon.wait_up()
        with BlockingConnection.connect(daemon.address) as connection:
            yield connection
    finally:
        daemon.kill()


def put(connection: BlockingConnection, key: str) -> Response:
    header = PutKVConfigHeader(namespace="n", key=key, value="v")
    return connection.request(RequestCode.PUT_KV_CONFIG, header, timeout_ms=10_000)


def test_kills_leave_a_log_that_is_whole(tmp_path: Path) -> None:
    """Though some come in the middle of a write or a rotation."""
    path, moment = tmp_path / "audit.log", random.Random(7)
    daemon = nameserver(tmp_path, path, auditLogBytesMax=64 * 1024)
    for number in range(5):
        with running(daemon) as connection:
            killing = threading.Timer(moment.uniform(0.2, 0.8), daemon.kill)
            killing.start()
            with suppress(HeadraceError):
                while True:
                    put(connection, f"key-{number}")
            killing.join()
    daemon.start()
    daemon.wait_up()
    daemon.stop()
    assert checked(path).problem is None
    assert names_of(path).count("daemon.started") == 6
    assert names_of(path)[-1] == "daemon.stopped"
    assert len(files_of(path)) > 1
    verified = run("audit", "verify", *map(str, files_of(path)))
    assert verified.returncode == 0, verified.stderr


@needs_disk
@pytest.mark.parametrize("on_failure", ["refuse", "drop"])
def test_a_full_disk(tmp_path: Path, on_failure: str) -> None:
    folder = tmp_path / "log"
    with OwnDisk(folder, 1 << 20) as disk:
        daemon = nameserver(tmp_path, folder / "audit.log", disk, auditOnFailure=on_failure)
        path, filler = (
            disk.inside(folder) / "audit.log",
            Filler(disk.inside(folder / "others"), takes_inodes=False),
        )
        with running(daemon) as connection:
            assert put(connection, "first").command.code == ResponseCode.SUCCESS
            wait_until(lambda: "request" in names_of(path))
            filler.fill()
            said = f"audit log {folder}/audit.log is unavailable, retrying: No space left on device"
            while said not in daemon.said():  # what fits into the last page
                put(connection, "key")
            answer = put(connection, "while it is full")
            if on_failure == "refuse":
                assert answer.command.code == ResponseCode.SERVICE_NOT_AVAILABLE
                assert f"auditLogPath={folder}/audit.log: No space left on device" in (
                    answer.command.remark or ""
                )
            else:
                assert answer.command.code == ResponseCode.SUCCESS
            filler.free()
            wait_until(lambda: put(connection, "last").command.code == ResponseCode.SUCCESS)
            wait_until(lambda: lines_of(path)[-1]["detail"].get("key") == "last")
        assert checked(path).problem is None
        keys = {line["detail"].get("key") for line in lines_of(path)}
        # What waits in memory meanwhile is recorded afterwards.
        assert ("while it is full" in keys) == (on_failure == "drop")
        assert "is available again after" in daemon.said()


@needs_disk
@pytest.mark.parametrize(
    ("exists", "said"),
    [
        (True, "audit.log': this user may not read and write this file\n"),
        (False, "audit.log': this user may not write to "),
    ],
)
def test_a_disk_that_takes_nothing_lets_no_daemon_start(
    tmp_path: Path, exists: bool, said: str
) -> None:
    folder = tmp_path / "log"
    with OwnDisk(folder, 1 << 20) as disk:
        if exists:
            (disk.inside(folder) / "audit.log").touch(0o600)
        remount = [*disk.command, "mount", "-o", "remount,ro", str(folder)]
        subprocess.run(remount, check=True)
        daemon = nameserver(tmp_path, folder / "audit.log", disk)
        daemon.start()
        wait_until(lambda: daemon.exit_code is not None)
        assert daemon.exit_code == 2
        assert said in daemon.said()


def test_users_and_strangers_are_recorded_without_their_secrets(tmp_path: Path) -> None:
    path, secret, wrong = tmp_path / "audit.log", "s3cret-of-root", "wr0ng-secret"
    daemon = nameserver(
        tmp_path,
        path,
        authenticationEnabled="true",
        authorizationEnabled="true",
        authUsersPath=tmp_path / "users.json",
        initAuthenticationUser=json.dumps({"username": "root", "password": secret}),
    )
    with running(daemon) as nobody:
        assert put(nobody, "a").command.code == ResponseCode.NO_PERMISSION
        route = GetRouteInfoHeader(topic="t")
        for _ in range(3):
            nobody.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, route, timeout_ms=10_000)
        with pytest.raises(HeadraceError):
            BlockingConnection.connect(daemon.address, proof=Credentials("root", wrong))
        root = BlockingConnection.connect(daemon.address, proof=Credentials("root", secret))
        with root:
            assert put(root, "b").command.code == ResponseCode.SUCCESS
        wait_until(lambda: {"login", "login.failed", "denied"} <= set(names_of(path)))
    found = {(line["event"], line["user"], line["outcome"]) for line in lines_of(path)}
    assert found == {
        ("daemon.started", None, None),
        ("request", None, "NO_PERMISSION"),
        ("denied", None, "NO_PERMISSION"),
        ("login.failed", "root", None),
        ("login", "root", None),
        ("request", "root", "SUCCESS"),
    }
    assert sum(line["detail"]["count"] for line in lines_of(path) if line["event"] == "denied") == 3
    text = path.read_text()
    assert secret not in text
    assert wrong not in text


def test_two_daemons_do_not_run_with_one_log(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    (tmp_path / "other").mkdir()
    with running(nameserver(tmp_path, path)):
        other = nameserver(tmp_path / "other", path)
        other.start()
        wait_until(lambda: other.exit_code is not None)
        assert other.exit_code == 1
        assert other.said().endswith(
            f"headrace: {path}: another daemon writes this audit log: give each an auditLogPath of "
            "its own\n"
        )
