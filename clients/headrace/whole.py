"""The rule that no answer about a topic is silently a part.

A reader that would miss the messages of a broker that is away fails with ``PartialAnswer``, which
names broker, queues and time. Only a caller that asks for the part gets it, with a warning. Each
reader uses ``require_whole``; what is missing is in ``TopicRoute.missing``.
Source: docs/concepts.md "A part or the whole"; tests/clients/test_whole.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import PartialAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.missing import MissingPart


def require_whole(
    topic: str,
    missing: Sequence[MissingPart],
    *,
    allow_partial: bool = False,
    warn: Callable[[str], object] | None = None,
) -> None:
    """Raise PartialAnswer if something is missing, unless a part is what the caller wants.

    warn: called with what is missing then; needed with ``allow_partial``.
    """
    if not missing:
        return
    error = PartialAnswer(topic, missing)
    if not allow_partial:
        raise error
    assert warn is not None
    warn(f"this is only a part of topic {topic}: {error.parts_text}")
