"""The context ``dev``, by which commands and clients find a secure ``headrace dev``."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from headrace.config import NAMESERVER_VARIABLE, Cluster, Settings, config_file
from headrace.embedded import SECURITY
from headrace.errors import ConfigurationError
from headrace_daemon.command import warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.embedded import Embedded

NAME: Final = "dev"


def check_context() -> None:
    """Raise ConfigurationError if ``dev`` is a context that the user has made."""
    found = Settings.load().contexts.get(NAME)
    is_ours = found is None or (
        found.tls is not None and (found.tls.ca_file or "").endswith(f"/{SECURITY}/ca.pem")
    )
    if not is_ours:
        raise ConfigurationError(
            f"{config_file()} has a context {NAME} of another cluster, which --secure would "
            f"replace: add it under another name, then `headrace context remove {NAME}`"
        )


@contextmanager
def context_of(running: Embedded) -> Iterator[None]:
    """Have the context while the daemons run; it is in use unless another one is."""
    from headrace.secured import account, client_tls

    folder = running.data.resolve() / SECURITY
    cluster = Cluster(running.nameserver, client_tls(folder), account(folder))
    settings = Settings.load()
    settings.contexts[NAME] = cluster
    if settings.context is None:
        settings.context = NAME
    settings.save()
    if os.environ.get(NAMESERVER_VARIABLE):
        warn(f"{NAMESERVER_VARIABLE} is set, so commands and clients do not use context {NAME}")
    elif settings.context != NAME:
        warn(f"context {settings.context} is in use: `headrace context use {NAME}` changes that")
    try:
        yield
    finally:
        _forget(cluster)


def _forget(cluster: Cluster) -> None:
    settings = Settings.load()
    if settings.contexts.get(NAME) != cluster:
        return  # that of another one, which began later
    del settings.contexts[NAME]
    if settings.context == NAME:
        settings.context = None
    settings.save()
