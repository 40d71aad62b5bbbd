"""A rule for brokers: register an address of the host that you connect from."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.own_address import check_own_address
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from tests.support.channel import MemoryChannel
from tests.support.nameserver import NameServerUnderTest, register_body, register_header


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7:10911", "192.0.2.7:50000"),
        ("192.0.2.7:10911", "[::ffff:192.0.2.7]:50000"),
        ("[2001:db8::7]:10911", "[2001:db8:0::7]:50000"),
        ("127.0.0.1:10911", "127.0.0.1:50000"),
        # Beside its nameserver.
        ("127.0.0.2:10911", "127.0.0.1:50000"),
    ],
)
def test_a_brokers_own_address_is_accepted(address: str, client: str) -> None:
    check_own_address(address, client)


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7:10911", "192.0.2.8:50000"),
        ("127.0.0.1:10911", "192.0.2.8:50000"),
        ("192.0.2.7:10911", "127.0.0.1:50000"),
        ("[2001:db8::7]:10911", "[::1]:50000"),
        ("broker.example:10911", "192.0.2.8:50000"),
        ("localhost:10911", "127.0.0.1:50000"),
    ],
)
def test_another_address_is_refused_with_both(address: str, client: str) -> None:
    with pytest.raises(RequestError, match="set brokerIP1 to it, or") as refused:
        check_own_address(address, client)
    assert address in refused.value.remark
    assert client in refused.value.remark


@pytest.mark.parametrize(
    ("settings", "checks"),
    [
        ({}, False),
        ({"bind_address": "::1"}, False),
        ({"bind_address": "0.0.0.0"}, True),
        ({"bind_address": "192.0.2.1"}, True),
        ({"bind_address": "192.0.2.1", "register_from_own_address": False}, False),
        ({"register_from_own_address": True}, True),
    ],
)
def test_the_default_depends_on_the_bind_address(settings: dict[str, Any], checks: bool) -> None:
    assert NameServerConfig(**settings).checks_own_address is checks


def test_a_registration_of_another_address_is_refused() -> None:
    server = NameServerUnderTest(register_from_own_address=True)
    channel = MemoryChannel()
    channel.address = "192.0.2.8:50000"
    for address, code in (("192.0.2.7:1", ResponseCode.NO_PERMISSION), ("192.0.2.8:1", 0)):
        body = register_body("T", "U").encode()
        header = register_header(address=address)
        answer, _ = server.ask(RequestCode.REGISTER_BROKER, header, body, channel=channel)
        assert answer.code == code
    assert server.table.holder("b0", 0) == "192.0.2.8:1"
