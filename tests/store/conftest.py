"""Stores of the tests of this folder are closed at their end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores import close_stores


@pytest.fixture(autouse=True)
def stores_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Before the patches of a test and its folder go."""
    yield
    close_stores()
