"""The users that made topics and groups, across restarts: config/owners.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace_broker.host_budget import Makers
from headrace_broker.persistence import SavedFile, load_table
from headrace_protocol.bodies import Body

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from headrace_broker.host_budget import Made
    from headrace_broker.store.files.config_file import ConfigFile
    from headrace_protocol.channel import Channel


class _Saved(Body, kw_only=True):
    """The file: owners by name."""

    topics: dict[str, str] = msgspec.field(default_factory=dict)
    groups: dict[str, str] = msgspec.field(default_factory=dict)


class Owners(Makers):
    """The makers of topics and groups.

    Users own what they make. Clients without a user own it by their addresses, from the first
    quota on.
    client: returns the client whose request is being served, None outside of requests.
    check_owned: raises RequestError if an owner would have too many; None while there are no
    quotas.
    staged_bytes: bytes that are staged for a query.
    saved: the file; there is none until somebody owns something.
    """

    def __init__(
        self,
        file: ConfigFile,
        client: Callable[[], Channel | None],
        staged_bytes: Callable[[str], int],
    ) -> None:
        """Load the owners. Raises StoreFormatError if their file can't be read."""
        loaded = load_table(file, _Saved.decode) or _Saved()
        self._client, self.staged_bytes = client, staged_bytes
        self.check_owned: Callable[[str, Made, int], None] | None = None
        self._owners: dict[Made, dict[str, str]] = {
            "topics": loaded.topics,
            "groups": loaded.groups,
        }
        self._names: dict[tuple[str, Made], set[str]] = {}
        for kind, owners in self._owners.items():
            for name, owner in owners.items():
                self._names.setdefault((owner, kind), set()).add(name)
        self.saved = SavedFile(file, self._snapshot)

    def count(self, owner: str, kind: Made) -> int:
        """Number of existing topics or groups that an owner has made."""
        return len(self._names.get((owner, kind), ()))

    def keep(self, kind: Made, names: Collection[str]) -> None:
        """Forget names that no longer exist, which a crash may have left."""
        for name in self._owners[kind].keys() - set(names):
            self.gone(kind, name)

    def check(self, kind: Made, count: int) -> None:
        """See Makers."""
        owner = self._owner()
        if owner is not None and self.check_owned is not None:
            self.check_owned(owner, kind, count)

    def made(self, kind: Made, names: Collection[str]) -> None:
        """See Makers."""
        owner = self._owner()
        if owner is None:
            return
        self._owners[kind].update(dict.fromkeys(names, owner))
        self._names.setdefault((owner, kind), set()).update(names)
        self.saved.changed()

    def gone(self, kind: Made, name: str) -> None:
        """See Makers."""
        owner = self._owners[kind].pop(name, None)
        if owner is None:
            return
        names = self._names[owner, kind]
        names.discard(name)
        if not names:
            del self._names[owner, kind]
        self.saved.changed()

    def _owner(self) -> str | None:
        """The owner of whatever the current request makes."""
        client = self._client()
        if client is None:
            return None
        user = client.user or client.signer
        return client.ip if user is None and self.check_owned is not None else user

    def _snapshot(self) -> Callable[[], bytes]:
        owners = _Saved(topics=dict(self._owners["topics"]), groups=dict(self._owners["groups"]))
        return lambda: owners.encode(strict=True)
