"""A batch read fails by name while a broker with a part of its topics is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import Message, blocking
from headrace.embedded import Embedded
from headrace.errors import PartialAnswer
from headrace.spark.source import HeadraceSource
from tests.spark.brokers import broker


@pytest.mark.parametrize("table", ["true", "false"])
def test_a_batch_read_is_whole_or_says_so(
    mq: Embedded,
    admin: blocking.Admin,
    producer: blocking.Producer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    table: str,
) -> None:
    topic = f"part_{table}"

    def partitions(**options: str) -> int:
        given = {"nameserver": mq.nameserver, "topic": topic, "table": table, **options}
        source = HeadraceSource(given)
        return len(source.reader(source.schema()).partitions())

    with broker(mq, tmp_path, "b"):
        compacted = {"cleanup.policy": "COMPACTION"}
        for name in ("broker-a", "b"):
            admin.create_topic(topic, queues=2, attributes=compacted, broker=name)
        for number in range(20):
            producer.send(Message(topic, b"x", key=str(number)))
        assert partitions()
    with pytest.raises(PartialAnswer, match=r"broker b \(queues 0 to 1\) was shut down .* ago"):
        partitions()
    assert partitions(failOnDataLoss="false")
    assert "this is only a part of topic" in caplog.text
    admin.forget_broker("b")
    assert partitions()
