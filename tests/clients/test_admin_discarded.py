"""Discarded transactions are listed from a scripted broker, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace import Admin
from headrace.errors import BrokerError
from headrace_protocol.bodies import ConsumeQueueData, QueryConsumeQueueResponseBody
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import TRANSACTION_PREPARED, encode_properties, encode_record
from headrace_protocol.serving import Reply
from headrace_protocol.system_topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC
from tests.support.scripted import Asked, Scripted, scripted_cluster

COUNT = 100
RESUMED = {5, 50, 99}
STRIDE = 1000


def group_of(number: int) -> str:
    return "rare" if number % 20 == 0 else "shop"


def properties(number: int, **more: str) -> dict[str, str]:
    return {"UNIQ_KEY": f"id{number}", "PGROUP": group_of(number), "REAL_TOPIC": "T", **more}


def units(asked: Asked) -> Reply:
    first, count = int(asked.ext["index"]), int(asked.ext["count"])
    body = QueryConsumeQueueResponseBody(
        queue_data=[
            ConsumeQueueData(physic_offset=number * STRIDE, physic_size=STRIDE)
            for number in range(first, min(first + count, COUNT))
        ],
        min_queue_index=0,
        max_queue_index=COUNT,
    )
    return Reply(body=(body.encode(),))


def view(asked: Asked) -> Reply:
    number = int(asked.ext["offset"]) // STRIDE
    record = encode_record(
        topic=CHECK_MAX_TIME_TOPIC,
        queue_id=0,
        body=b"%d" % number,
        queue_offset=number,
        physical_offset=number * STRIDE,
        properties=encode_properties(properties(number)),
    )
    return Reply(body=(record,))


def halves(asked: Asked) -> Reply:
    number = int(asked.ext["key"].removeprefix("id"))
    if number not in RESUMED or int(asked.ext.get("beforeOffset", "1")) == 0:
        return Reply(code=ResponseCode.QUERY_NOT_FOUND)
    record = encode_record(
        topic=HALF_TOPIC,
        queue_id=0,
        body=b"",
        queue_offset=0,
        properties=encode_properties(properties(number)),
        prepared_transaction_offset=number * STRIDE,
        sys_flag=TRANSACTION_PREPARED,
    )
    return Reply(body=(record,))


@pytest.fixture
async def broker() -> AsyncIterator[tuple[Scripted, Admin]]:
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer(RequestCode.QUERY_CONSUME_QUEUE, units)
        broker.answer(RequestCode.VIEW_MESSAGE_BY_ID, view)
        broker.answer(RequestCode.QUERY_MESSAGE, halves)
        async with Admin(nameserver=nameserver.address, connect=network.connect) as admin:
            yield broker, admin


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({}, [*range(COUNT)]),
        ({"group": "rare"}, [0, 20, 40, 60, 80]),
        ({"max_count": 3}, [96, 97, 98]),
        ({"group": "rare", "max_count": 4}, [20, 40, 60, 80]),
    ],
    ids=str,
)
async def test_no_page_cuts_them(
    broker: tuple[Scripted, Admin], arguments: dict[str, Any], numbers: list[int]
) -> None:
    found = await broker[1].discarded_transactions(**arguments)
    assert [int(each.message.body) for each in found] == [
        number for number in numbers if number not in RESUMED
    ]
    assert {each.group for each in found} == {group_of(number) for number in numbers}


async def test_a_broker_without_one_has_none_but_no_other_refusal_means_so(
    broker: tuple[Scripted, Admin],
) -> None:
    scripted, admin = broker
    scripted.answer(
        RequestCode.QUERY_CONSUME_QUEUE, Reply(code=ResponseCode.SYSTEM_ERROR, remark="not exist")
    )
    assert await admin.discarded_transactions() == []
    scripted.answer(
        RequestCode.QUERY_CONSUME_QUEUE, Reply(code=ResponseCode.NO_PERMISSION, remark="no")
    )
    with pytest.raises(BrokerError, match="no"):
        await admin.discarded_transactions()
