"""A half reads the same whether its layout is known or not."""

from __future__ import annotations

import random
import secrets

from headrace_broker.message_demands import SentMessage
from headrace_broker.transaction.halves import HalfNames, committed_properties
from headrace_broker.transaction.layouts import HalfLayouts
from headrace_protocol.message import tags_code_of

IDS = [b"A", b"B", b"1", b"PGROUP", b"true", b"", b"a\x01b", "ключ".encode()]
BEFORE = [
    b"KEYS\x01k1\x02",
    b"KEYS\x01\x02",
    b"TRAN_MSG\x01true\x02",
    b"KEYS\x01A\x02",
    b"MY_",
    b"\x02",
]
AFTER = [
    b"PGROUP\x01g\x02",
    b"PGROUP\x01A\x02",
    b"PGROUP\x01B\x02",
    b"TAGS\x01t1\x02",
    b"TAGS\x01A\x02",
    b"DELAY\x013\x02",
    b"TRAN_PREPARED_QUEUE_OFFSET\x017\x02",
    b"TRAN_PREPARED_QUEUE_OFFSET\x018\x02",
    b"UNIQ_KEY\x01B\x02",
    b"REAL_TOPIC\x01A\x02",
    b"no value\x02",
]


def half(draw: random.Random) -> bytes:
    key = draw.choice(IDS)
    parts = [*draw.sample(BEFORE, draw.randrange(3)), b"UNIQ_KEY\x01%s\x02" % key]
    parts += draw.sample(AFTER, draw.randrange(4))
    if draw.random() < 0.9:
        parts.append(b"__transactionId__\x01%s\x02" % draw.choice([key, key, key, b"other"]))
    parts += [b"REAL_TOPIC\x01T\x02", b"REAL_QID\x01%d\x02" % draw.randrange(2)]
    return b"".join(parts)[: draw.choice([None, None, None, -1])]


def may_wait(message: SentMessage) -> bool:
    return "DELAY" in message.values()


def test_a_known_layout_changes_nothing() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201
    draw, layouts = random.Random(seed), HalfLayouts(may_wait)
    for _ in range(3000):
        properties = half(draw)
        layout, stored = layouts.read(properties)
        names = HalfNames(properties)
        assert (layout.group, layout.topic, layout.queue_id) == (
            names.group,
            names.topic,
            names.queue_id,
        ), properties
        assert layout.first_offset == names.first_offset, properties
        assert layout.tags_code == tags_code_of(properties), properties
        assert layout.may_wait == (b"DELAY\x01" in properties), properties
        assert stored == committed_properties(properties), properties
    assert len(layouts) < 1000


def test_halves_that_differ_in_their_ids_share_a_layout_and_few_are_kept() -> None:
    layouts = HalfLayouts(may_wait)
    for number in range(3000):
        layouts.read(
            b"KEYS\x01k%d\x02UNIQ_KEY\x01A%d\x02PGROUP\x01g\x02__transactionId__\x01A%d\x02"
            % (number, number, number)
        )
    assert len(layouts) == 1
    for number in range(3000):
        layouts.read(b"n%d\x01v\x02UNIQ_KEY\x01A\x02__transactionId__\x01A\x02" % number)
    assert 0 < len(layouts) <= 1000
    long = HalfLayouts(may_wait)
    long.read(b"n\x01%s\x02UNIQ_KEY\x01A\x02__transactionId__\x01A\x02" % bytes(2000))
    assert len(long) == 0
