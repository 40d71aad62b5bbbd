"""An object store as S3 is, in memory, and the way to it from a broker, in any weather."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from threading import Lock
from typing import Any, Final

from headrace_protocol.tier.driver import Buffer, Entry, Failure, FailureKind, Range, short_read
from tests.support.stores import SetClock

TROUBLES: Final = ("away", "busy", "cutting", "lossy", "refusing", "repeating", "slow")
_RATE: Final = 0.3
_LATENCY_MS: Final = 30
_SLOW_MS: Final = 30_000


class SimulatedStore:
    """Objects that are put whole; an etag follows from the bytes alone.

    late: puts without an answer, on their way. after_change: called after each change.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.late: list[Callable[[], object]] = []
        self.after_change: Callable[[], None] = lambda: None
        self._lock = Lock()

    def read(self, path: str, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """As ``Driver.read``."""
        data = self.objects.get(path)
        if data is None:
            return _missing(path)
        found: list[Buffer] = []
        for start, end in ranges:
            found.append(data[start:end])
            if len(found[-1]) < end - start:
                return short_read(path, (start, end), len(found[-1]))
        return found

    def size(self, path: str) -> int | Failure:
        """As ``Driver.size``."""
        data = self.objects.get(path)
        return _missing(path) if data is None else len(data)

    def entries(self, folder: str) -> list[Entry] | Failure:
        """As ``Driver.entries``."""
        items = sorted(self.objects.items())
        return [Entry(path, len(data)) for path, data in items if path.startswith(f"{folder}/")]

    def delete(self, paths: Sequence[str]) -> Failure | None:
        """As ``Driver.delete``."""
        for path in paths:
            self.objects.pop(path, None)
        self.after_change()
        return None

    def put(self, path: str, data: Buffer, replaces: str = "") -> str | Failure:
        """As ``PutDriver.put``."""
        with self._lock:
            old = self.objects.get(path)
            if ("" if old is None else _etag(old)) != replaces:
                kind = FailureKind.CHANGED if replaces else FailureKind.EXISTS
                return Failure(kind, path, "412 Precondition Failed")
            new = self.objects[path] = bytes(data)
        self.after_change()
        return _etag(new)

    def etag(self, path: str) -> str | Failure:
        """As ``PutDriver.etag``."""
        data = self.objects.get(path)
        return _missing(path) if data is None else _etag(data)

    def land(self, *, are_lost: bool = False) -> None:
        """Have the puts arrive that are on their way."""
        late, self.late = self.late, []
        for put in () if are_lost else late:
            put()


class StoreWeather:
    """The trouble on the way to the store, "" without one. A seed decides about each request.

    away: every request fails. busy: 500 or 503. cutting: ranges end early. lossy: answers of what
    took place are lost, and puts without one may arrive later. refusing: 412 without a reason.
    repeating: the client repeats puts whose answer it did not get. slow: up to half a minute.
    """

    def __init__(self, rng: Random, clock: SetClock) -> None:
        self.rng = rng
        self.trouble = ""
        self._clock = clock

    def happens(self, trouble: str) -> bool:
        """True if a trouble meets this request."""
        return self.trouble == trouble and self.rng.random() < _RATE

    def pass_time(self) -> None:
        """The seconds that a request takes."""
        self._clock.ms += self.rng.randrange(_SLOW_MS if self.trouble == "slow" else _LATENCY_MS)


class StoreClient:
    """The store as one broker reaches it."""

    def __init__(
        self, store: SimulatedStore, weather: StoreWeather, on_request: Callable[[], None]
    ) -> None:
        """on_request: called before and after what each request does; may end the broker."""
        self._store = store
        self._weather = weather
        self._on_request = on_request

    def read(self, path: str, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """As ``Driver.read``."""
        if ranges and self._weather.happens("cutting"):
            return _failed(path, "an answer was cut")
        return self._ask(path, lambda: self._store.read(path, ranges))

    def size(self, path: str) -> int | Failure:
        """As ``Driver.size``."""
        return self._ask(path, lambda: self._store.size(path))

    def entries(self, folder: str) -> list[Entry] | Failure:
        """As ``Driver.entries``."""
        return self._ask(folder, lambda: self._store.entries(folder))

    def delete(self, paths: Sequence[str]) -> Failure | None:
        """As ``Driver.delete``; a few of the objects may be gone when a request fails."""
        if paths and self._weather.happens("busy"):
            self._store.delete(paths[: self._weather.rng.randrange(len(paths))])
            return _failed(paths[0], "503 Slow Down")
        return self._ask(paths[0], lambda: self._store.delete(paths)) if paths else None

    def put(self, path: str, data: Buffer, replaces: str = "") -> str | Failure:
        """As ``PutDriver.put``."""
        weather, put = self._weather, partial(self._store.put, path, bytes(data), replaces)
        if weather.happens("refusing"):
            kind = FailureKind.CHANGED if replaces else FailureKind.EXISTS
            return Failure(kind, path, "412 Precondition Failed")
        if weather.happens("lossy"):
            self._on_request()
            self._store.late.append(put)
            return _failed(path, "operation timed out")
        done = self._ask(path, put)
        return put() if weather.happens("repeating") else done

    def etag(self, path: str) -> str | Failure:
        """As ``PutDriver.etag``."""
        return self._ask(path, lambda: self._store.etag(path))

    def _ask(self, path: str, request: Callable[[], Any]) -> Any:
        weather = self._weather
        self._on_request()
        weather.pass_time()
        if weather.trouble == "away":
            return _failed(path, "connection refused")
        if weather.happens("busy"):
            return _failed(path, "503 Slow Down")
        if self._store.late and weather.rng.random() < _RATE:
            self._store.land(are_lost=weather.rng.random() < _RATE)
        answer = request()
        self._on_request()
        return _failed(path, "connection reset by peer") if weather.happens("lossy") else answer


def _etag(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _missing(path: str) -> Failure:
    return Failure(FailureKind.MISSING, path, "404 Not Found")


def _failed(path: str, reason: str) -> Failure:
    return Failure(FailureKind.UNREACHABLE, path, reason)
