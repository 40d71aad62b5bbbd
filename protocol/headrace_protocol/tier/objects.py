"""A driver for object stores, over obstore: S3 and its relatives, Google's, Azure's.

The only module that imports obstore, which is an extra: ``pip install obstore``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from headrace_protocol.tier.driver import Entry, Failure, FailureKind, short_read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.tier.driver import Buffer, Range
    from headrace_protocol.tier.location import Location

_CONNECT_TIMEOUT: Final = "2s"
_TIMEOUT_S: Final = 30
_RETRIES: Final = 3
# Ranges closer than this are one request: reading a gap costs less than another round trip.
_GAP_BYTES_MAX: Final = 1 << 20
_DELETE_AT_ONCE: Final = 1000
_REASON_CHARACTERS_MAX: Final = 300
# In the answers of S3 and Azure.
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_MISSING_CODES: Final = {"NoSuchKey", "BlobNotFound"}
_DETAILS: Final = re.compile(r"\s*\n.*", re.DOTALL)


def open_objects(
    location: Location, *, timeout_s: int = _TIMEOUT_S, retries: int = _RETRIES
) -> ObjectDriver:
    """A driver for a bucket; nothing is requested yet. Raises ValueError for a wrong setting.

    timeout_s: of a request, which is retried for twice as long.
    """
    config: Any = location.settings
    client: Any = {
        "allow_http": config.get("endpoint", "").startswith("http://"),
        "timeout": f"{timeout_s}s",
        "connect_timeout": _CONNECT_TIMEOUT,
    }
    retry: Any = {"max_retries": retries, "retry_timeout": timedelta(seconds=2 * timeout_s)}
    secrets = [value for _, value in location.config]
    try:
        store = from_url(location.url, config=config, client_options=client, retry_config=retry)
    except (BaseError, ValueError, TypeError) as error:
        raise ValueError(f"{location.url} can't be addressed: {_reason(error, secrets)}") from None
    return ObjectDriver(store, secrets)


class ObjectDriver:
    """Objects in a bucket.

    secrets: removed from reasons of failures, in which some servers repeat them.
    """

    def __init__(self, store: Any, secrets: Sequence[str] = ()) -> None:
        self._store = store
        self._secrets = secrets

    def read(self, path: str, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """As ``Driver.read``."""
        spans = _spans(ranges)
        try:
            answers = self._store.get_ranges(
                path,
                starts=[start for start, _ in spans],
                ends=[end for _, end in spans],
                coalesce=0,
            )
        except (BaseError, OSError) as error:
            return self._short_or(self._failure(path, error), spans)
        # A range that ends behind the object is cut without an error.
        for span, answer in zip(spans, answers, strict=True):
            if len(answer) != span[1] - span[0]:
                return self._cut(path, span, len(answer))
        return _cut_out(ranges, spans, [memoryview(answer) for answer in answers])

    def _cut(self, path: str, wanted: Range, got_bytes: int) -> Failure:
        """SHORT if the object ends there; else the answer was cut on its way."""
        size = self.size(path)
        if isinstance(size, Failure):
            return size
        if size < wanted[1]:
            return short_read(path, wanted, got_bytes)
        reason = (
            f"an answer had {got_bytes} bytes at {wanted[0]} instead of {wanted[1] - wanted[0]}"
        )
        return Failure(FailureKind.UNREACHABLE, path, reason)

    def _short_or(self, failure: Failure, ranges: Sequence[Range]) -> Failure:
        """SHORT if a range begins behind the object, which stores report in words of their own."""
        if failure.kind is FailureKind.UNREACHABLE:
            size = self.size(failure.path)
            last = max(ranges, key=lambda wanted: wanted[1])
            if isinstance(size, int) and size < last[1]:
                return short_read(failure.path, last, max(size - last[0], 0))
        return failure

    def size(self, path: str) -> int | Failure:
        """As ``Driver.size``."""
        head = self._head(path)
        return head if isinstance(head, Failure) else int(head["size"])

    def _head(self, path: str) -> Any:
        try:
            return self._store.head(path)
        except FileNotFoundError:
            return self._missing(path)
        except (BaseError, OSError) as error:
            return self._failure(path, error)

    def _missing(self, path: str) -> Failure:
        """The failure of a HEAD that found nothing; only the answer to a GET says why."""
        try:
            self._store.get_range(path, start=0, end=1)
        except (BaseError, OSError) as error:
            return self._failure(path, error)
        return Failure(FailureKind.UNREACHABLE, path, "was not there, and is now")

    def entries(self, folder: str) -> list[Entry] | Failure:
        """As ``Driver.entries``."""
        found = []
        try:
            for page in obstore.list(self._store, folder, chunk_size=1000):
                found += [Entry(item["path"], item["size"]) for item in page]
        except (BaseError, OSError) as error:
            return self._failure(folder, error)
        return sorted(found)

    def delete(self, paths: Sequence[str]) -> Failure | None:
        """As ``Driver.delete``."""
        for first in range(0, len(paths), _DELETE_AT_ONCE):
            try:
                self._store.delete(paths[first : first + _DELETE_AT_ONCE])
            except FileNotFoundError:
                continue
            except (BaseError, OSError) as error:
                return self._failure(paths[first], error)
        return None

    def put(self, path: str, data: Buffer, replaces: str = "") -> str | Failure:
        """As ``PutDriver.put``."""
        mode: Any = {"e_tag": replaces} if replaces else "create"
        try:
            # A put in parts is not conditional everywhere.
            answer = self._store.put(path, data, mode=mode, use_multipart=False)
        except (BaseError, OSError, NotImplementedError) as error:
            return self._failure(path, error)
        return str(answer["e_tag"])

    def etag(self, path: str) -> str | Failure:
        """As ``PutDriver.etag``."""
        head = self._head(path)
        return head if isinstance(head, Failure) else str(head["e_tag"])

    def _failure(self, path: str, error: Exception) -> Failure:
        kind = FailureKind.UNREACHABLE
        if isinstance(error, FileNotFoundError):
            code = _CODE.search(str(error))
            # Not found may also be the bucket, or with some servers the access key.
            if code is None or code[1] in _MISSING_CODES:
                kind = FailureKind.MISSING
        elif isinstance(error, AlreadyExistsError):
            kind = FailureKind.EXISTS
        elif isinstance(error, PreconditionError):
            kind = FailureKind.CHANGED
        return Failure(kind, path, _reason(error, self._secrets))


def _spans(ranges: Sequence[Range]) -> list[Range]:
    """The ranges to request: sorted, with those that are close to each other joined.

    obstore joins ranges too, and panics if a joined one begins behind the object.
    """
    spans: list[Range] = []
    for start, end in sorted(ranges):
        if spans and start - spans[-1][1] <= _GAP_BYTES_MAX:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((start, end))
    return spans


def _cut_out(
    ranges: Sequence[Range], spans: list[Range], answers: list[memoryview]
) -> list[Buffer]:
    begins = [start for start, _ in spans]
    found: list[Buffer] = []
    for start, end in ranges:
        number = bisect_right(begins, start) - 1
        found.append(answers[number][start - begins[number] : end - begins[number]])
    return found


def _reason(error: Exception, secrets: Sequence[str]) -> str:
    code = _CODE.search(str(error))
    text = _DETAILS.sub("", str(error)) + (f" {code[1]}" if code else "")
    for secret in secrets:
        text = text.replace(secret, "...")
    return text[:_REASON_CHARACTERS_MAX]
