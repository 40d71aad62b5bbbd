"""A small store, and the end of all stores that a test opens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.store_queue import StoreQueue
from tests.support.stores import FaultyFiles, close_stores, open_store


@pytest.fixture(autouse=True)
def stores_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Before the patches of a test and its folder go."""
    yield
    close_stores()


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles) -> MessageStore:
    return open_store(tmp_path, files=files)


@pytest.fixture
def queue(store: MessageStore) -> StoreQueue:
    return store.queue("T", 0)
