"""A store for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.damage import fill_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fill_store(tmp_path / "store")
    return tmp_path / "store"
