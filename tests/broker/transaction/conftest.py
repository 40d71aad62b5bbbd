"""A broker with transactions for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path)
    ledger.broker.create_topic("T")
    return ledger
