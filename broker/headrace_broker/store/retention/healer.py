"""Makes a store accept messages again as soon as the disk has room."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.life import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.store.log.commit_log import CommitLog

log = structlog.get_logger("headrace.broker")

HEAL_S: Final = 0.1
# Room that comes and goes must not fill the broker's log.
LOG_EVERY_S: Final = 30.0


class Healer:
    """Looks at the disk each ``HEAL_S`` while messages are refused.

    drain: hands the takers all rows that they lacked the room for. ask_clean_up: asks for a round
    of the clean-up soon.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        drain: Callable[[], None],
        ask_clean_up: Callable[[], None],
        *,
        use_threads: bool,
    ) -> None:
        self._commit_log = commit_log
        self._drain = drain
        self._ask_clean_up = ask_clean_up
        self._use_threads = use_threads
        self._logged_at = -math.inf
        self._is_logged = False

    async def run(self) -> None:
        """Heal until cancelled."""
        while True:
            await trio.sleep(HEAL_S)
            state = self._commit_log.life.state
            self._report(state)
            if state is State.REFUSING:
                self._ask_clean_up()
                await self.heal()
            elif state is State.FAILED:
                with suppress(StoreNotWritable):
                    self._drain()

    def _report(self, state: State) -> None:
        if state is State.OPEN and self._is_logged:
            self._is_logged = False
            log.info("accepting writes")
        is_due = trio.current_time() >= self._logged_at + LOG_EVERY_S
        if state is State.REFUSING and not self._is_logged and is_due:
            self._logged_at, self._is_logged = trio.current_time(), True
            log.error("refusing writes", reason=str(self._commit_log.life.refusal))

    async def heal(self) -> None:
        """Accept messages if there is room for log and takers; otherwise refresh the reason."""
        commit_log = self._commit_log
        refusal_count = commit_log.life.refusal_count
        try:
            if self._use_threads:
                await trio.to_thread.run_sync(self._make_room)
            else:
                self._make_room()
        except OSError as error:
            commit_log.refuse_for(error)
        with suppress(StoreNotWritable):
            self._drain()
            if commit_log.life.refusal_count == refusal_count:
                commit_log.look_again(is_healed=True)

    def _make_room(self) -> None:
        """Free the file that was made ahead of its use, then allocate what found no room."""
        self._commit_log.files.drop_prepared()
        self._commit_log.room.retry()
