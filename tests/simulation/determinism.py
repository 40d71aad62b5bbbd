"""What a process decides by chance, decided by a seed: the same seed is the same run.

Sets of objects are ordered by addresses, trio shuffles ready tasks, names and times come from the
machine, and some work is cut into slices by the time it takes. Strings are hashed anew in each
process: what we iterate is in an order of its own, and ``make sim`` sets PYTHONHASHSEED besides.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from trio._core import _run

from headrace_broker.store.queues.consume_queue import ConsumeQueue
from headrace_broker.store.store_queue import StoreQueue
from headrace_daemon.serving.server_channel import ServerChannel

START_MS = 1_700_000_000_000
MEMORY = Path("/dev/shm")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """In memory where there is room for files: syncs are the simulation's own."""
    place = MEMORY if MEMORY.is_dir() else None
    with TemporaryDirectory(prefix="headrace-", dir=place) as folder:
        yield Path(folder)


@contextmanager
def decided_by(seed: int, now_s: Callable[[], float]) -> Iterator[pytest.MonkeyPatch]:
    """Everything random in the block follows from the seed; what the block patches ends with it.

    now_s: the simulation's time, since any moment.
    """
    random.seed(seed)
    _run._r.seed(seed)
    nanoseconds = itertools.count(START_MS * 1_000_000, 1000)
    with pytest.MonkeyPatch.context() as patch:
        # As Hypothesis does it.
        patch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        patch.setattr(ConsumeQueue, "__hash__", _place_of_queue)
        patch.setattr(StoreQueue, "__hash__", lambda queue: queue.key)
        patch.setattr(ServerChannel, "__hash__", lambda channel: zlib.crc32(channel.host_bytes))
        patch.setattr(time, "time_ns", lambda: next(nanoseconds))
        patch.setattr(os, "getpid", lambda: 1)
        patch.setattr(os, "urandom", random.Random(seed).randbytes)
        patch.setattr(secrets, "token_hex", lambda count: random.randbytes(count).hex())
        # Work costs nothing: how much is done at once must not depend on how fast the machine is.
        _replace_clock(patch, "perf_counter", lambda: 0.0)
        _replace_clock(patch, "monotonic", now_s)
        yield patch


def _replace_clock(patch: pytest.MonkeyPatch, name: str, ours: Callable[[], float]) -> None:
    """Replace a clock of ``time`` in each module of ours that has imported it by its name."""
    clock = getattr(time, name)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("headrace") and vars(module).get(name) is clock:
            patch.setattr(module, name, ours)


def _place_of_queue(queue: ConsumeQueue) -> int:
    return zlib.crc32("/".join(queue.files.directory.parts[-2:]).encode())
