"""A message that waited goes the same way whether its layout is known or not."""

from __future__ import annotations

import random
import secrets

from headrace_broker.inner.delivery import Routes
from headrace_protocol.java_hash import tags_code_of
from headrace_protocol.message import property_number, property_value, with_properties

DROPPED = (b"TIMER_ENQUEUE_MS", b"TIMER_DEQUEUE_MS")
IDS = [b"A", b"B", b"T", b"7", b"", b"a\x01b", "ключ".encode()]
PARTS = [
    b"TAGS\x01t1\x02",
    b"TAGS\x01A\x02",
    b"TIMER_ENQUEUE_MS\x0117\x02",
    b"TIMER_ENQUEUE_MS\x01A\x02",
    b"TIMER_DEQUEUE_MS\x01\x02",
    b"UNIQ_KEY\x01B\x02",
    b"REAL_TOPIC\x01A\x02",
    b"REAL_QID\x01none\x02",
    b"no value\x02",
    b"MY_",
    b"\x02",
]


def waiting(draw: random.Random) -> bytes:
    parts = [b"REAL_TOPIC\x01T\x02", b"REAL_QID\x01%d\x02" % draw.randrange(2)]
    parts += [b"UNIQ_KEY\x01%s\x02" % draw.choice(IDS), *draw.sample(PARTS, draw.randrange(4))]
    draw.shuffle(parts)
    keys = draw.choice([b"", b"", b"KEYS\x01k%d\x02" % draw.randrange(9), b"KEYS\x01\x02"])
    return (keys + b"".join(parts))[: draw.choice([None, None, None, -1])]


def test_a_known_layout_changes_nothing() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201
    draw = random.Random(seed)
    for dropped in ((), DROPPED):
        routes = Routes(dropped)
        for _ in range(5000):
            raw = waiting(draw)
            route, properties = routes.read(raw)
            topic = property_value(raw, b"REAL_TOPIC").decode(errors="replace")
            place = topic, property_number(raw, b"REAL_QID", -1), tags_code_of(raw)
            assert (route.topic, route.queue_id, route.tags_code) == place, raw
            assert properties == with_properties(raw, {}, dropped), raw


def test_messages_that_differ_in_keys_and_id_share_a_layout_and_few_are_kept() -> None:
    routes = Routes()
    text = b"KEYS\x01k%d\x02UNIQ_KEY\x01A%d\x02TIMER_OUT_MS\x01%d\x02REAL_TOPIC\x01T\x02"
    for number in range(3000):
        routes.read(text % (number, number, 7))
    assert len(routes) == 1
    for number in range(3000):
        routes.read(text % (number, number, number))
    assert len(routes) <= 1000
