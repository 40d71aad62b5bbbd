"""A daemon's users: changed on disk first, then in force.

Changes wait in a row. A thread makes all that wait, writes the file once, and the loop then puts
them in force in the same order, before any of their requests is answered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from headrace_daemon.access.users_file import Account
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import Lane, RequestError
from headrace_protocol.rights.users import Users
from headrace_protocol.waiting import fetch

if TYPE_CHECKING:
    from headrace_daemon.access.users_file import UsersFile

# One thread is enough: a save writes all changes that wait.
_SAVES = Lane("users", threads=1, outlives_client=True)


class Edit(NamedTuple):
    """A user's new account; None removes the user."""

    name: str
    account: Account | None


# What a change makes of all accounts; None if it changes nothing. Raises RequestError.
Change = Callable[[Mapping[str, Account]], Edit | None]


class _Pending(NamedTuple):
    change: Change
    done: Future[None]


class Accounts:
    """The accounts of a file, and those in force, ``users``."""

    def __init__(self, file: UsersFile, accounts: dict[str, Account]) -> None:
        """accounts: as loaded from the file."""
        self.users = Users()
        self._file = file
        self._saved = accounts
        self._pending: deque[_Pending] = deque()
        self._edits: deque[Edit] = deque()
        self._saving = threading.Lock()
        self._edits.extend(Edit(name, account) for name, account in accounts.items())
        self._put_in_force()

    async def change(self, change: Change) -> None:
        """Make a change; it is on disk and in force when this returns. Raises RequestError."""
        pending = _Pending(change, Future())
        self._pending.append(pending)
        await fetch(self._save, _SAVES)
        self._put_in_force()
        pending.done.result()

    def change_now(self, change: Change) -> None:
        """As ``change``, in this thread. Raises RequestError."""
        pending = _Pending(change, Future())
        self._pending.append(pending)
        self._save()
        self._put_in_force()
        pending.done.result()

    def _save(self) -> None:
        """Make all changes that wait, in any thread."""
        with self._saving:
            waiting = [self._pending.popleft() for _ in range(len(self._pending))]
            accounts = dict(self._saved)
            edits, accepted = _make(waiting, accounts)
            problem = self._write(accounts) if edits else None
            if problem is None:
                self._saved = accounts
                self._edits += edits
        for done in accepted:
            if problem is None:
                done.set_result(None)
            else:
                done.set_exception(problem)

    def _write(self, accounts: Mapping[str, Account]) -> Exception | None:
        try:
            self._file.save(accounts)
        except OSError as error:
            reason = error.strerror or error
            return RequestError(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                f"the change is not in force, since {self._file.path} can't be written: {reason}",
            )
        except Exception as error:  # noqa: BLE001 - raised where the request is served
            return error
        return None

    def _put_in_force(self) -> None:
        """In the thread of the loop."""
        while self._edits:
            name, account = self._edits.popleft()
            if account is None:
                self.users.remove(name)
            else:
                self.users.put(account.user)
                self.users.put_rules(name, account.rules)


def _make(
    waiting: list[_Pending], accounts: dict[str, Account]
) -> tuple[list[Edit], list[Future[None]]]:
    """Make changes of ``accounts``; returns the edits, and the futures of what was accepted."""
    edits: list[Edit] = []
    accepted: list[Future[None]] = []
    for change, done in waiting:
        try:
            edit = change(accounts)
        except Exception as error:  # noqa: BLE001 - raised where the request is served
            done.set_exception(error)
            continue
        accepted.append(done)
        if edit is None:
            continue
        edits.append(edit)
        if edit.account is None:
            accounts.pop(edit.name, None)
        else:
            accounts[edit.name] = edit.account
    return edits, accepted
