"""Requests between clients: no broker of ours passes them on."""

from __future__ import annotations

import pytest

from headrace_daemon.network import MemoryNetwork
from tests.support.wires import daemons, request


@pytest.mark.parametrize("code", [324, 325])
async def test_request_and_reply_is_refused(code: int) -> None:
    async with daemons(MemoryNetwork()) as under_test, under_test.wire() as wire:
        command, _ = await wire.ask(request(code, {}, b"reply"))
        assert (command.code, command.remark) == (3, f" request type {code} not supported")
