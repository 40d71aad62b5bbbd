"""A daemon's users: the accounts of a file, and those in force."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_daemon import saved_table
from headrace_daemon.access.users_file import Account
from headrace_protocol.rights.users import Users

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_daemon.access.users_file import UsersFile

# A user's new account, and what a change makes of all accounts.
Edit = saved_table.Edit[str, Account]
Change = saved_table.Change[str, Account]


class Accounts(saved_table.SavedTable[str, Account]):
    """The accounts of a file, by name. users: those in force."""

    def __init__(self, file: UsersFile, accounts: dict[str, Account]) -> None:
        """accounts: as loaded from the file."""
        self.users = Users()
        self._file = file
        super().__init__(file.path, accounts)

    def _write(self, entries: Mapping[str, Account]) -> None:
        self._file.save(entries)

    def _put(self, key: str, value: Account | None) -> None:
        if value is None:
            self.users.remove(key)
        else:
            self.users.put(value.user)
            self.users.put_rules(key, value.rules)
