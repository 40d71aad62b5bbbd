"""Rights as a feature: a guard that judges each request, and the requests of users and rules.

Answers that list, and requests about messages that must be found first, are judged by their
functions: see ``rights.late``. Source: docs/security.md "What is checked".
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace_broker.feature import Feature
from headrace_protocol.serving import Registry

if TYPE_CHECKING:
    from headrace_broker.core import Core


def build(core: Core) -> Feature:
    """See ``Feature``. Where nobody is judged there is no guard."""
    users, access, requests, sessions = core.rights
    core.serving.server.is_user = users.users.__contains__
    processors = (requests,) if sessions is None else (requests, sessions)
    if sessions is not None and core.audit is not None:
        sessions.on_outcome = core.audit.authenticated
    if access.is_open:
        return Feature(processors=processors)
    core.clients.long_polling.rights_version = lambda: access.version
    # Sends that arrive together are judged where they are stored.
    guard = partial(Registry.guard, guard=access.check, but_ready=True)
    return Feature(guards=(guard,), processors=processors)
