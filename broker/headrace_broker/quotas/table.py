"""The quotas of a broker: config/quotas.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.persistence import SavedFile, load_table
from headrace_protocol.bounds import ITEMS_MAX
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.quotas import QuotaList

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.store.files.config_file import ConfigFile
    from headrace_protocol.quotas import Of, Quota


class QuotaTable:
    """All quotas by whose they are. saved: their file. on_change: called after a change."""

    def __init__(self, file: ConfigFile) -> None:
        """Load the table. Raises StoreFormatError if its file can't be read."""
        loaded = load_table(file, QuotaList.decode)
        self._quotas = {
            (quota.of, quota.name): quota for quota in (loaded.quotas if loaded else ())
        }
        self.saved = SavedFile(file, self._snapshot)
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._quotas)

    def all(self) -> Iterable[Quota]:
        """Every quota."""
        return self._quotas.values()

    def get(self, of: Of, name: str) -> Quota | None:
        """The quota of a user, topic or group, if it has one of its own."""
        return self._quotas.get((of, name))

    def put(self, quota: Quota) -> None:
        """Set a quota; one without limits removes it. Raises RequestError."""
        quota.check()
        key = quota.of, quota.name
        if quota.is_empty:
            if self._quotas.pop(key, None) is None:
                return
        else:
            if len(self._quotas) >= ITEMS_MAX and key not in self._quotas:
                raise RequestError(
                    ResponseCode.INVALID_PARAMETER,
                    f"{ITEMS_MAX} quotas are the most; remove one, or give users a common one "
                    "with the name *",
                )
            self._quotas[key] = quota
        self.on_change()
        self.saved.changed()

    def _snapshot(self) -> Callable[[], bytes]:
        quotas = list(self._quotas.values())
        return lambda: QuotaList(quotas=quotas).encode(strict=True)
