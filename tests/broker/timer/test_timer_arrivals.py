"""Timers as rows: the columns say what each record says."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace_broker.store.queues.queue_blocks import QueueBlock
from headrace_broker.timer.arrivals import TIMER, Topics, arrivals
from headrace_protocol.blocks import encode_records
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns
from headrace_protocol.message import encode_properties
from headrace_protocol.system_topics import TIMER_TOPIC
from tests.support.seeds import seeds

_NOW_MS = 1_700_000_000_123


def _properties(chance: random.Random, number: int) -> bytes:
    delay_ms = chance.choice([1, 999, 1000, 5432, 10**7])
    properties = {
        "UNIQ_KEY": f"{number:032X}",
        "TIMER_OUT_MS": str((_NOW_MS + delay_ms - 1) // 1000 * 1000),
        "REAL_TOPIC": chance.choice(["T", "U", "a longer topic"]),
    }
    extra = {
        "TIMER_DELAY_MS": str(delay_ms),
        "TIMER_DELIVER_MS": str(_NOW_MS + delay_ms),
        "TIMER_DELAY_SEC": str(delay_ms // 1000),
        "TIMER_DEL_UNIQKEY": chance.choice(["A", "T+A"]),
        "TIMER_ROLL_TIMES": "1",
        "TAGS": "x" * chance.randrange(4),
        "KEYS": "TIMER_OUT_MS",
    }
    wanted = chance.sample(list(extra), chance.randrange(3))
    items = [*properties.items(), *((name, extra[name]) for name in wanted)]
    if chance.random() < 0.2:
        chance.shuffle(items)
    if chance.random() < 0.05:
        items = [(name, "x" * chance.randrange(1, 20)) for name, _ in items]
    if chance.random() < 0.05:
        items = [(name, value) for name, value in items if name != "REAL_TOPIC"]
    raw = encode_properties(dict(items))
    if chance.random() < 0.1:  # of equal names the last that has a value wins
        raw += b"UNIQ_KEY\x01a\x02REAL_TOPIC\x01\x02TIMER_OUT_MS\x017000\x02"
    return raw


@pytest.mark.parametrize("seed", seeds(20))
def test_columns_say_what_each_record_says(seed: int) -> None:
    chance = random.Random(seed)
    properties = [_properties(chance, number) for number in range(300)]
    block = encode_records(
        TIMER_TOPIC,
        [b"body"] * len(properties),
        properties,
        born_timestamp=1,
        born_host=b"\x7f\0\0\1\0\0\0\1",
    )
    sizes = block.sizes.astype(np.int64)
    columns = RecordColumns(bytes(block.data), np.cumsum(sizes) - sizes, sizes)
    columns.store_timestamp = np.full(len(properties), _NOW_MS)
    units = np.zeros(len(properties), UNIT_DTYPE)
    read = QueueBlock(TIMER_TOPIC, 0, 0, len(properties), units, columns)
    topics = Topics()
    by_columns = arrivals(read, topics)
    one_by_one = arrivals(read, topics, columns_rows_min=10**9)
    for name in TIMER.names or ():
        assert by_columns.rows[name].tolist() == one_by_one.rows[name].tolist(), name
    assert by_columns.replaces.tolist() == one_by_one.replaces.tolist()
