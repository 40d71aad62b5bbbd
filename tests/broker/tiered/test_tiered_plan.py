"""TIER_PLAN: where the tier keeps the messages of a queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_broker.tiered.container.flat_queue import FlatQueue
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import RecordColumns
from headrace_protocol.tier.paths import Home
from headrace_protocol.tier_bodies import TierPlan
from headrace_protocol.tier_headers import TierPlanHeader
from tests.broker.tiered.test_tiered_bucket import start as start_with_objects
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.tiered_broker import TOPIC, expire_log, put, start, tier_of, upload


def ask(broker: BrokerUnderTest, first: int, end: int, topic: str = TOPIC) -> Any:
    header = TierPlanHeader(topic=topic, queue_id=0, start_offset=first, end_offset=end)
    return broker.ask(RequestCode.TIER_PLAN, header)


def plan(broker: BrokerUnderTest, first: int, end: int) -> TierPlan:
    answer = ask(broker, first, end)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return TierPlan.decode(answer.body)


STARTS = [start, start_with_objects]


@pytest.mark.parametrize("start_broker", STARTS)
async def test_the_spans_are_where_the_bytes_are(tmp_path: Path, start_broker: Any) -> None:
    broker = start_broker(tmp_path)
    for first in range(0, 24, 8):
        put(broker, first, 8)
        upload(broker)
    put(broker, 24, 2)
    found = plan(broker, 0, 26)
    assert (found.url, found.endpoint, found.next_offset) == ((tmp_path / "tier").as_uri(), "", 26)
    at = 0
    for span in found.units:
        assert span.first == at
        data = (tmp_path / "tier" / span.path).read_bytes()[span.position :]
        for number in range(span.count):
            log_offset = int.from_bytes(data[number * 20 : number * 20 + 8], "big")
            size = int.from_bytes(data[number * 20 + 8 : number * 20 + 12], "big")
            log = next(each for each in found.log if each.base <= log_offset < each.end)
            begin = log.position + log_offset - log.base
            record = (tmp_path / "tier" / log.path).read_bytes()[begin : begin + size]
            (offset,) = RecordColumns.from_records(record).queue_offset
            assert offset == at
            at += 1
    assert at == 24
    inner = plan(broker, 9, 15)
    assert inner.units[0].first <= 9 < 15 <= inner.units[-1].end
    assert len(inner.units) < len(found.units)
    assert plan(broker, 24, 26).units == []


@pytest.mark.parametrize("start_broker", STARTS)
async def test_a_long_range_is_planned_in_pieces(tmp_path: Path, start_broker: Any) -> None:
    broker = start_broker(tmp_path)
    for first in range(0, 40, 8):
        put(broker, first, 8)
        upload(broker)
    queue = tier_of(broker).access.queue(TOPIC, 0)
    assert queue is not None
    at, ends = 0, []
    while at < 40:
        found = queue.spans((at, 40), 2)
        assert found.units[0].first <= at
        at = found.next_offset
        ends.append(at)
    assert len(ends) > 1


async def test_without_a_tier_or_topic(tmp_path: Path) -> None:
    broker = start_with_objects(tmp_path / "none", message_store_plug_in="")
    answer = ask(broker, 0, 1)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "no tiered storage" in (answer.remark or "")
    broker.close()
    broker = start(tmp_path / "posix")
    assert ask(broker, 0, 1, "NoSuchTopic").code == ResponseCode.TOPIC_NOT_EXIST
    assert plan(broker, 0, 10).units == []


async def test_what_has_expired_is_in_no_plan(broker: BrokerUnderTest) -> None:
    put(broker, 0, 60)
    upload(broker)
    await expire_log(broker)
    access = tier_of(broker).state.reader.access
    queue = access.queue(TOPIC, 0)
    assert isinstance(queue, FlatQueue)
    assert queue.drop(1, broker.clock.ms)
    found = plan(broker, 0, 60)
    assert found.units[0].first == queue.min_offset > 0


@pytest.mark.parametrize(
    ("provider", "prefix", "url"),
    [("s3", "/a b/", "s3://b/a%20b"), ("azure", "", "az://b"), ("gcs", "c", "gs://b/c")],
)
def test_a_location_is_named_without_its_secrets(
    tmp_path: Path, provider: str, prefix: str, url: str
) -> None:
    keys = ("key", "secret") if provider != "gcs" else ("", "")
    config = broker_config(
        tmp_path,
        message_store_plug_in="tieredstore",
        tiered_backend_service_provider=provider,
        object_store_bucket="b",
        object_store_prefix=prefix,
        object_store_access_key=keys[0],
        object_store_secret_key=keys[1],
    )
    settings = config.tier_settings(tmp_path, Home("cluster", "broker"))
    assert settings is not None
    assert settings.bucket is not None
    assert settings.bucket.url == url
    assert [value for _, value in settings.bucket.config] == [key for key in keys if key]
    assert "secret" not in repr(settings.bucket)
