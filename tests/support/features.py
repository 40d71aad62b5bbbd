"""Adds features to the broker's assembly, and finds the parts of those that a broker has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

import pytest

from headrace_broker import assembly
from headrace_broker.core import Core
from headrace_broker.feature import Feature
from headrace_daemon.services import Service

_T = TypeVar("_T")


def add_feature(monkeypatch: pytest.MonkeyPatch, *builds: Callable[[Core], Feature]) -> None:
    """Begin ``FEATURES`` with these, as a feature adds its line."""
    monkeypatch.setattr(assembly, "FEATURES", (*builds, *assembly.FEATURES))


def add_parts(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """Add a feature with these parts, which need nothing of the core."""
    add_feature(monkeypatch, lambda _core: Feature(**parts))


def part(core: Core, kind: type[_T]) -> _T:
    """The object of a type of which a feature's record has a method, or which is in it itself."""
    found = {id(each): each for entries in core.added for each in _owners(entries, kind)}
    assert found, f"no feature lists a {kind.__name__}"
    (only,) = found.values()
    return only


def services_of(listed: tuple[Service, ...], *kinds: type) -> list[Service]:
    """The services that run methods of objects of these types."""
    return [each for each in listed if isinstance(getattr(each.run, "__self__", None), kinds)]


def _owners(entry: Any, kind: type[_T]) -> Iterator[_T]:
    if isinstance(entry, kind):
        yield entry
    elif isinstance(entry, tuple):
        for each in entry:
            yield from _owners(each, kind)
    elif is_dataclass(entry):
        for field in fields(entry):
            yield from _owners(getattr(entry, field.name), kind)
    elif isinstance(entry, partial):
        yield from _owners((entry.func, *entry.args), kind)
    elif callable(entry) and isinstance(owner := getattr(entry, "__self__", None), kind):
        yield owner
