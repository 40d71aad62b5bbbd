"""A broker with a tier for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker.tiered.test_tiered_storage import start
from tests.support.broker import BrokerUnderTest


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    return start(tmp_path)
