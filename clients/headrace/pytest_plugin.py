"""pytest fixture ``headrace_mq``: a broker for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from headrace.embedded import Embedded
    from headrace.rights import Rule


@pytest.fixture
def headrace_users() -> Mapping[str, Iterable[Rule]] | None:
    """The users of ``headrace_mq`` with their rules; override it to test your rules.

    By default there are none, and everyone may do everything.
    """
    return None


@pytest.fixture
def headrace_mq(headrace_users: Mapping[str, Iterable[Rule]] | None) -> Iterator[Embedded]:
    """A private nameserver and broker for one test, in a thread, on free loopback ports.

    Pass ``headrace_mq.nameserver`` to clients, in blocking code as well as under trio or asyncio.
    Messages are deleted when the test ends.
    """
    from headrace.embedded import embedded

    with embedded(users=headrace_users) as mq:
        yield mq
