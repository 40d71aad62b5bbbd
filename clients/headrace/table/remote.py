"""Look up keys at the brokers, for a table without a local copy."""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, KeyLookupUnsupported, NoQueue
from headrace.outages import is_absence
from headrace.producer.selector import queue_index
from headrace.tasks import gather
from headrace.whole import require_whole
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import GetByKeyHeader, GetByKeyResponseHeader
from headrace_protocol.key_lookup import (
    ANSWER_BYTES_MAX,
    NOTHING_SEEN,
    NoRecord,
    WantedKey,
    decode_found,
    encode_keys,
)
from headrace_protocol.message import decode_record, property_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace.instance import ClientInstance
    from headrace.messages import SendResult
    from headrace.missing import MissingPart
    from headrace.route import TopicRoute
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.drivers.aio import AsyncConnection
    from headrace_protocol.message import StoredMessage

_log = logging.getLogger("headrace.table")

# Some milliseconds of work for a broker, and far below the limit on a request's body.
_KEYS_MAX = 1000
_KEY_BYTES_MAX = 1024 * 1024

# The address of a queue whose broker is away.
_NOWHERE = ""

# An older broker, or a topic that is not compacted.
_UNSUPPORTED = (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, ResponseCode.INVALID_PARAMETER)


class NotSeenYet(HeadraceError):
    """A broker has not yet a message that was written before."""

    retryable = True

    def __init__(self, address: str, topic: str) -> None:
        super().__init__(f"the broker at {address} lacks messages of {topic} that were sent before")


class KeyLookup:
    """The newest messages of keys, by GET_BY_KEY. Takes this client's own writes into account."""

    def __init__(
        self,
        instance: ClientInstance,
        topic: str,
        timeout_ms: float,
        *,
        allow_partial: bool = False,
    ) -> None:
        self._instance = instance
        self._topic = topic
        self._timeout_ms = timeout_ms
        self._allow_partial = allow_partial
        self._seen: dict[MessageQueue, int] = {}

    def note_written(self, result: SendResult) -> None:
        """Take a message into account from now on."""
        known = self._seen.get(result.queue, NOTHING_SEEN)
        self._seen[result.queue] = max(known, result.queue_offset)

    async def find(self, keys: Iterable[str]) -> dict[str, StoredMessage]:
        """The newest message of each key that has one.

        Asks for each key in its queue first, and then for the missing ones in all queues: other
        clients may choose queues differently.
        Raises HeadraceError, KeyLookupUnsupported for a broker without GET_BY_KEY, PartialAnswer if
        a key that is not found may be at a broker that is away.
        """
        route = await self._instance.current_route(self._topic)
        wanted: defaultdict[str, list[WantedKey]] = defaultdict(list)
        for key in dict.fromkeys(keys):
            queue = _queue_of(route, key)
            seen = self._seen.get(queue, NOTHING_SEEN)
            address = route.address_of(queue) or _NOWHERE
            wanted[address].append(WantedKey(key.encode(), queue.queue_id, seen))
        away = wanted.pop(_NOWHERE, [])
        found = await self._ask_all(route, wanted)
        missing = [key for some in (*wanted.values(), away) for key, *_ in some if key not in found]
        if missing:
            self._require_whole(route.missing)
        if missing and len(route.read_queues) > 1:
            anywhere = [WantedKey(key) for key in missing]
            found |= await self._ask_all(route, dict.fromkeys(_addresses(route), anywhere))
        return {key.decode(): message for key, message in found.items()}

    def _require_whole(self, missing: Sequence[MissingPart]) -> None:
        require_whole(self._topic, missing, allow_partial=self._allow_partial, warn=_log.warning)

    async def _ask_all(
        self, route: TopicRoute, wanted: dict[str, list[WantedKey]]
    ) -> dict[bytes, StoredMessage]:
        newest: dict[bytes, StoredMessage] = {}
        outcomes = await gather(self._ask, list(wanted.items()))
        for address, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, HeadraceError):
                if not is_absence(outcome):
                    raise outcome
                self._instance.invalidate_route(self._topic)
                self._require_whole([route.silent_part(route.broker_at(address), outcome)])
                continue
            for key, message in outcome.items():
                known = newest.get(key)
                if known is None or known.store_timestamp < message.store_timestamp:
                    newest[key] = message
        return newest

    async def _ask(self, wanted: tuple[str, list[WantedKey]]) -> dict[bytes, StoredMessage]:
        """The messages at one broker."""
        address, keys = wanted
        connection = await self._instance.connection(address)
        if not connection.is_greeted:
            await connection.greeted(self._timeout_ms)
        if not connection.peer_is_headrace:
            raise KeyLookupUnsupported(address, "it is not a headrace broker")
        found: dict[bytes, StoredMessage] = {}
        start = 0
        while start < len(keys):
            some = _request(keys[start:])
            results = await self._ask_once(connection, some)
            self._instance.outages.answered(self._topic, address)
            start += len(results)
            for (key, *_), result in zip(some, results, strict=False):
                if result is NoRecord.NOT_YET:
                    raise NotSeenYet(address, self._topic)
                if not isinstance(result, NoRecord):
                    found[key] = result
        return found

    async def _ask_once(
        self, connection: AsyncConnection, keys: Sequence[WantedKey]
    ) -> list[StoredMessage | NoRecord]:
        header = GetByKeyHeader(topic=self._topic, count=len(keys), max_msg_bytes=ANSWER_BYTES_MAX)
        response = await connection.request(
            RequestCode.GET_BY_KEY, header, encode_keys(keys), timeout_ms=self._timeout_ms
        )
        if response.command.code in _UNSUPPORTED:
            raise KeyLookupUnsupported(connection.address, response.command.remark or "too old")
        count = response.expect().header(GetByKeyResponseHeader).count
        if count > len(keys):
            raise response.malformed(f"{count} results for {len(keys)} keys")
        results = response.read(partial(_results, count))
        for (key, *_), result in zip(keys, results, strict=False):
            if not isinstance(result, NoRecord) and _key_of(result) != key:
                raise response.malformed(f"the message of another key than {key!r}")
        return results


def _results(count: int, body: memoryview) -> list[StoredMessage | NoRecord]:
    return [
        found if isinstance(found, NoRecord) else decode_record(found)
        for found in decode_found(count, body)
    ]


def _key_of(message: StoredMessage) -> bytes:
    return property_value(message.raw_properties, b"KEYS")


def _queue_of(route: TopicRoute, key: str) -> MessageQueue:
    queues = route.write_queues
    if not queues:
        raise NoQueue(route.topic, "look up keys in")
    return queues[queue_index(key, len(queues))]


def _addresses(route: TopicRoute) -> list[str]:
    """The address of each broker of a topic."""
    addresses = (route.address_of(queue) for queue in route.read_queues)
    return list(dict.fromkeys(address for address in addresses if address))


def _request(keys: Sequence[WantedKey]) -> Sequence[WantedKey]:
    """The first keys that fit one request."""
    key_bytes = 0
    for index, (key, *_) in enumerate(keys[:_KEYS_MAX]):
        key_bytes += len(key)
        if index and key_bytes > _KEY_BYTES_MAX:
            return keys[:index]
    return keys[:_KEYS_MAX]
