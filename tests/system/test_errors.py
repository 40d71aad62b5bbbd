"""Errors of all packages survive pickle and copy, as pools of processes and retries need it."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
import headrace_broker
import headrace_daemon
import headrace_nameserver
import headrace_protocol
from headrace import Message
from headrace.admin.shrink import Unread
from headrace.missing import MissingPart
from headrace_broker.config import BrokerConfig
from headrace_broker.peers.callers import LOOKUPS
from headrace_protocol.bodies import MessageQueue, TopicConfig
from headrace_protocol.drivers.errors import AccessDenied, ConnectFailed
from headrace_protocol.errors import NotReady
from headrace_protocol.serving import ServedElsewhere
from headrace_protocol.statictopic.mapping import MappingItem
from headrace_protocol.tier.driver import Failure, FailureKind

PACKAGES = (headrace, headrace_broker, headrace_daemon, headrace_nameserver, headrace_protocol)
# They carry work for the daemon that raises them, and never leave it.
SIGNALS = (NotReady, ServedElsewhere)

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "old pickle": lambda error: pickle.loads(pickle.dumps(error, 0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


REFUSED = ConnectFailed("localhost:9876", "refused")
QUEUE = MessageQueue(topic="t", broker_name="a", queue_id=1)
# An argument for each type of parameter.
ARGUMENTS: dict[str, object] = {
    "str": "text",
    "str | None": "text",
    "bytes": b"bytes",
    "int": 7,
    "int | None": 7,
    "float": 1.5,
    "object": "reason",
    "Path": Path("/dev/null"),
    "OSError": OSError(28, "No space left on device"),
    "list[str]": ["one", "two"],
    "BrokerConfig": BrokerConfig(),
    "bool": True,
    "Caller": LOOKUPS,
    "AccessDenied": AccessDenied(16, "no permission", "localhost:9876", 10),
    "HeadraceError": REFUSED,
    "Mapping[str, HeadraceError]": {"localhost:9876": REFUSED},
    "Mapping[str, Exception]": {"localhost:9876": REFUSED},
    "Mapping[str, TopicConfig]": {"a": TopicConfig(topic_name="t")},
    "Mapping[str, str]": {"place": "reason"},
    "Failure": Failure(FailureKind.SHORT, "a/path", "it ends too early"),
    "MappingItem": MappingItem(),
    "MessageQueue": QUEUE,
    "Sequence[str]": ["the group's topic"],
    "Sequence[MissingPart]": [MissingPart("b", range(2), "was shut down", 1)],
    "Sequence[tuple[Any, HeadraceError]]": [(Message("t", b"x"), REFUSED)],
    "list[Unread]": [Unread(QUEUE, "g", 3)],
}

NAMED = inspect.Parameter.KEYWORD_ONLY


def error_classes() -> Iterator[type[BaseException]]:
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith("__main__"):
                continue
            module = importlib.import_module(found.name)
            for value in vars(module).values():
                is_error = isinstance(value, type) and issubclass(value, BaseException)
                if is_error and value.__module__ == found.name and not issubclass(value, SIGNALS):
                    yield value


def example(kind: type[BaseException]) -> BaseException:
    """An error of a class, made of an argument for each parameter that has no default."""
    if not inspect.isfunction(kind.__init__):
        return kind("text")
    parameters = inspect.signature(kind).parameters.values()
    required = [each for each in parameters if each.default is each.empty]
    named = {each.name: ARGUMENTS[each.annotation] for each in required if each.kind is NAMED}
    return kind(*(ARGUMENTS[e.annotation] for e in required if e.kind is not NAMED), **named)


def facts(error: BaseException) -> tuple[object, ...]:
    return type(error), str(error), error.args, repr(vars(error)), error.__notes__


@pytest.mark.slow  # imports everything
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_an_error_says_the_same(way: str) -> None:
    changed = []
    for kind in error_classes():
        error = example(kind)
        error.add_note("seen by a test")
        try:
            if facts(COPIES[way](error)) != facts(error):
                changed.append((kind, "differs"))
        except Exception as failure:  # noqa: BLE001 - all classes are listed
            changed.append((kind, repr(failure)))
    assert not changed
