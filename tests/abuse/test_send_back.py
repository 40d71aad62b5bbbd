"""No client may take a message that was not sent back for one that was."""

from __future__ import annotations

import pytest
import structlog.testing

from headrace_daemon.host_log import LINES_MAX
from headrace_daemon.network import MemoryNetwork
from headrace_protocol.header_codecs import SerializeType
from tests.broker.test_bad_input import daemons, request

FIELDS = {"offset": 0, "group": "readers", "delayLevel": 0, "originTopic": "Flights"}


@pytest.mark.parametrize("codec", list(SerializeType))
async def test_a_message_that_is_sent_back_gets_no_answer(codec: SerializeType) -> None:
    with structlog.testing.capture_logs() as logs:
        async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
            for opaque in range(LINES_MAX + 5):
                await wire.send(request(36, FIELDS, codec=codec, opaque=opaque))
            command, _ = await wire.ask(request(9999, codec=codec, opaque=99))
            assert command.opaque == 99
    entries = [entry for entry in logs if entry["event"] == "message not sent back"]
    assert [entry["group"] for entry in entries] == ["readers"] * LINES_MAX


@pytest.mark.parametrize("code", [324, 325])
async def test_request_and_reply_is_refused(code: int) -> None:
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        command, _ = await wire.ask(request(code, {}, b"reply"))
        assert (command.code, command.remark) == (3, f" request type {code} not supported")
