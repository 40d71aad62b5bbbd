"""Runs what a command asks of brokers and nameservers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.admin.client import Admin

T = TypeVar("T")


def run_admin(ask: Callable[[Admin], Awaitable[T]], nameserver: str | None) -> T:
    """The result of ``ask``, which gets an Admin that is open until it returns."""
    import trio

    from headrace.admin.client import Admin

    async def run() -> T:
        async with Admin(nameserver=nameserver) as admin:
            return await ask(admin)

    return trio.run(run)
