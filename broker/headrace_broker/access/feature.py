"""Rights as a feature: a guard that judges each request, and the requests of users and rules.

Answers that list, and requests about messages that must be found first, are judged by their
functions: see ``rights.late``. Source: docs/security.md "What is checked".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.feature import Feature
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace_broker.core import Core
    from headrace_protocol.rights.access import Access
    from headrace_protocol.serving import Channel, Registry


def build(core: Core) -> Feature:
    """See ``Feature``. Where nobody is judged there is no guard."""
    users, access, requests, sessions = core.rights
    core.serving.server.is_user = users.users.__contains__
    processors = (requests,) if sessions is None else (requests, sessions)
    if sessions is not None and core.audit is not None:
        sessions.on_outcome = core.audit.authenticated
    if access.is_open:
        return Feature(processors=processors)
    return Feature(guards=(lambda registry: guard(registry, access),), processors=processors)


def guard(registry: Registry, access: Access) -> None:
    """Judge all requests; several sends at a time only where their channel says whose they are."""

    def is_ready(channel: Channel) -> bool:
        try:
            return access.subject(channel) is not None
        except RequestError:  # the user may no longer log in, as each request is answered
            return False

    registry.guard(access.check, is_ready=is_ready)
