"""Brokers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broker import BrokerUnderTest


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerUnderTest]:
    broker = BrokerUnderTest(tmp_path)
    yield broker
    broker.close()
    assert not broker.unexpected
