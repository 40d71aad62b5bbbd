"""The daemons of a peer, started and ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.peer import START_TIMEOUT_S, Daemon, PeerError

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize(
    ("command", "limit_s", "state"),
    [("exec sleep 600", 0, "was killed"), ("exit 3", START_TIMEOUT_S, "ended with 3")],
)
def test_a_daemon_that_does_not_get_ready_is_named_and_ended(
    tmp_path: Path, command: str, limit_s: float, state: str
) -> None:
    daemon = Daemon.start(["sh", "-c", command], tmp_path / "log")
    with pytest.raises(PeerError, match=rf"{command}'\] {state}: no 'ready' within {limit_s} s"):
        daemon.wait_for("ready", limit_s)
    assert daemon.process.poll() is not None
