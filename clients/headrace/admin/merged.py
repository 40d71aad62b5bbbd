"""What several daemons should have alike: users and rules, and the daemons that lack some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from headrace_daemon.command import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Held(NamedTuple):
    """An item of some daemons. holders: those that have it; None if all have it."""

    item: Any
    holders: list[str] | None


def merged(found: Mapping[str, set[Any]]) -> list[Held]:
    """All items, sorted. found: the items of each daemon."""
    holders = {
        item: [keeper for keeper, held in found.items() if item in held]
        for items in found.values()
        for item in items
    }
    return [
        Held(item, None if len(names) == len(found) else names)
        for item, names in sorted(holders.items())
    ]


def with_holders(
    held: Sequence[Held], row: Callable[[Any], dict[str, object]]
) -> list[dict[str, object]]:
    """A row for each item; with a last column ``only at`` if some daemons lack something."""
    if all(each.holders is None for each in held):
        return [row(each.item) for each in held]
    return [{**row(each.item), "only_at": each.holders} for each in held]


def print_skipped(daemons: Sequence[str]) -> None:
    """Warn about daemons that keep no users."""
    for each in daemons:
        warn(f"skipped: {each} keeps no users, and checks none")
