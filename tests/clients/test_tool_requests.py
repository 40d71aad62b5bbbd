"""Dashboards, the exporter and mqadmin 4.9.8 find in our answers what they read."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from headrace.embedded import Embedded
from tests.conformance.tool_requests import misread, situation


@pytest.mark.slow
async def test_tools_find_what_they_read(mq: Embedded) -> None:
    async with situation(mq.nameserver) as names:
        wrong = await trio.to_thread.run_sync(partial(misread, names, {}))
    assert not wrong, "\n".join(wrong)
