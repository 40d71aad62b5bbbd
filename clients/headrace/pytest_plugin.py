"""A broker for tests: the fixture ``headrace_mq``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.embedded import Embedded


@pytest.fixture
def headrace_mq() -> Iterator[Embedded]:
    """A nameserver and a broker of this test's own, in a thread, on free loopback ports.

    ``headrace_mq.nameserver`` is what clients are told, whether the test is blocking code or runs
    under trio or asyncio. Messages are gone at the end.
    """
    from headrace.embedded import embedded

    with embedded() as mq:
        yield mq
