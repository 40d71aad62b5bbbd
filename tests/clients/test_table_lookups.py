"""Tables without a local copy, against scripted brokers: GET_BY_KEY."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace import Message, Producer, Table
from headrace.errors import InvalidMessage, KeyLookupUnsupported, MalformedAnswer, PartialAnswer
from headrace.producer.selector import queue_index
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import GetByKeyResponseHeader
from headrace_protocol.key_lookup import Found, NoRecord, WantedKey, decode_keys, encode_found
from headrace_protocol.message import DELETE, KEYS, encode_properties, encode_record
from headrace_protocol.serving import Reply
from tests.support.batches import iter_batch
from tests.support.scripted import Asked, Scripted, close, scripted_cluster, stored

GET = RequestCode.GET_BY_KEY


def record(
    key: str, body: bytes, *, time_ms: int = 1, properties: dict[str, str] | None = None
) -> bytes:
    raw = encode_properties({KEYS: key, **(properties or {})})
    return encode_record(topic="T", queue_id=0, body=body, properties=raw, store_timestamp=time_ms)


def wanted(asked: Asked) -> list[WantedKey]:
    return decode_keys(int(asked.ext["count"]), asked.body)


def serving(
    records: dict[str, Found], *, queues: set[int] | None = None, results_max: int = 1000
) -> Callable[[Asked], Reply]:
    """Answers of a broker with these records; in these of its queues only."""

    def answer(asked: Asked) -> Reply:
        found = [
            records.get(key.decode(), NoRecord.NEVER)
            if queue_id < 0 or queues is None or queue_id in queues
            else NoRecord.NEVER
            for key, queue_id, _ in wanted(asked)[:results_max]
        ]
        return Reply(GetByKeyResponseHeader(count=len(found)), encode_found(found))

    return answer


def table(nameserver: Scripted, network: Any, **options: Any) -> Table[bytes]:
    return Table(
        "T", local=False, nameserver=nameserver.address, connect=network.connect, **options
    )


async def test_many_keys_take_one_request_per_broker() -> None:
    keys = [f"k{number}" for number in range(100)]
    async with scripted_cluster(2, queues=2, headrace=True) as (nameserver, brokers, network):
        for broker in brokers:
            broker.answer(GET, serving({key: record(key, key.encode()) for key in keys}))
        async with table(nameserver, network) as remote:
            assert await remote.get_many(keys) == {key: key.encode() for key in keys}
        assert [broker.count(GET) for broker in brokers] == [1, 1]
        for number, broker in enumerate(brokers):
            for key, queue_id, _ in wanted(broker.last(GET)):
                assert divmod(queue_index(key.decode(), 4), 2) == (number, queue_id)


async def test_what_its_queue_lacks_is_looked_up_everywhere() -> None:
    async with scripted_cluster(2, queues=2, headrace=True) as (nameserver, brokers, network):
        old, new = record("k", b"old", time_ms=1), record("k", b"new", time_ms=2)
        brokers[0].answer(GET, serving({"k": old}, queues=set()))
        brokers[1].answer(GET, serving({"k": new}, queues=set()))
        async with table(nameserver, network) as remote:
            assert await remote.get("k") == b"new"
            assert await remote.get("never") is None


async def test_with_one_queue_a_missing_key_takes_one_request() -> None:
    async with scripted_cluster(headrace=True) as (nameserver, (broker,), network):
        broker.answer(GET, serving({}))
        async with table(nameserver, network) as remote:
            assert await remote.get("never") is None
        assert broker.count(GET) == 1


async def test_an_answer_that_covers_only_some_keys_is_continued() -> None:
    keys = [f"k{number}" for number in range(10)]
    async with scripted_cluster(headrace=True) as (nameserver, (broker,), network):
        broker.answer(
            GET, serving({key: record(key, b"x" + key.encode()) for key in keys}, results_max=3)
        )
        async with table(nameserver, network) as remote:
            assert await remote.get_many(keys) == {key: b"x" + key.encode() for key in keys}
        assert broker.count(GET) == 4


async def test_deleted_keys_have_no_value() -> None:
    records: dict[str, Found] = {
        "a": record("a", b""),
        "b": record("b", b"deleted", properties={DELETE: "true"}),
        "c": record("c", b"x"),
    }
    async with scripted_cluster(headrace=True) as (nameserver, (broker,), network):
        broker.answer(GET, serving(records))
        async with table(nameserver, network) as remote:
            assert await remote.get_many("abc") == {"c": b"x"}


async def test_own_writes_must_be_seen(autojump_clock: object) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, (broker,), network):
        broker.answer_sends(stored(17))
        late = serving({"k": NoRecord.NOT_YET})
        broker.answer(GET, late, late, serving({"k": record("k", b"1")}))
        async with table(nameserver, network) as remote:
            await remote.put("k", b"1")
            assert await remote.get("k") == b"1"
        assert wanted(broker.last(GET)) == [WantedKey(b"k", 0, 17)]
        assert broker.count(GET) == 3


@pytest.mark.parametrize(
    "failure", [close, Reply(code=ResponseCode.SYSTEM_BUSY), None], ids=["closed", "busy", "late"]
)
async def test_a_lookup_is_retried(failure: Any, autojump_clock: object) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, (broker,), network):
        broker.answer(GET, failure, serving({"k": record("k", b"1")}))
        async with table(nameserver, network) as remote:
            assert await remote.get("k") == b"1"


async def test_a_lookup_names_the_broker_that_does_not_answer(autojump_clock: object) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, (broker,), network):
        broker.answer(GET, None)
        async with table(nameserver, network, delivery_timeout_ms=5000) as remote:
            with pytest.raises(PartialAnswer, match=r"broker broker-0 .* does not answer: "):
                await remote.get("k")


async def test_apaches_and_older_brokers_are_named(autojump_clock: object) -> None:
    unknown = Reply(code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
    for is_headrace in (False, True):
        async with scripted_cluster(headrace=is_headrace) as (nameserver, (broker,), network):
            broker.answer(GET, unknown)
            async with table(nameserver, network) as remote:
                with pytest.raises(KeyLookupUnsupported, match="local=True") as caught:
                    await remote.get("k")
            assert caught.value.address == broker.address
            assert broker.count(GET) == is_headrace


@pytest.mark.parametrize(
    "answer",
    [
        Reply(GetByKeyResponseHeader(count=2), (bytes(8),)),
        Reply(GetByKeyResponseHeader(count=1), (b"\0\0\0\x07",)),
        Reply(GetByKeyResponseHeader(count=1), (b"\0\0\1\0" + bytes(256),)),
        Reply(),
    ],
    ids=["more than asked", "short", "zeros", "no header"],
)
async def test_a_malformed_answer_is_named(answer: Reply, autojump_clock: object) -> None:
    async with scripted_cluster(headrace=True) as (nameserver, (broker,), network):
        broker.answer(GET, answer)
        async with table(nameserver, network, delivery_timeout_ms=0) as remote:
            with pytest.raises(MalformedAnswer):
                await remote.get("k")


# -- delete markers --------------------------------------------------------------------------------


async def test_a_producer_sends_an_empty_body_with_a_key() -> None:
    async with scripted_cluster(headrace=True) as (nameserver, (broker,), network):
        broker.answer_sends(stored())
        async with Producer(nameserver=nameserver.address, connect=network.connect) as producer:
            await producer.send_many([b"", b"x", b""], topic="T", keys=["a", "b", "c"])
            with pytest.raises(InvalidMessage, match="row 2: a body of 0 bytes"):
                await producer.send_many([b"", b"x", b""], topic="T", keys=["a", "b", ""])
        assert broker.sent == [b"", b"x", b""]


async def test_other_brokers_get_a_property_with_a_body() -> None:
    async with scripted_cluster() as (nameserver, (broker,), network):
        broker.answer_sends(stored())
        async with Producer(nameserver=nameserver.address, connect=network.connect) as producer:
            await producer.send(Message("T", b"", key="a"))
            await producer.send_many([b"", b"x"], topic="T", keys=["a", "b"])
        single, batch = broker.sends
        assert single.body == b"deleted"
        assert "__DELETE__\x01true\x02" in single.ext["i"]
        deletion, other = iter_batch(batch.body)
        assert bytes(deletion[1]) == b"deleted"
        assert bytes(deletion[2]).endswith(b"KEYS\x01a\x02__DELETE__\x01true\x02")
        assert bytes(other[1]) == b"x"
        assert b"__DELETE__" not in bytes(other[2])
