"""What a store that is closed, killed or garbage still holds."""

from __future__ import annotations

import gc
from traceback import walk_tb
from typing import TYPE_CHECKING

import pytest

from headrace_broker.store.ring import ROW
from tests.support.stores import FaultyFiles, open_store, put

if TYPE_CHECKING:
    from pathlib import Path

ROW_ITERATOR = type(ROW.iter_unpack(b""))


def test_a_failed_dispatch_holds_no_iterator_over_a_view(tmp_path: Path) -> None:
    # Python before 3.12.7 can crash when such a traceback is garbage (python/cpython#77894).
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    put(store, store.queue("T", 0), dispatch=False)
    store.write_out()
    files.is_full = True
    with pytest.raises(OSError, match="No space left") as caught:
        store.dispatcher.drain(None, set())
    held = [value for frame, _ in walk_tb(caught.tb) for value in frame.f_locals.values()]
    iterators = [value for value in held if type(value) is ROW_ITERATOR]
    assert iterators
    assert not any(isinstance(each, memoryview) for each in gc.get_referents(*iterators))
    store.close()
