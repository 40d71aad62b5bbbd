"""Tier files on a folder, read and continued in turn by our classes and by Apache's."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from headrace_broker.tiered.container.tier import Tier
from headrace_protocol.java_hash import tags_code
from headrace_protocol.tier.driver import Failure
from tests.conformance.peer import driver_command
from tests.support.tiers import (
    TAGS,
    TOPIC,
    append,
    block,
    open_tier,
    queue_of,
    read,
    read_all,
    record,
    store_ms,
)

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

_HEAD = struct.Struct(">qi")  # tags code, size
TIMEOUT_S = 60


def java(root: Path, verb: str, content: bytes = b"") -> bytes:
    """Run a step of TierFiles; returns what it left in its file."""
    file = root / "exchange"
    file.write_bytes(content)
    command = driver_command("conformance.TierFiles", home=root)
    command += [verb, str(root), str(root / "tier"), TOPIC, "0", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return file.read_bytes()


def their_offsets(root: Path) -> list[int]:
    """The queue offsets that Apache reads; each record and tags code is compared."""
    data, at, offsets = java(root, "read"), 0, []
    while at < len(data):
        code, size = _HEAD.unpack_from(data, at)
        stored = bytearray(data[at + _HEAD.size : at + _HEAD.size + size])
        offset = int.from_bytes(stored[20:28], "big")
        original = record(offset)
        stored[28:36] = original[28:36]
        assert stored == original
        assert code == tags_code(TAGS[offset % len(TAGS)] or None)
        offsets.append(offset)
        at += _HEAD.size + size
    return offsets


def append_theirs(root: Path, first: int, count: int) -> None:
    codes = [tags_code(TAGS[offset % len(TAGS)] or None) for offset in range(first, first + count)]
    records = [record(offset) for offset in range(first, first + count)]
    pairs = zip(codes, records, strict=True)
    java(root, "append", b"".join(_HEAD.pack(code, len(each)) + each for code, each in pairs))


def append_ours(root: Path, tier: Tier, count: int) -> None:
    queue, index = queue_of(tier), tier.index
    first = queue.commit_offset
    records, _codes = block(first, count)
    assert append(queue, count) is None
    places = read(queue, first, count).physical_offset
    for at in range(0, count, 10):
        part = slice(at, at + 10)
        now_ms = store_ms(first + at)
        index.add(TOPIC, 0, records.select(part), places[part], now_ms)
    index.upload(store_ms(first))
    index.close()
    tier.metadata.save()


def check(root: Path, expected: list[int]) -> None:
    """Both read the same records, and find them by their keys."""
    assert their_offsets(root) == expected
    tier = open_tier(root)
    queue, index = tier.queues[TOPIC, 0], tier.index
    assert read_all(queue) == expected
    keys = [f"k{offset}" for offset in expected]
    theirs = java(root, "find", "\n".join(keys).encode()).decode().splitlines()
    for offset, line in zip(expected, theirs, strict=True):
        (place,) = read(queue, offset, 1).physical_offset.tolist()
        # The peer may skip files by their begin; a key that it finds is the same one.
        assert line.split() in ([f"k{offset}", str(place)], [f"k{offset}"])
        hits = index.query(TOPIC, f"k{offset}", 0, store_ms(10**6), 10)
        assert not isinstance(hits, Failure), hits
        assert [hit.log_offset for hit in hits] == [place]
    assert sum(len(line.split()) == 2 for line in theirs) > len(theirs) // 2
    index.close()


def test_files_are_continued_by_either(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    append_ours(tmp_path, tier, 40)
    append_theirs(tmp_path, 40, 40)
    check(tmp_path, list(range(80)))
    tier = open_tier(tmp_path)
    append_ours(tmp_path, tier, 30)
    tier.expire(TOPIC, 0, store_ms(50), store_ms(50))
    least = tier.queues[TOPIC, 0].min_offset
    assert least > 20
    assert their_offsets(tmp_path) == list(range(least, 110))


@pytest.mark.long
def test_files_that_the_peer_began_are_continued(tmp_path: Path) -> None:
    append_theirs(tmp_path, 1000, 30)
    check(tmp_path, list(range(1000, 1030)))
    append_ours(tmp_path, open_tier(tmp_path), 30)
    assert their_offsets(tmp_path) == list(range(1000, 1060))
