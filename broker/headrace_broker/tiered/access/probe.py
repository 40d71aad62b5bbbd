"""Tries the location of the tier without a broker, for --check-config."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from headrace_protocol.tier.driver import Failure

if TYPE_CHECKING:
    from headrace_protocol.tier.driver import PutDriver

_CONTENT = b"headrace was here and may be deleted\n"


def probe(driver: PutDriver) -> str:
    """Put, read and remove one object; returns what fails, "" if nothing does."""
    path = f"headrace-check-{uuid4().hex}"
    put = driver.put(path, _CONTENT)
    if isinstance(put, Failure):
        return f"can't put an object: {put}"
    problem = _problem_of_reading(driver, path)
    deleted = driver.delete([path])
    if deleted is not None:
        problem = problem or f"can't remove an object, please do: {deleted}"
    return problem


def _problem_of_reading(driver: PutDriver, path: str) -> str:
    wanted = 0, len(_CONTENT)
    read = driver.read(path, [wanted])
    if isinstance(read, Failure):
        return f"can't read an object: {read}"
    return "" if bytes(read[0]) == _CONTENT else f"{path} has other bytes than were written to it"
