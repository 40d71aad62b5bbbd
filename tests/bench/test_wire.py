from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import headrace
from tests.bench.wire import (
    SUBSCRIPTION,
    Client,
    Refused,
    Rotation,
    max_offset_frame,
    pull_frame,
    send_frame,
    topic_frame,
)


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    with headrace.embedded() as mq:
        yield mq.broker


def test_requests_go_out_32_at_a_time_over_all_connections(broker: str) -> None:
    with Client(broker) as one, Client(broker) as other:
        frames = itertools.cycle(send_frame("ROTATION", number, b"body") for number in range(8))
        assert Rotation([one, other], frames).run(count=33) == 64
        one.call(max_offset_frame("ROTATION", 0))
        # 8 queues have 8 messages each, so a pull behind them moves.
        one.call(pull_frame("readers", "ROTATION", 7, 7, SUBSCRIPTION))
        with pytest.raises(Refused, match="code 19"):
            one.call(pull_frame("readers", "ROTATION", 7, 8, SUBSCRIPTION))


def test_a_refusal_leaves_the_connection_usable(broker: str) -> None:
    with Client(broker) as client:
        with pytest.raises(Refused, match="no such name!"):
            client.call(topic_frame("no such name!", 1))
        client.call(topic_frame("GOOD", 1))
