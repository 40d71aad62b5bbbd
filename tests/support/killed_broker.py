"""A broker that ends itself, as kill -9 does, before or after a named step of its tier.

``python -m tests.support.killed_broker FILE headrace broker -c broker.conf``. Once FILE is there
and says for example ``upload before 2``, the second upload from then on does not begin. Sizes and
times are small, so that all steps happen soon.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

from headrace.admin.cli import main
from headrace_broker.tiered.access import tiered_storage
from headrace_broker.tiered.container.flat_file import FlatFile
from headrace_broker.tiered.container.flat_queue import FlatQueue
from headrace_broker.tiered.container.metadata import TierMetadata
from headrace_broker.tiered.container.tier import Tier
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_broker.tiered.objects import merge, object_tier
from headrace_broker.tiered.objects.inventory import Inventory
from headrace_broker.tiered.objects.manifest_file import ManifestFile
from headrace_broker.tiered.objects.object_tier import ObjectTier

STEPS: Final[dict[str, dict[str, tuple[Any, str]]]] = {
    "posix": {
        "upload of records": (FlatQueue, "_append_some"),
        "upload of units": (FlatQueue, "_append_units"),
        "roll": (FlatFile, "roll"),
        "expiry": (FlatFile, "drop_before"),
        "removal": (Tier, "_remove"),
        "topic deletion": (Tier, "delete"),
        "metadata": (TierMetadata, "save"),
    },
    "file": {
        "upload": (ObjectTier, "put"),
        "object file": (PosixDriver, "_replace"),
        "manifest": (ManifestFile, "commit"),
        "checkpoint": (ObjectTier, "checkpoint"),
        "merge": (ObjectTier, "_make"),
        "end of a merge": (ObjectTier, "_finish"),
        "expiry": (Inventory, "shrink"),
        "removal": (ObjectTier, "_delete"),
        "topic deletion": (Inventory, "delete"),
    },
}


class _Order:
    """The moment to end. left: calls of the step until then, once the file is there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._left = 0

    def obey(self, step: str, moment: str) -> None:
        """End, if it is the moment."""
        if not self._file.exists():
            return
        wanted, wanted_moment, count = self._file.read_text().rsplit(" ", 2)
        if (step, moment) == (wanted, wanted_moment):
            self._left = (self._left or int(count)) - 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)


def _obeying(step: str, function: Callable[..., Any], order: _Order) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        order.obey(step, "before")
        result = function(*arguments, **named)
        order.obey(step, "after")
        return result

    return call


def _prepare(order: _Order) -> None:
    for steps in STEPS.values():
        for step, (owner, name) in steps.items():
            setattr(owner, name, _obeying(step, getattr(owner, name), order))
    vars(merge)["_RUNS"] = 4
    vars(object_tier).update(_TAIL_MAX=6, _UNUSED_MS=1000, _DAY_MS=5000)
    vars(tiered_storage)["_MERGE_S"] = 0.3


if __name__ == "__main__":
    _prepare(_Order(Path(sys.argv[1])))
    sys.argv = sys.argv[2:]
    main()
