"""Fixtures that tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

import headrace
from headrace.embedded import Embedded
from tests.support.cli import succeed

_numbers = count()


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    with headrace.embedded() as mq:
        yield mq


@pytest.fixture
def environment(mq: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find the embedded broker."""
    monkeypatch.setenv("HEADRACE_NAMESERVER", mq.nameserver)


@pytest.fixture
def topic(environment: None) -> str:
    """A topic of the test's own, with one queue."""
    name = f"topic_{next(_numbers)}"
    succeed("topic", "create", name, "--queues", "1")
    return name
