"""pytest fixture ``headrace_mq``: a broker for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.embedded import Embedded


@pytest.fixture
def headrace_mq() -> Iterator[Embedded]:
    """A private nameserver and broker for one test, in a thread, on free loopback ports.

    Pass ``headrace_mq.nameserver`` to clients, in blocking code as well as under trio or asyncio.
    Messages are deleted when the test ends.
    """
    from headrace.embedded import embedded

    with embedded() as mq:
        yield mq
