"""Reads through Apache's broker, which looks other brokers up some time after they have started."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from headrace.errors import BrokerError

T = TypeVar("T")


async def once_brokers_are_known(read: Callable[[], Awaitable[T]]) -> T:
    """The result of a read that fails as long as other brokers are unknown.

    The caller limits the time.
    """
    while True:
        try:
            return await read()
        except BrokerError as error:
            if "cannot find addr for broker" not in str(error):
                raise
            await trio.sleep(0.5)
