"""The subject of a request, as access control has found it."""

from __future__ import annotations

from typing import NamedTuple


class Subject(NamedTuple):
    """The user who makes a request. user: None for anonymous.

    address: the IP, as rules compare it. is_super: whether everything is permitted.
    """

    user: str | None
    address: str
    is_super: bool = False
