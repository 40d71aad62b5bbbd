"""The quotas of a daemon: quotas.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_daemon.access.errors import AccessError
from headrace_daemon.saved_table import Edit, SavedTable
from headrace_protocol.bounds import ITEMS_MAX
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError, reason_of
from headrace_protocol.quotas import LIMITS, Of, Quota, QuotaList

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace_daemon.saved_table import TableFile

_Key = tuple[Of, str]
# The name of their file.
FILE: Final = "quotas.json"


class QuotaTable(SavedTable[_Key, Quota]):
    """All quotas, by user, topic or group. on_change: called after a change."""

    def __init__(
        self, file: TableFile | None, limits: Mapping[Of, tuple[str, ...]] | None = None
    ) -> None:
        """Load the table. limits: those that this daemon can apply, if not all.

        Raises AccessError if the file can't be read, and what its ``read`` raises for that.
        """
        self._file = file
        self._limits = LIMITS if limits is None else limits
        self._quotas: dict[_Key, Quota] = {}
        self.on_change: Callable[[], None] = lambda: None
        loaded = [] if file is None else _read(file)
        super().__init__(
            None if file is None else file.path,
            {(quota.of, quota.name): quota for quota in loaded},
        )

    def __len__(self) -> int:
        return len(self._quotas)

    def all(self) -> Iterable[Quota]:
        """Every quota."""
        return self._quotas.values()

    def get(self, of: Of, name: str) -> Quota | None:
        """The quota of a user, topic or group, if it has one of its own."""
        return self._quotas.get((of, name))

    async def put(self, quota: Quota) -> None:
        """Set a quota; one without limits removes it. Raises RequestError."""
        quota.check()
        for limit in quota.limits:
            if limit not in self._limits.get(quota.of, ()):
                raise RequestError(
                    ResponseCode.INVALID_PARAMETER,
                    f"the quota of {quota.of} {quota.name}: {limit} is a limit of brokers only",
                )
        key = quota.of, quota.name

        def change(quotas: Mapping[_Key, Quota]) -> Edit[_Key, Quota] | None:
            if not quota.limits:
                return Edit(key, None) if key in quotas else None
            if len(quotas) >= ITEMS_MAX and key not in quotas:
                raise RequestError(
                    ResponseCode.INVALID_PARAMETER,
                    f"{ITEMS_MAX} quotas are the most; remove one, or give users a common one "
                    "with the name *",
                )
            return Edit(key, quota)

        await self.change(change)

    def _write(self, entries: Mapping[_Key, Quota]) -> None:
        assert self._file is not None
        self._file.save(QuotaList(quotas=list(entries.values())).encode(strict=True))

    def _put(self, key: _Key, value: Quota | None) -> None:
        if value is None:
            del self._quotas[key]
        else:
            self._quotas[key] = value
        self.on_change()


def _read(file: TableFile) -> list[Quota]:
    try:
        return file.read(_parsed) or []
    except (OSError, ValueError) as error:
        raise AccessError(
            f"{file.path}: cannot read the quotas: {reason_of(error)}; repair it or move it away"
        ) from None


def _parsed(data: bytes) -> list[Quota]:
    """The quotas of a file. Raises ValueError, also for those that SET_QUOTA would reject."""
    quotas = QuotaList.decode(data).quotas
    try:
        for quota in quotas:
            quota.check()
    except RequestError as error:
        raise ValueError(error.remark) from None
    return quotas
