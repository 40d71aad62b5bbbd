"""The quick check of keys agrees with ``KeyDemand``, and spares it the usual messages."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from headrace_broker.compaction.key_check import KeyCheck
from headrace_broker.compaction.keys import KeyDemand, queue_of_key
from headrace_broker.message_demands import QuickCheck, SentMessage
from headrace_broker.store.log.batch_records import BatchRecords
from headrace_broker.store.log.uniform_batch import UniformBatch
from headrace_protocol.bodies import TopicConfig
from headrace_protocol.errors import RequestError
from headrace_protocol.message import encode_batch
from tests.broker.compaction.test_compaction_keys import KEYED, UNIQ_KEY, create, send, send_block
from tests.support.broker import BrokerUnderTest

_PIECES = (
    "KEYS\x01a1\x02",
    "KEYS\x01b2\x02",
    "KEYS\x01b3\x02",
    "KEYS\x01\x02",
    "KEYS\x01 c\x02",
    "KEYS\x01\u00e4\x02",
    "XKEYS\x01x\x02",
    "__DELETE__\x01true\x02",
    "S\x01KEYS\x02",
    UNIQ_KEY,
)


class PlainQueues:
    """Queues of topics that are not static."""

    def is_static(self, _topic: str) -> bool:
        return False

    def of_keys(self, _topic: str, queue_id: int, queue_count: int) -> tuple[int, int]:
        return queue_id, queue_count

    def has_older(self, _topic: str, _queue_id: int) -> bool:
        return False


def _is_left_alone(properties: bytes, rule: str) -> bool:
    attributes = {"cleanup.policy": "COMPACTION", "key.queue": rule}
    topic = TopicConfig(topic_name="C", write_queue_nums=2, attributes=attributes)
    items = properties.decode().split("\x02")
    message = SentMessage("C", 1, items, record_bytes=100)
    try:
        KeyDemand(lambda _: topic, 200, PlainQueues()).serve(message)
    except RequestError:
        return False
    return message.body is None


@pytest.mark.parametrize("rule", ["any", "headrace", "java"])
def test_what_passes_the_quick_check_passes_the_demand(broker: BrokerUnderTest, rule: str) -> None:
    seed = int(np.random.default_rng().integers(1 << 32))
    random, passed = Random(seed), 0
    queue = broker.store.queue("T", 0)
    check: QuickCheck = KeyCheck(1, 2, rule, 200)
    for _ in range(1500):
        weights = (9, 9, 9, 1, 1, 1, 1, 1, 1, 9)
        texts = [
            "".join(dict.fromkeys(random.choices(_PIECES, weights, k=random.randint(1, 3))))
            for _ in range(random.randint(1, 3))
        ]
        raws = [text.encode() for text in texts]
        body = encode_batch([(0, b"b", raw) for raw in raws])
        alike = UniformBatch.of(body, 0, queue)
        results = [
            check.passes_all(raws, 100),
            check.passes_items(BatchRecords(body, 0, queue)),
            *([check.passes_items(alike)] if alike is not None else []),
        ]
        if any(results) or all(map(check.passes, texts)):
            passed += 1
            assert all(_is_left_alone(raw, rule) for raw in raws), (seed, texts)
    assert passed > 50, seed


def test_a_large_record_does_not_pass() -> None:
    check = KeyCheck(1, 2, "any", 200)
    assert check.passes_all([b"KEYS\x01k\x02"], 200)
    assert not check.passes_all([b"KEYS\x01k\x02"], 201)


@pytest.mark.parametrize("rule", ["any", "headrace"])
def test_usual_messages_are_stored_without_a_look_at_each(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    create(broker, "Q", key_queue=rule)
    here = [f"k{number}" for number in range(99) if queue_of_key("headrace", f"k{number}", 2) == 1]
    first = f"KEYS\x01{here[0]}\x02{UNIQ_KEY}"
    assert send(broker, first, topic="Q") == [(0, "")]

    def fail(_self: KeyDemand, _message: SentMessage) -> None:
        pytest.fail("a message took the slow way")

    monkeypatch.setattr(KeyDemand, "serve", fail)
    singles = [f"KEYS\x01{key}\x02{UNIQ_KEY}" for key in here]
    assert send(broker, *singles, topic="Q") == [(0, "")] * len(here)
    assert send(broker, first, topic="Q", body=b"") == [(0, "")]
    raws = [f"KEYS\x01{key}\x02".encode() for key in here]
    for keys in (raws[-9:], [*raws[:1], *raws[-9:]]):
        batch = encode_batch([(0, b"b", raw) for raw in keys])
        assert send(broker, UNIQ_KEY, body=batch, m=True, topic="Q") == [(0, "")]
    assert send_block(broker, raws[-9:], topic="Q", queue_id=1).code == 0


def test_a_changed_rule_is_seen(broker: BrokerUnderTest) -> None:
    create(broker, "Q")
    assert send(broker, KEYED, topic="Q") == [(0, "")]
    create(broker, "Q", 4, key_queue="java")
    ((_, remark),) = send(broker, KEYED, topic="Q")
    assert "belongs to queue 3, not 1" in remark
