"""The events that an audit log records, what it never records, and what happens when it can't."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from headrace_daemon.audit.audit_log import AuditLog
from headrace_daemon.audit.repeats import HOST_LINES_MAX, LINES_MAX
from headrace_daemon.audit.settings import AuditSettings
from headrace_daemon.metrics.daemon_metrics import DaemonMetrics
from headrace_daemon.network import TcpNetwork
from headrace_daemon.serving.server import RemotingServer
from headrace_daemon.watchdog import Watchdog
from headrace_protocol import __version__
from headrace_protocol.admin_headers import DeleteTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.frame import FrameReader
from headrace_protocol.nameserver_headers import GetRouteInfoHeader
from headrace_protocol.serving import Registry, Reply, Request
from headrace_protocol.subject import Subject
from headrace_protocol.tls.settings import TlsFile
from headrace_protocol.waiting import take_break
from tests.support.audit import checked, files_of_at_most, lines_of, names_of
from tests.support.certificates import Authority
from tests.support.channel import MemoryChannel
from tests.support.echo import Echo
from tests.support.metrics import collect, value
from tests.support.nameserver import frame
from tests.support.rights import request_of
from tests.support.running import running
from tests.support.until import until

RULES, USER = RequestCode.AUTH_UPDATE_ACL, RequestCode.AUTH_CREATE_USER
DELETE, ROUTE = RequestCode.DELETE_TOPIC_IN_BROKER, RequestCode.GET_ROUTEINFO_BY_TOPIC

NOON = "2026-11-27T12:00:00.125Z"


class Client(MemoryChannel):
    """A client at an address, who may be a user."""

    def __init__(self, user: str | None = None, ip: str = "10.0.0.1", port: int = 5) -> None:
        super().__init__()
        self.user, self.ip, self.address = user, ip, f"{ip}:{port}"


class Recorded:
    """A daemon's requests with an audit log: DELETE is administration, ROUTE is not."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.log = AuditLog("broker/a", AuditSettings(path, **settings), lambda: 1_795_780_800.125)
        self.server = RemotingServer(Echo())
        self.registry = Registry(lambda _request, error: pytest.fail(repr(error)))
        self.log.watch(self.registry, self.server)
        self.registry.guard(self._guard)
        self.log.restrict(self.registry)
        self.registry.route(DELETE, self._serve)
        self.registry.route(ROUTE, self._serve)
        for code in RULES, USER:
            self.registry.route(code, lambda _request: Reply())
        self.denied: dict[str | None, str] = {}
        self.served: list[str | None] = []

    def _guard(self, request: Request) -> None:
        user = request.channel.user
        request.subject = Subject(user, request.channel.ip)
        if user in self.denied:
            raise RequestError(ResponseCode.NO_PERMISSION, self.denied[user])

    async def _serve(self, request: Request) -> Reply:
        await take_break()
        self.served.append(request.channel.user)
        if request.header(GetRouteInfoHeader).topic == "none":
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, "no topic none")
        return Reply()

    def ask(self, client: Client, code: int = DELETE, topic: str = "t", **options: Any) -> int:
        """The code of the answer; -1 if there is none."""
        header = (
            DeleteTopicHeader(topic=topic) if code == DELETE else GetRouteInfoHeader(topic=topic)
        )
        self.registry.handle(client, FrameReader().feed(frame(code, header, **options)))
        return next((reply.code for reply, _ in client.replies()), -1)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        with structlog.testing.capture_logs():
            async with running(self.log.run):
                yield
        assert checked(self.path).problem is None

    def lines(self) -> list[dict[str, Any]]:
        """The events between start and stop."""
        lines = lines_of(self.path)
        assert [lines[0]["event"], lines[-1]["event"]] == ["daemon.started", "daemon.stopped"]
        return lines[1:-1]


@pytest.fixture
def audit(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "audit.log")


# -- events ----------------------------------------------------------------------------------------


async def test_start_and_stop_are_recorded(audit: Recorded) -> None:
    async with audit.writing():
        pass
    async with audit.writing():
        pass
    started, *_ = lines_of(audit.path)
    assert (started["time"], started["daemon"]) == (NOON, "broker/a")
    assert started["detail"] == {"version": __version__}
    assert names_of(audit.path) == ["daemon.started", "daemon.stopped"] * 2


@pytest.mark.parametrize("oneway", [False, True])
@pytest.mark.parametrize(("topic", "outcome"), [("t", "SUCCESS"), ("none", "TOPIC_NOT_EXIST")])
async def test_administration_is_recorded_with_its_outcome(
    audit: Recorded, topic: str, outcome: str, oneway: bool
) -> None:
    async with audit.writing():
        audit.ask(Client("alice"), topic=topic, oneway=oneway)
    (line,) = audit.lines()
    assert {key: line[key] for key in list(line)[2:10]} == {
        "event": "request",
        "user": "alice",
        "address": "10.0.0.1:5",
        "request": "DELETE_TOPIC_IN_BROKER",
        "code": 215,
        "resources": [f"Topic:{topic}"],
        "outcome": outcome,
        "detail": {"topic": topic} | ({"remark": "no topic none"} if topic == "none" else {}),
    }


async def test_rules_are_shown_and_passwords_are_not(audit: Recorded) -> None:
    rules, user = b'{"policies":[{"decision":"Allow\n"}]}' + b" " * 9999, b'{"password":"s3cret"}'
    async with audit.writing():
        for code, fields, body in (
            (RULES, {"subject": "User:bob", "Signature": "c2lnbmVk"}, rules),
            (USER, {"username": "bob", "Signature": "c2lnbmVk"}, user),
        ):
            audit.registry.admit(request_of(code, fields, body, channel=Client("root")))
    of_rules, of_user = audit.lines()
    shown = rules[:1024].decode().replace("\n", "\\n") + "..."
    assert of_rules["detail"] == {"subject": "User:bob", "body": shown}
    assert of_user["detail"] == {"username": "bob"}
    text = audit.path.read_bytes()
    assert b"s3cret" not in text
    assert b"c2lnbmVk" not in text


async def test_other_requests_are_not_recorded(audit: Recorded) -> None:
    async with audit.writing():
        assert audit.ask(Client("alice"), ROUTE) == ResponseCode.SUCCESS
        assert audit.ask(Client("alice"), ROUTE, "none") == ResponseCode.TOPIC_NOT_EXIST
    assert audit.lines() == []


async def test_nobody_is_null(audit: Recorded) -> None:
    async with audit.writing():
        audit.ask(Client())
    assert audit.lines()[0]["user"] is None


async def test_a_denied_change_is_one_line(audit: Recorded) -> None:
    audit.denied["bob"] = "User:bob has no permission to access Topic:t"
    async with audit.writing():
        assert audit.ask(Client("bob")) == ResponseCode.NO_PERMISSION
    (line,) = audit.lines()
    assert (line["event"], line["outcome"]) == ("request", "NO_PERMISSION")
    assert line["detail"] == {"topic": "t", "remark": audit.denied["bob"]}


async def test_denials_of_a_second_are_counted(audit: Recorded, autojump_clock: object) -> None:
    """One line for each user and resource, whatever the addresses."""
    audit.denied = {"bob": "not t", "eve": "not t", None: "nobody"}
    async with audit.writing():
        for port in range(100):
            audit.ask(Client("bob", port=port), ROUTE)
        audit.ask(Client("eve"), ROUTE)
        audit.ask(Client(None, "10.0.0.8"), ROUTE)
        audit.ask(Client(None, "10.0.0.9"), ROUTE)
        audit.denied["bob"] = "not u"
        audit.ask(Client("bob"), ROUTE, "u")
        await trio.sleep(1.5)
        audit.ask(Client("bob"), ROUTE, "u")
    lines = audit.lines()
    assert {line["event"] for line in lines} == {"denied"}
    assert [(line["user"], line["resources"], line["detail"]["count"]) for line in lines] == [
        ("bob", ["Topic:t"], 100),
        ("eve", ["Topic:t"], 1),
        (None, ["Topic:t"], 1),
        (None, ["Topic:t"], 1),
        ("bob", ["Topic:u"], 1),
        ("bob", ["Topic:u"], 1),
    ]


async def test_a_denial_that_a_guard_returns_is_recorded(audit: Recorded) -> None:
    audit.registry.guard(lambda _request: Reply(code=ResponseCode.NO_PERMISSION, remark="no"))
    async with audit.writing():
        audit.ask(Client("alice"), ROUTE)
    detail = {"topic": "t", "remark": "no", "first": NOON, "count": 1}
    assert audit.lines()[0]["detail"] == detail


async def test_a_denial_names_the_user_that_was_not_proved(audit: Recorded) -> None:
    audit.denied[None] = "check signature failed."
    fields = {"topic": "t", "AccessKey": "bob\n", "Signature": "c2VjcmV0"}
    async with audit.writing():
        audit.registry.admit(request_of(ROUTE, fields, channel=Client()))
    (line,) = audit.lines()
    assert line["user"] is None
    assert line["detail"]["claimedUser"] == "bob\\n"
    assert b"c2VjcmV0" not in audit.path.read_bytes()


async def test_log_ins_are_recorded(audit: Recorded) -> None:
    async with audit.writing():
        audit.log.authenticated(Client(), "alice", True)
        audit.log.authenticated(Client(), "alice", False)
        audit.log.authenticated(Client(port=6), "alice", False)
    assert [(line["event"], line["user"], line["detail"]) for line in audit.lines()] == [
        ("login", "alice", {"first": NOON, "count": 1}),
        ("login.failed", "alice", {"first": NOON, "count": 2}),
    ]


@pytest.mark.parametrize(("hosts", "lines_max"), [(1, HOST_LINES_MAX + 1), (50, LINES_MAX + 21)])
async def test_wrong_log_ins_fill_no_log(
    audit: Recorded, autojump_clock: object, hosts: int, lines_max: int
) -> None:
    """Of 100,000 names a minute; and each is counted."""
    clients = [Client(ip=f"10.0.0.{number}") for number in range(hosts)]
    async with audit.writing():
        await trio.sleep(0.5)
        for number in range(100_000 // 60):
            audit.log.authenticated(clients[number % hosts], f"user{number}", False)
        await trio.sleep(1)
        assert audit.ask(Client("alice")) == ResponseCode.SUCCESS
    *failed, request = audit.lines()
    assert request["event"] == "request"
    assert len(failed) <= lines_max
    assert sum(line["detail"]["count"] for line in failed) == 100_000 // 60
    assert failed[-1]["user"] is None
    assert failed[-1]["detail"]["others"] is True


async def test_brokers_are_recorded(audit: Recorded) -> None:
    async with audit.writing():
        audit.log.broker_changed("registered", Client("inner"), "broker-a", "10.0.0.1:10911")
    (line,) = audit.lines()
    assert (line["event"], line["user"]) == ("broker.registered", "inner")
    assert line["detail"] == {
        "broker": "broker-a",
        "address": "10.0.0.1:10911",
        "first": NOON,
        "count": 1,
    }


async def test_texts_of_clients_are_bounded_and_escaped(audit: Recorded) -> None:
    name = "\x1b[31m\u202e\n" + "x" * 10_000
    audit.denied[name] = name
    async with audit.writing():
        audit.log.authenticated(Client(), name, False)
        audit.ask(Client("alice"), topic=name)
        audit.ask(Client(name), ROUTE, name)
    failed, request, denied = sorted(
        audit.lines(), key=lambda line: line["event"] != "login.failed"
    )
    shown = "\\x1b[31m\\u202e\\n" + "x" * 249 + "..."
    assert failed["user"] == denied["user"] == denied["detail"]["remark"] == shown
    assert request["resources"] == [f"Topic:{shown}"[:-9] + "..."]
    assert all(len(line) < 2048 for line in audit.path.read_bytes().splitlines())


def damage(path: str) -> None:
    Path(path).write_text("damaged")


async def test_certificates_are_recorded(audit: Recorded, tmp_path: Path) -> None:
    authority = Authority.new(tmp_path / "ca")
    settings = authority.server()
    network = TcpNetwork(TlsFile(settings, None, ()))
    listener = network.listen("127.0.0.1", 0)
    certificates = network.certificates
    assert certificates is not None
    async with audit.writing(), trio.open_nursery() as nursery:
        await nursery.start(network.serve, listener, audit.server)
        certificates.refresh()
        damage(settings.cert_file)
        certificates.refresh()
        authority.issue("server")
        certificates.refresh()
        nursery.cancel_scope.cancel()
    rejected, changed = audit.lines()
    assert (rejected["event"], changed["event"]) == ("certificate.rejected", "certificate.changed")
    assert rejected["detail"]["reason"]
    assert changed["detail"] == {"file": settings.cert_file}


# -- when it can't be written ----------------------------------------------------------------------


def size_of(path: Path) -> int:
    return path.stat().st_size


async def failed(audit: Recorded) -> None:
    await until(lambda: bool(audit.log.problem))


@pytest.fixture
def in_folder(tmp_path: Path) -> Path:
    """The path of a log in a folder of its own."""
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "audit.log"


class Removed:
    """The folder of a log is removed."""

    problem = "No such file or directory"

    def __init__(self, path: Path) -> None:
        shutil.rmtree(path.parent)

    def mend(self, path: Path) -> None:
        path.parent.mkdir()


class Replaced:
    """A log was moved away, and a folder has its name."""

    problem = "Is a directory"

    def __init__(self, path: Path) -> None:
        path.rename(path.with_name("moved"))
        path.mkdir()

    def mend(self, path: Path) -> None:
        path.rmdir()


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("fault", [Removed, Replaced])
async def test_a_file_that_is_away(
    in_folder: Path, fault: type[Removed | Replaced], refuses: bool
) -> None:
    audit, alice = Recorded(in_folder, refuses=refuses), Client("alice")
    with structlog.testing.capture_logs() as logs:
        async with running(audit.log.run):
            await until(lambda: names_of(in_folder) == ["daemon.started"])
            away = fault(in_folder)
            assert audit.ask(alice) == ResponseCode.SUCCESS  # nobody knows yet
            await failed(audit)
            problem = f"{in_folder}: {away.problem}"
            assert audit.log.runtime_info() == {"auditProblem": problem}
            refused = ResponseCode.SERVICE_NOT_AVAILABLE if refuses else ResponseCode.SUCCESS
            assert audit.ask(alice, topic="u") == refused
            assert audit.ask(alice, ROUTE) == ResponseCode.SUCCESS
            away.mend(in_folder)
            await until(lambda: not audit.log.problem)
            assert audit.log.runtime_info() == {"auditProblem": ""}
            assert audit.ask(alice, topic="v") == ResponseCode.SUCCESS
    resources = [line["resources"] for line in lines_of(in_folder)]
    assert resources == [["Topic:t"], *([] if refuses else [["Topic:u"]]), ["Topic:v"], []]
    assert checked(in_folder).problem is None
    lines = [line["event"] for line in logs]
    assert len(lines) == 2
    assert lines[0] == f"audit log {in_folder} is unavailable, retrying: {away.problem}"
    assert "is available again after" in lines[1]


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_file_that_is_moved_refuses_nothing(in_folder: Path, refuses: bool) -> None:
    audit, alice = Recorded(in_folder, refuses=refuses), Client("alice")
    async with audit.writing():
        await until(lambda: names_of(in_folder) == ["daemon.started"])
        for number in range(3):
            shutil.move(in_folder, in_folder.with_name(f"moved{number}"))
            for topic in "ab":
                assert audit.ask(alice, topic=topic) == ResponseCode.SUCCESS
            await until(lambda: in_folder.exists() and len(names_of(in_folder)) == 2)
        assert not audit.log.problem
    assert names_of(in_folder) == ["request", "request", "daemon.stopped"]
    assert audit.served == ["alice"] * 6
    assert audit.log.dropped_count == 0


async def test_a_refusal_names_the_file_and_the_reason(in_folder: Path) -> None:
    audit, alice = Recorded(in_folder, refuses=True), Client("alice")
    async with audit.writing():
        await until(lambda: names_of(in_folder) == ["daemon.started"])
        with files_of_at_most(size_of(in_folder) + 9):
            audit.ask(alice)
            await failed(audit)
        header = DeleteTopicHeader(topic="t")
        audit.registry.handle(alice, FrameReader().feed(frame(DELETE, header)))
        ((reply, _),) = alice.replies()
        assert reply.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert reply.remark == (
            "DELETE_TOPIC_IN_BROKER is refused, since it can't be recorded in auditLogPath="
            f"{in_folder}: File too large; mend that, or set auditOnFailure=drop and restart the "
            "daemon"
        )
        await until(lambda: not audit.log.problem)
    assert [line["event"] for line in audit.lines()] == ["request"]
    assert audit.served == ["alice"]


async def test_dropped_lines_are_counted_and_named(in_folder: Path) -> None:
    audit, alice = Recorded(in_folder), Client("alice")
    metrics = DaemonMetrics(audit.server, audit.registry, Watchdog(), lambda: 0, audit.log)
    with structlog.testing.capture_logs():
        async with running(audit.log.run):
            await until(lambda: names_of(in_folder) == ["daemon.started"])
            assert value(collect(metrics), "headrace_audit_dropped_total") == 0
            shutil.rmtree(in_folder.parent)
            sent = 5000
            for _ in range(sent):
                assert audit.ask(alice) == ResponseCode.SUCCESS
            await failed(audit)
            page = collect(metrics)
            dropped = value(page, "headrace_audit_dropped_total")
            assert dropped == audit.log.dropped_count
            assert 0 < dropped < sent
            assert value(page, "headrace_audit_failing_seconds") is not None
            in_folder.parent.mkdir()
            await until(lambda: not audit.log.problem)
            audit.ask(alice, topic="last")
    lines = lines_of(in_folder)
    (lost,) = [line for line in lines if line["event"] == "log.lost"]
    assert lost["detail"] == {"count": dropped}
    assert sum(line["resources"] == ["Topic:t"] for line in lines) + dropped == sent
    assert checked(in_folder).problem is None


def test_administration_waits_for_a_disk_that_is_too_slow(tmp_path: Path) -> None:
    """Nothing is written in this test."""
    audit, alice = Recorded(tmp_path / "audit.log", refuses=True), Client("alice")
    asked = 5000
    answers = [audit.ask(alice, topic="t" * 200) for _ in range(asked)]
    refused = answers.count(ResponseCode.SERVICE_NOT_AVAILABLE)
    assert 0 < refused < asked
    assert len(audit.served) == asked - refused
    assert audit.log.problem == "it is written too slowly"
    assert audit.log.dropped_count == 0  # so that what was done is still recorded


async def test_a_stop_does_not_wait_for_what_is_away(in_folder: Path) -> None:
    audit = Recorded(in_folder)
    with structlog.testing.capture_logs(), trio.fail_after(30):
        async with running(audit.log.run):
            await until(lambda: names_of(in_folder) == ["daemon.started"])
            shutil.rmtree(in_folder.parent)
            audit.ask(Client())
    # The request and the stop; the start if the folder went before its write had ended.
    assert audit.log.dropped_count in {2, 3}


async def test_two_daemons_do_not_start_with_one_file(audit: Recorded) -> None:
    async with audit.writing():
        refused = pytest.RaisesExc(OSError, match="another daemon writes this audit log")
        with pytest.RaisesGroup(refused, flatten_subgroups=True):
            async with running(Recorded(audit.path).log.run):
                pass
