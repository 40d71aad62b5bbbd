"""Events that clients may cause without end: those of one second that say the same share a line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

# Lines of a second; further events of a host, or of all hosts, share one line of each kind.
HOST_LINES_MAX: Final = 20
LINES_MAX: Final = 200

# The fields of a line, besides its time.
Fields = dict[str, Any]


class _Key(NamedTuple):
    """what: what the events have in common; empty for the rest of ``host``."""

    event: str
    what: tuple[str, ...]
    host: str = ""


@dataclass(slots=True)
class _Repeated:
    """first: time of the first one, whose fields these are."""

    first: str
    fields: Fields
    count: int = 0


class Repeats:
    """The events of a second, by what they have in common."""

    def __init__(self, now: Callable[[], str]) -> None:
        self._now = now
        self._repeated: dict[_Key, _Repeated] = {}
        self._hosts: Counter[str] = Counter()

    def add(
        self, event: str, host: str, what: tuple[str, ...], describe: Callable[[], Fields]
    ) -> None:
        """Count an event. what: one line for each. describe: called for the first one of these."""
        key = _Key(event, what)
        if key not in self._repeated:
            if self._hosts[host] >= HOST_LINES_MAX:
                key, describe = _others(event, host)
            elif len(self._repeated) >= LINES_MAX:
                key, describe = _others(event)
        repeated = self._repeated.get(key)
        if repeated is None:
            repeated = self._repeated[key] = _Repeated(self._now(), describe())
            self._hosts[host] += 1
        repeated.count += 1

    def take(self) -> list[tuple[str, Fields]]:
        """Each event with its fields and its count; then the next second begins."""
        repeated, self._repeated = self._repeated, {}
        self._hosts.clear()
        return [(key.event, _counted(each)) for key, each in repeated.items()]


def _others(event: str, host: str = "") -> tuple[_Key, Callable[[], Fields]]:
    """The further events of a host, or of all hosts."""
    return _Key(event, (), host), lambda: {"address": host or None, "detail": {"others": True}}


def _counted(repeated: _Repeated) -> Fields:
    counted = {"first": repeated.first, "count": repeated.count}
    return {**repeated.fields, "detail": {**repeated.fields.get("detail", {}), **counted}}
