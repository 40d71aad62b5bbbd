"""Apache's broker answers what dashboards, the exporter and mqadmin 4.9.8 ask: the list is right.

Ours is asked in tests/clients/test_tool_requests.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import trio

from tests.conformance.tool_requests import misread, situation

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

MISSING = {
    28: {
        # Dropped by 5.5.0, although the exporter and mqadmin 4.9.8 read them.
        *("table.brokerVersion:int", "table.getTransferedTps:three"),
        # Blanks in the place of numbers until a broker is ten minutes old.
        *("table.putTps:three", "table.getMissTps:three", "table.getFoundTps:three"),
        *("table.getTotalTps:three", "table.getTransferredTps:three"),
    }
}


async def test_apaches_broker_answers_what_tools_read(nameserver: str) -> None:
    async with situation(nameserver) as names:
        wrong = await trio.to_thread.run_sync(partial(misread, names, MISSING))
    assert not wrong, "\n".join(wrong)
