"""A broker from which groups pop, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pop_broker import PopBroker


@pytest.fixture
def broker(tmp_path: Path) -> PopBroker:
    return PopBroker(tmp_path, commit_log_file_bytes=1 << 16)
