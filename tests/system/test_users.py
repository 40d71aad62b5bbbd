"""Daemons with users as processes: the first start, a kill after an answer, secrets in no text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.rights.auth_requests import ListUserHeader, UserHeader, UserInfo
from headrace_protocol.rights.credentials import Credentials
from tests.support import own_disk
from tests.support.certificates import Authority
from tests.support.cluster import Daemon
from tests.support.ports import free_port
from tests.support.processes import run

KINDS = ["nameserver", "broker"]
ROOT = Credentials("root", "hidden-root-password")
SAFE = ("authenticationEnabled=true", "authorizationEnabled=true")
TIMEOUT_MS = 10_000


class Guarded:
    """A daemon that other machines reach, started by the three lines that its error names."""

    def __init__(self, folder: Path, kind: str, before: Sequence[str] = ()) -> None:
        """before: as of ``Daemon``."""
        self.folder, self.kind = folder, kind
        secret = folder / "super.json"
        secret.write_text('{"username":"root","password":"hidden-root-password"}\n')
        secret.chmod(0o600)
        self.port = free_port()
        self.config = folder / f"{kind}.conf"
        self.write(*SAFE, f"initAuthenticationUserFile={secret}")
        self.daemon = Daemon(
            folder, kind, kind, "-c", str(self.config), port=self.port, before=before
        )

    def write(self, *lines: str) -> None:
        """Its settings."""
        own = {
            "nameserver": (f"kvConfigPath={self.folder / 'disk' / 'kvConfig.json'}",),
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
        return (
            self.folder / {"nameserver": "disk", "broker": "store/config"}[self.kind] / "users.json"
        )

    def start(self) -> None:
        self.daemon.start()
        self.daemon.wait_up()

    def refused(self, option: str) -> str:
        """The error of a start that fails."""
        done = run(self.kind, "-c", str(self.config), option)
        assert done.returncode == 1
        return done.stderr

    def connect(self, credentials: Credentials | None = ROOT) -> BlockingConnection:
        return BlockingConnection.connect(f"127.0.0.1:{self.port}", proof=credentials)

    def make(self, connection: BlockingConnection, name: str) -> tuple[int, str | None]:
        """Make a user; returns code and remark of the answer."""
        body = UserInfo(username=name, password=f"hidden-{name}").encode()
        answer = connection.request(
            Code.AUTH_CREATE_USER, UserHeader(username=name), body, timeout_ms=TIMEOUT_MS
        )
        return answer.command.code, answer.command.remark


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
            assert guarded.make(connection, name) == (0, None)
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
@pytest.mark.skipif(not own_disk.may_mount(), reason="no disk of its own for a user")
def test_a_full_disk_refuses_changes_until_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with own_disk.OwnDisk(folder, 4 << 20) as disk:
        guarded = Guarded(tmp_path, "nameserver", disk.command)
        guarded.start()
        filler = own_disk.Filler(disk.inside(folder / "filler"), takes_inodes=False)
        with guarded.connect() as connection:
            assert guarded.make(connection, "alice") == (0, None)
            filler.fill()
            code, remark = guarded.make(connection, "bob")
            assert code == 14
            assert remark is not None
            assert remark.endswith("users.json can't be written: No space left on device")
            with pytest.raises(HeadraceError):
                guarded.connect(Credentials("bob", "hidden-bob"))
            guarded.connect(Credentials("alice", "hidden-alice")).close()
            filler.free()
            assert guarded.make(connection, "bob") == (0, None)
        guarded.daemon.kill()
        guarded.start()
        for name in ("alice", "bob"):
            guarded.connect(Credentials(name, f"hidden-{name}")).close()
        guarded.daemon.stop()


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


@pytest.mark.slow
def test_a_certificate_of_a_client_logs_it_in(guarded: Guarded) -> None:
    authority = Authority.new(guarded.folder / "ca")
    server = authority.server()
    tls = guarded.folder / "tls.properties"
    tls.write_text(
        f"tls.server.certPath={server.cert_file}\ntls.server.keyPath={server.key_file}\n"
        f"tls.server.trustCertPath={authority.ca_file}\ntls.server.need.client.auth=require\n"
    )
    secret = guarded.folder / "super.json"
    guarded.write(*SAFE, f"initAuthenticationUserFile={secret}", f"tlsConfigFile={tls}")
    guarded.start()
    for name, code in (("root", 0), ("nobody", 16)):
        address, settings = f"127.0.0.1:{guarded.port}", authority.client(name=name)
        with BlockingConnection.connect(address, settings) as connection:
            answer = connection.request(
                Code.AUTH_LIST_USER, ListUserHeader(), timeout_ms=TIMEOUT_MS
            )
            assert answer.command.code == code
    guarded.daemon.stop()
