"""``headrace broker forget``: a departed broker won't come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.admin.client import Admin
from headrace.errors import BrokerError
from tests.support.cli import fail, succeed
from tests.support.running_brokers import brokers, running_in_thread

pytestmark = pytest.mark.slow


async def test_a_departed_broker_is_forgotten(tmp_path: Path) -> None:
    async with (
        brokers(tmp_path, ["a", "b"]) as mq,
        Admin(**mq.at) as admin,
    ):
        assert await admin.departed_brokers() == []
        with pytest.raises(BrokerError, match="broker b is registered: stop it first"):
            await admin.forget_broker("b")
        await mq.stop("b")
        (gone,) = await admin.departed_brokers()
        assert (gone.broker_name, gone.how) == ("b", "UNREGISTERED")
        assert await admin.forget_broker("b")
        assert await admin.departed_brokers() == []
        assert not await admin.forget_broker("b")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_in_thread(tmp_path, ["a", "b"]) as mq:
        monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)
        assert "add --yes" in fail(2, "broker", "forget", "b")
        assert "broker b is registered: stop it first" in fail(1, "broker", "forget", "b", "--yes")
        mq.stop("b")
        succeed("broker", "forget", "b", "--yes")
        error = fail(3, "broker", "forget", "b", "--yes")
        assert "no nameserver remembers a broker b that left" in error
