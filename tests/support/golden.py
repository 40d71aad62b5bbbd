"""Data of a real Apache RocketMQ: stores, manifests, frames (tests/golden/README.md)."""

from __future__ import annotations

import atexit
import functools
import gzip
import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from headrace_broker.store.settings import StoreSettings

GOLDEN = Path(__file__).parent.parent / "golden"
STORES = ("clean", "kill9")
# Settings of a broker that opens them, besides the sizes of ``golden_settings``.
CONFIG = {"compaction_mapped_file_size": 262_144, "compaction_cq_mapped_file_size": 4600}


@functools.cache
def _unpacked() -> Path:
    folder = tempfile.mkdtemp(prefix="headrace-golden-")
    atexit.register(shutil.rmtree, folder)
    for name in STORES:
        with tarfile.open(GOLDEN / f"store-{name}.tar.gz") as archive:
            # Python 3.11.2, which Debian has, does not know it yet.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(folder)
    return Path(folder)


def golden_store(name: str) -> Path:
    """One of the stores, shared by all tests of the process: to read only."""
    return _unpacked() / f"store-{name}"


def copy_golden_store(name: str, target: Path) -> Path:
    """A store to write to, modification times kept. Folders that only the peer serves stay out."""
    skipped = shutil.ignore_patterns("timerwheel", "timerlog")
    shutil.copytree(golden_store(name), target, ignore=skipped)
    return target


def golden_settings(root: Path) -> StoreSettings:
    """The sizes that the golden stores were written with."""
    return StoreSettings(
        root=root,
        commit_log_file_bytes=262_144,
        consume_queue_file_bytes=2000,
        index_slot_count=100,
        index_entry_count=300,
        ring_rows=1024,
    )


@functools.cache
def manifest(name: str) -> dict[str, Any]:
    """The messages that the official client read from the broker that wrote the store."""
    return json.loads(gzip.decompress((GOLDEN / f"manifest-{name}.json.gz").read_bytes()))


@functools.cache
def frames() -> tuple[dict[str, Any], ...]:
    """Recorded remoting frames, in order."""
    text = gzip.decompress((GOLDEN / "frames.jsonl.gz").read_bytes())
    return tuple(json.loads(line) for line in text.splitlines())
