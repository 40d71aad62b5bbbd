"""A folder of the tier that is away, full, or loses answers for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Final

from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.tier.driver import Failure, FailureKind
from tests.support.faulty_files import FaultRates, FaultyFiles

TROUBLES: Final = ("away", "full", "lossy", "flaky")
_RATE: Final = 0.3


class Weather:
    """The trouble of the folder, "" without one. A seed decides about each operation."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.trouble = ""


class TroubledDriver(PosixDriver):
    """The files of a folder in bad weather.

    away: every operation fails. full: no append has room for all. lossy: operations that take place
    are reported as failed. flaky: writes and syncs fail, and what was not synced may be gone.
    """

    def __init__(self, root: Any, files: FaultyFiles, weather: Weather) -> None:
        super().__init__(root, files)
        self._disk = files
        self._weather = weather

    def read(self, path: str, ranges: Any) -> Any:
        return self._before(path) or super().read(path, ranges)

    def entries(self, folder: str) -> Any:
        return self._before(folder) or super().entries(folder)

    def append(self, path: str, position: int, data: Any) -> Any:
        failure = self._before(path)
        if failure is not None:
            return failure
        if self._weather.trouble == "full":
            room = self._weather.rng.randrange(len(data))
            done = super().append(path, position, bytes(data[:room]))
            return done or self._failure(path, "no space left")
        with self._flaky():
            return self._after(path, super().append(path, position, data))

    def cut(self, path: str, size: int) -> Any:
        failure = self._before(path)
        if failure is not None:
            return failure
        with self._flaky():
            return self._after(path, super().cut(path, size))

    def rewrite(self, path: str, start: int) -> Any:
        failure = self._before(path)
        if failure is not None:
            return failure
        with self._flaky():
            return self._after(path, super().rewrite(path, start))

    def delete(self, paths: Any) -> Any:
        if not paths:
            return None
        return self._before(paths[0]) or self._after(paths[0], super().delete(paths))

    def _before(self, path: str) -> Failure | None:
        return self._failure(path, "away") if self._weather.trouble == "away" else None

    def _after(self, path: str, done: Any) -> Any:
        is_lost = self._weather.trouble == "lossy" and self._weather.rng.random() < _RATE
        return self._failure(path, "no answer") if is_lost else done

    @contextmanager
    def _flaky(self) -> Iterator[None]:
        rates = self._disk.rates
        if self._weather.trouble == "flaky":
            self._disk.rates = FaultRates(write=_RATE, sync=_RATE)
        try:
            yield
        finally:
            self._disk.rates = rates

    def _failure(self, path: str, reason: str) -> Failure:
        return Failure(FailureKind.UNREACHABLE, path, reason)
