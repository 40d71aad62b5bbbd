"""Spoiled requests at the functions that serve them: none of them lets an exception out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from headrace_protocol.errors import RemoteProtocolError
from tests.fuzz.corpus import Seed, corpus
from tests.fuzz.mutations import below, framed, spoiled_inside
from tests.support.broker import BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.nameserver import NameServerUnderTest

REQUESTS = 3000


def spoiled_requests(seed: int) -> Iterator[bytes]:
    """Requests of all kinds, one in eight as it was recorded, so that there is something to ask."""
    seeds: list[Seed] = [each for each in corpus() if not each.command.is_response]
    rng = Random(seed)
    for _ in range(REQUESTS):
        each, other = (seeds[below(rng, len(seeds))] for _ in range(2))
        if below(rng, 8) == 0:
            yield framed(each.serialize_type, each.header, each.body)
        else:
            yield spoiled_inside(rng, each, other)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_spoiled_requests_find_no_fault_in_the_broker(seed: int, tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("W_TOPIC")
    channel = MemoryChannel()
    answers = 0
    for frame in spoiled_requests(seed):
        try:
            broker.take(frame, channel)
        except RemoteProtocolError:
            continue
        assert not broker.unexpected, frame
        answers += len(channel.replies())
    assert answers > REQUESTS // 3
    broker.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_spoiled_requests_find_no_fault_in_the_nameserver(seed: int) -> None:
    nameserver = NameServerUnderTest()
    answers = 0
    for frame in spoiled_requests(seed):
        try:
            answers += len(nameserver.take(frame))
        except RemoteProtocolError:
            continue
        assert not nameserver.unexpected, frame
    assert answers > REQUESTS // 3


async def test_a_lock_that_nobody_holds_is_given_back_by_nobody(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    body = b'{"consumerGroup":"g","mqSet":[{"topic":"t","brokerName":"b","queueId":0}]}'
    assert broker.ask(42, body=body).code == 0
    assert not broker.unexpected
    broker.close()
