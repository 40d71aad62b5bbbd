"""The properties of sent messages: as producers send them, and as the log holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.message_demands import makes_demand
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.java_hash import tags_code
from headrace_protocol.message import CRC32, INNER_BASE, INNER_NUM, PROPERTIES_BYTES_MAX

if TYPE_CHECKING:
    from headrace_broker.message_demands import QuickCheck
    from headrace_broker.store.write.confirmation import Confirmation
    from headrace_protocol.message_ids import UniqKeyGenerator

_TAGS_KEPT = 10_000
_TAG_CHARS_MAX = 256
TAILS_KEPT = 1000
TAIL_CHARS_MAX = 1024

# Properties that the broker consumes or sets itself, so the producer's are not stored.
_DROPPED = frozenset({"WAIT", "POP_CK", "CLUSTER", "MSG_REGION", "TRACE_ON", CRC32})
_KNOWN = frozenset({"TAGS", "UNIQ_KEY", *_DROPPED})

_OF_INNER = (f"{INNER_NUM}\x01", f"{INNER_BASE}\x01")
_INNER_BYTES_MAX = 64

# Properties to store, ending with "", tags code, UNIQ_KEY, whether they make a demand, and whether
# the answer waits for the disk.
Parsed = tuple[list[str], int, str, bool, bool]


class NotPlainError(Exception):
    """A message that the fast path leaves to the general one."""


class SentProperties:
    """Scans properties, and caches what they have in common."""

    def __init__(
        self, cluster: str, uniq_keys: UniqKeyGenerator, confirmation: Confirmation
    ) -> None:
        self._uniq_keys = uniq_keys
        self._confirmation = confirmation
        self._known = _KNOWN
        self._tags_codes: dict[str, int] = {}
        # Properties after the UNIQ_KEY -> their stored form and tags code.
        self._tails: dict[str, tuple[str, int]] = {}
        # Like the peer, added to every message that is not part of a batch.
        self._added = f"MSG_REGION\x01DefaultRegion\x02TRACE_ON\x01true\x02CLUSTER\x01{cluster}\x02"

    def know(self, demanding: frozenset[str]) -> None:
        """Look for properties that make a demand."""
        self._known = _KNOWN | demanding

    def plain(self, properties: str) -> tuple[bytes, int, str]:
        """Properties to store, tags code and UNIQ_KEY, for the fast path.

        The properties after the UNIQ_KEY rarely differ from message to message, so they are
        scanned once and cached. Only KEYS may precede it, as the peer's clients order them.
        """
        keys, _, rest = properties.partition("UNIQ_KEY\x01")
        uniq_key, _, tail = rest.partition("\x02")
        cached = self._tails.get(tail)
        if cached is None or not _is_plain_start(keys, uniq_key):
            return self._cached(properties, tail)
        stored_tail, code = cached
        return f"{keys}UNIQ_KEY\x01{uniq_key}\x02{stored_tail}".encode(), code, uniq_key

    def passed(self, quick: QuickCheck, properties: str) -> tuple[bytes, int, str]:
        """As ``plain``, of a message whose topic makes a demand."""
        if not quick.passes(properties):
            raise NotPlainError
        return self.plain(properties)

    def _cached(self, properties: str, tail: str) -> tuple[bytes, int, str]:
        try:
            items, code, uniq_key, has_demand, waits = self.parse(properties)
            stored = self.stored(items)
        except RequestError:
            raise NotPlainError from None
        is_plain_key = uniq_key.isalnum() and uniq_key.isascii()
        # The fast path answers all messages of a call together, once confirmed.
        answers_early = not waits and not self._confirmation.is_immediate
        if has_demand or not is_plain_key or answers_early:
            raise NotPlainError
        if "UNIQ_KEY" not in tail and len(tail) <= TAIL_CHARS_MAX:
            self._cache_tail(tail)
        return stored, code, uniq_key

    def _cache_tail(self, tail: str) -> None:
        if len(self._tails) >= TAILS_KEPT:
            self._tails.clear()
        items, code, *_ = self._scan(tail)
        self._tails[tail] = "\x02".join(items) + self._added, code

    def parse(self, properties: str) -> Parsed:
        """The properties of a message, with a UNIQ_KEY added if missing. Raises RequestError.

        They are scanned as text, since the broker ignores most of them.
        """
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise _too_large(len(properties))
        items, code, uniq_key, has_demand, waits = self._scan(properties)
        if not uniq_key:
            uniq_key = self._uniq_keys.next()
            items.insert(0, f"UNIQ_KEY\x01{uniq_key}")
        return items, code, uniq_key, has_demand, waits

    def stored(self, items: list[str]) -> bytes:
        """The properties of a single message as the log holds them. Raises RequestError."""
        stored = ("\x02".join(items) + self._added).encode()
        if len(stored) > PROPERTIES_BYTES_MAX:
            raise _too_large(len(stored))
        return stored

    def stored_inner(self, items: list[str]) -> bytes:
        """As ``stored``, for a batch that becomes one record; what the store adds is left out."""
        own = [item for item in items if not item.startswith(_OF_INNER)]
        stored = self.stored(own)
        if len(stored) > PROPERTIES_BYTES_MAX - _INNER_BYTES_MAX:
            raise _too_large(len(stored) + _INNER_BYTES_MAX)
        return stored

    def _scan(self, properties: str) -> Parsed:
        items = properties.split("\x02")
        uniq_key, code, has_demand, waits = "", 0, False, True
        dropped: list[str] = []
        known = self._known
        for item in items:
            name, _, value = item.partition("\x01")
            if name not in known:
                continue
            if name == "UNIQ_KEY":
                uniq_key = value
            elif name == "TAGS":
                code = self._tags_code(value)
            elif name == "WAIT":
                waits = value != "false"
                dropped.append(item)
            elif name in _DROPPED:
                dropped.append(item)
            else:
                has_demand |= makes_demand(value)
        for item in dropped:
            items.remove(item)
        if items[-1:] != [""]:
            items.append("")
        return items, code, uniq_key, has_demand, waits

    def _tags_code(self, tags: str) -> int:
        code = self._tags_codes.get(tags)
        if code is None:
            if len(self._tags_codes) >= _TAGS_KEPT:
                self._tags_codes.clear()
            code = tags_code(tags)
            if len(tags) <= _TAG_CHARS_MAX:
                self._tags_codes[tags] = code
        return code


def _is_plain_start(keys: str, uniq_key: str) -> bool:
    """True if only KEYS precede the UNIQ_KEY, and a reply can contain the UNIQ_KEY unescaped."""
    return (not keys or (keys.startswith("KEYS\x01") and keys.find("\x02") == len(keys) - 1)) and (
        uniq_key.isalnum() and uniq_key.isascii()
    )


def _too_large(properties_bytes: int) -> RequestError:
    return RequestError(
        ResponseCode.MESSAGE_ILLEGAL,
        f"properties of {properties_bytes} bytes exceed the maximum of {PROPERTIES_BYTES_MAX}: put "
        "large values into the body",
    )
