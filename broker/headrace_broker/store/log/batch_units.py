"""Units of 46 bytes: where a record with one or more messages is, by queue offset.

Those of batch queues point into the CommitLog, those of compaction logs to a position there.
Source: docs/store-format.md "Batch unit".
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace_protocol.columns import Array

BATCH_UNIT_DTYPE: Final = np.dtype(
    [
        ("physical_offset", ">i8"),
        ("size", ">i4"),
        ("tags_code", ">i8"),
        ("store_timestamp", ">i8"),
        ("queue_offset", ">i8"),
        ("count", ">i2"),
        ("compacted_offset", ">i4"),
        ("reserved", ">i4"),
    ]
)
BATCH_UNIT_BYTES: Final = BATCH_UNIT_DTYPE.itemsize
# The fields in order, without the last two, which are constant.
BATCH_UNIT: Final = struct.Struct(">qiqqqh8x")
# The part of a unit that ConsumeQueues have, too.
UNIT_HEAD: Final = struct.Struct(">qiq26x")
# Most messages that the count of a unit can state.
COUNT_MAX: Final = 0x7FFF


def used_mask(units: Array) -> Array:
    """A mask of the units that stand for records."""
    is_used: Array = (units["physical_offset"] >= 0) & (units["size"] > 0)
    return is_used & (units["queue_offset"] >= 0) & (units["count"] > 0)


def make_units(
    positions: npt.ArrayLike,
    sizes: npt.ArrayLike,
    tags_codes: npt.ArrayLike,
    store_timestamps: npt.ArrayLike,
    queue_offsets: npt.ArrayLike,
    counts: npt.ArrayLike = 1,
) -> Array:
    """Units for records, one value per record in each column."""
    units = np.empty(np.shape(positions), BATCH_UNIT_DTYPE)
    units["physical_offset"], units["size"] = positions, sizes
    units["tags_code"], units["store_timestamp"] = tags_codes, store_timestamps
    units["queue_offset"], units["count"] = queue_offsets, counts
    units["compacted_offset"], units["reserved"] = -1, 0
    return units
