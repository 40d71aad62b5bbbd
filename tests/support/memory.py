"""Measures the memory that state takes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

from headrace_broker.host_budget import Host
from tests.support.channel import MemoryChannel

HOST = Host.of(MemoryChannel())


def kept_bytes(action: Callable[[], object]) -> int:
    """Memory that the second run of ``action`` adds."""
    action()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        action()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
