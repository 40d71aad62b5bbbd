"""Adds lines to the lists of the broker's assembly, as the diff of a feature does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_broker import assembly

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from headrace_broker.parts import Parts


def add_line(monkeypatch: pytest.MonkeyPatch, name: str, *lines: Callable[..., Any]) -> None:
    """Begin the list ``name`` with what ``lines`` return; they get the arguments of the list."""
    listed = getattr(assembly, name)

    def longer(*given: Any) -> tuple[Any, ...]:
        return (*(line(*given) for line in lines), *listed(*given))

    monkeypatch.setattr(assembly, name, longer)


def add_guard(monkeypatch: pytest.MonkeyPatch, line: Callable[[Parts], None]) -> None:
    """Have ``line`` add a guard before all others."""
    add_guards = assembly.add_guards

    def add_more(parts: Parts) -> None:
        line(parts)
        add_guards(parts)

    monkeypatch.setattr(assembly, "add_guards", add_more)
