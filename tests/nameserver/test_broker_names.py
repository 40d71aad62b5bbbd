"""Names of brokers belong to the users that registered them, over restarts, until freed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_nameserver.config import ConfigError
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.departed import ForgetBrokerHeader
from headrace_protocol.nameserver_headers import UnregisterBrokerHeader
from tests.support.access import UsersUnderTest, entry, opened, session
from tests.support.channel import MemoryChannel
from tests.support.nameserver import NameServerUnderTest, register_body, register_header


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the users root, and east, west and admin, who may register brokers."""
    users = UsersUnderTest(tmp_path)
    for name in ("east", "west", "admin"):
        users.make(name)
        assert users.rule(name, entry("Cluster:*", "Update"))[0] == 0
    return tmp_path


def started(folder: Path) -> NameServerUnderTest:
    return NameServerUnderTest(access=opened(folder), names_folder=folder)


def register(
    server: NameServerUnderTest, by: str | MemoryChannel, name: str = "b0", port: int = 10911
) -> tuple[int, str]:
    channel = session(by) if isinstance(by, str) else by
    header = register_header(name, address=f"127.0.0.1:{port}")
    body = register_body("t0", name).encode()
    command, _ = server.ask(Code.REGISTER_BROKER, header, body, channel=channel)
    return command.code, command.remark or ""


def forget(server: NameServerUnderTest, name: str = "b0") -> int:
    header = ForgetBrokerHeader(broker_name=name)
    return server.ask(Code.FORGET_BROKER, header, channel=session("admin"))[0].code


def test_a_name_belongs_to_its_first_user_over_restarts(folder: Path) -> None:
    assert register(started(folder), "east")[0] == 0
    again = started(folder)
    code, remark = register(again, "west")
    assert code == 16
    assert remark == (
        "the broker name b0 belongs to User:east, who registered it first: to free it once that "
        "broker is down, run `headrace broker forget b0`, or register it as a Super user"
    )
    assert register(again, "east")[0] == 0
    assert register(again, "west", "b1", 10921)[0] == 0


def test_a_name_that_is_freed_may_be_taken(folder: Path) -> None:
    server = started(folder)
    assert forget(server) == 211
    east = session("east")
    assert register(server, east)[0] == 0
    assert forget(server) != 0  # it is registered
    server.table.close_channel(east, server.now_ms)
    assert forget(server) == 0
    assert register(server, "west")[0] == 0
    assert register(started(folder), "east")[0] == 16


def test_a_name_can_be_freed_long_after_its_broker(folder: Path) -> None:
    assert register(started(folder), "east")[0] == 0
    later = started(folder)
    assert forget(later) == 0
    assert register(later, "west")[0] == 0


def test_a_super_user_takes_a_name_over(folder: Path) -> None:
    east = session("east")
    server = started(folder)
    assert register(server, east)[0] == 0
    server.table.close_channel(east, server.now_ms)
    assert register(server, "root")[0] == 0
    assert register(started(folder), "east")[0] == 16
    assert register(started(folder), "root")[0] == 0


def test_another_user_does_not_unregister_a_broker(folder: Path) -> None:
    server = started(folder)
    assert register(server, "east")[0] == 0
    header = UnregisterBrokerHeader(
        broker_name="b0", broker_addr="127.0.0.1:10911", cluster_name="c0", broker_id=0
    )
    answers = [
        server.ask(Code.UNREGISTER_BROKER, header, channel=session(user))[0].code
        for user in ("west", "east")
    ]
    assert answers == [16, 0]


def test_a_refused_registration_takes_no_name(folder: Path) -> None:
    server = started(folder)
    header = register_header("b0", address="127.0.0.1:10911")
    command, _ = server.ask(Code.REGISTER_BROKER, header, b"{damaged", channel=session("east"))
    assert command.code != 0
    assert register(server, "west")[0] == 0


def test_an_unreadable_file_is_named(folder: Path) -> None:
    (folder / "brokerNames.json").write_text("{")
    with pytest.raises(ConfigError, match=r"brokerNames\.json"):
        started(folder)
