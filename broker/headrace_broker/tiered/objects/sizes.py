"""Sizes and ages in a tier of objects."""

from __future__ import annotations

from typing import Final, NamedTuple

DAY_MS: Final = 24 * 3600 * 1000


class ObjectSizes(NamedTuple):
    """Numbers that weigh requests, which cost the same for any size, against bytes.

    read_bytes: a smaller part is read as a whole. window_items: key items around the expected
    position of a hash that are read at first.
    runs: of one level that a merge joins. object_bytes: of an object that it makes; a part of a
    final one may add up to one upload.
    tail: most uploads between two checkpoints; a start reads a directory of each.
    catalog_parts_min: a smaller catalog is rewritten with the next one, so that there are few.
    sweep_ms: age of objects that no manifest names, and time between the listings that look for
    them.
    """

    read_bytes: int = 256 << 10
    window_items: int = 4096
    runs: int = 16
    object_bytes: int = 64 << 20
    tail: int = 32
    catalog_parts_min: int = 4096
    catalog_parts_max: int = 65_536
    sweep_ms: int = DAY_MS


SIZES: Final = ObjectSizes()
