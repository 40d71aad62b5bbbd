"""Daemons with users as processes: the first start, a kill after an answer, secrets in no text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.rights.auth_requests import ListUserHeader, UserHeader, UserInfo
from headrace_protocol.rights.credentials import Credentials
from tests.support.cluster import Daemon
from tests.support.ports import free_port
from tests.support.processes import run

KINDS = ["nameserver"]
ROOT = Credentials("root", "hidden-root-password")
SAFE = ("authenticationEnabled=true", "authorizationEnabled=true")
TIMEOUT_MS = 10_000


class Guarded:
    """A daemon that other machines reach, started by the three lines that its error names."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        secret = folder / "super.json"
        secret.write_text('{"username":"root","password":"hidden-root-password"}\n')
        secret.chmod(0o600)
        self.port = free_port()
        self.config = folder / f"{kind}.conf"
        self.write(*SAFE, f"initAuthenticationUserFile={secret}")
        self.daemon = Daemon(folder, kind, kind, "-c", str(self.config), port=self.port)

    def write(self, *lines: str) -> None:
        own = {
            "nameserver": (f"kvConfigPath={self.folder / 'kvConfig.json'}",),
            "broker": (
                f"storePathRootDir={self.folder / 'store'}",
                "fastListenPort=0",
                "brokerName=b0",
            ),
        }[self.kind]
        text = f"bindAddress=0.0.0.0\nlistenPort={self.port}\n" + "\n".join((*own, *lines))
        self.config.write_text(text)

    @property
    def users_path(self) -> Path:
        return self.folder / {"nameserver": "", "broker": "store/config"}[self.kind] / "users.json"

    def start(self) -> None:
        self.daemon.start()
        self.daemon.wait_up()

    def refused(self, option: str) -> str:
        """The error of a start that fails."""
        done = run(self.kind, "-c", str(self.config), option)
        assert done.returncode == 1
        return done.stderr

    def connect(self, credentials: Credentials | None = ROOT) -> BlockingConnection:
        return BlockingConnection.connect(f"127.0.0.1:{self.port}", credentials=credentials)

    def make(self, connection: BlockingConnection, name: str) -> None:
        body = UserInfo(username=name, password=f"hidden-{name}").encode()
        answer = connection.request(
            Code.AUTH_CREATE_USER, UserHeader(username=name), body, timeout_ms=TIMEOUT_MS
        )
        assert (answer.command.code, answer.command.remark) == (0, None)


@pytest.fixture(params=KINDS)
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guarded]:
    daemon = Guarded(tmp_path, request.param)
    yield daemon
    daemon.daemon.kill()


@pytest.mark.slow
def test_a_user_outlives_a_kill_right_after_its_answer(guarded: Guarded) -> None:
    made = []
    for name in ("alice", "bob"):
        guarded.start()
        with guarded.connect() as connection:
            guarded.make(connection, name)
            guarded.daemon.kill()
        made.append(name)
    guarded.start()
    for name in made:
        with guarded.connect(Credentials(name, f"hidden-{name}")) as connection:
            answer = connection.request(
                Code.AUTH_LIST_USER, ListUserHeader(), timeout_ms=TIMEOUT_MS
            )
            assert answer.command.code == 16  # known, and without a rule
    with pytest.raises(HeadraceError):
        guarded.connect(Credentials("alice", "wrong"))
    with guarded.connect(None) as nobody:
        answer = nobody.request(Code.AUTH_LIST_USER, ListUserHeader(), timeout_ms=TIMEOUT_MS)
        assert answer.command.code == 16
    guarded.daemon.stop()
    assert "hidden" not in guarded.daemon.said()
    assert guarded.users_path.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--check-config", "--log-level=error"])
def test_a_first_start_says_how_to_make_the_super_user(guarded: Guarded, option: str) -> None:
    guarded.write(*SAFE)
    outcome = guarded.refused(option)
    assert f"{guarded.users_path} has no enabled Super user" in outcome
    assert "initAuthenticationUserFile" in outcome
    assert not guarded.users_path.exists()


@pytest.mark.slow
def test_a_damaged_file_of_users_stops_the_start(guarded: Guarded) -> None:
    guarded.start()
    guarded.daemon.stop()
    path = guarded.users_path
    path.write_text(path.read_text().replace("Super", "Normal"))
    for option in ("--check-config", "--log-level=error"):
        assert f"{path}: was changed by hand, or damaged" in guarded.refused(option)
