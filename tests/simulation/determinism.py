"""Chance in a process is decided by a seed: the same seed is the same run.

Sets of objects are ordered by addresses, trio shuffles ready tasks, names and times come from the
machine, and some work is cut into slices by the time it takes. Strings are hashed anew in each
process: what we iterate is in an order of its own, and ``make sim`` sets PYTHONHASHSEED besides.
"""

from __future__ import annotations

import inspect
import itertools
import os
import random
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import Any

import pytest

# Imported before anything is replaced: it takes token_hex for good. A run imports it at a log-in.
import scramp  # noqa: F401
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


class Patches:
    """Replacements of functions and constants, which end with a run."""

    def __init__(self, context: pytest.MonkeyPatch) -> None:
        self._context = context

    def put(self, *replacements: tuple[Any, str, Any]) -> None:
        """Replace: a module or class, a name in it, and what it has from now on."""
        for owner, name, value in replacements:
            self._context.setattr(owner, name, value)


@contextmanager
def decided_by(seed: int, now_s: Callable[[], float]) -> Iterator[Patches]:
    """Everything random in the block follows from the seed; what the block patches ends with it.

    now_s: the simulation's time, since any moment.
    """
    random.seed(seed)
    _run._r.seed(seed)
    nanoseconds = itertools.count(START_MS * 1_000_000, 1000)
    with pytest.MonkeyPatch.context() as context:
        patches = Patches(context)
        patches.put(
            # As Hypothesis does it.
            (_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
            (ConsumeQueue, "__hash__", _hash_of_queue),
            (StoreQueue, "__hash__", lambda queue: queue.key),
            (ServerChannel, "__hash__", lambda channel: zlib.crc32(channel.host_bytes)),
            (time, "time_ns", lambda: next(nanoseconds)),
            (os, "getpid", lambda: 1),
            (os, "urandom", random.Random(seed).randbytes),
            (secrets, "token_hex", lambda count: random.randbytes(count).hex()),
            # Work costs nothing: how much is done at once must not depend on the machine.
            *_clocks("perf_counter", lambda: 0.0),
            *_clocks("monotonic", now_s),
        )
        yield patches


def _clocks(name: str, ours: Callable[[], float]) -> list[tuple[Any, str, Any]]:
    """Replacements of a clock of ``time`` wherever a module of ours has it.

    That is under its own name, or as the default of an argument.
    """
    clock = getattr(time, name)
    found: list[tuple[Any, str, Any]] = []
    for module in [each for key, each in sys.modules.items() if key.startswith("headrace")]:
        if vars(module).get(name) is clock:
            found.append((module, name, ours))
        found += [
            (function, "__defaults__", _replaced(function.__defaults__, clock, ours))
            for function in _functions(module)
            if clock in (function.__defaults__ or ())
        ]
    return found


@cache
def _functions(module: ModuleType) -> list[FunctionType]:
    """The functions with defaults that a module defines, those of its classes among them.

    Found once: there are thousands, and a seed takes less than a second.
    """
    owners = (module, *filter(inspect.isclass, vars(module).values()))
    return [
        value
        for owner in owners
        for value in vars(owner).values()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
        if value.__defaults__
    ]


def _replaced(values: tuple[Any, ...] | None, old: object, new: object) -> tuple[Any, ...]:
    return tuple(new if value is old else value for value in values or ())


def _hash_of_queue(queue: ConsumeQueue) -> int:
    return zlib.crc32("/".join(queue.files.directory.parts[-2:]).encode())
