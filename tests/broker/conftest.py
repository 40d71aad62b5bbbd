"""Brokers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broker import BrokerUnderTest, brokers_of_a_test


@pytest.fixture(autouse=True)
def brokers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Before the patches of a test and its folder go."""
    with brokers_of_a_test():
        yield


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    return BrokerUnderTest(tmp_path)
