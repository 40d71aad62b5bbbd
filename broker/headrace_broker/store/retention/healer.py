"""Makes a store accept messages again as soon as the disk has room."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_broker.store.errors import StoreNotWritable
from headrace_broker.store.life import State
from headrace_protocol.outages import Outages

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.store.log.commit_log import CommitLog

log = structlog.get_logger("headrace.broker")

HEAL_S: Final = 0.1
# The longest pause where the usage does not tell when there is room, as with a quota.
HEAL_S_MAX: Final = 5.0
_ROOM: Final = "room for messages"


class Healer:
    """Tries each ``HEAL_S`` while messages are refused, or ever less often if that has failed.

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
        self._outages = Outages(log.error, trio.current_time, log.warning)

    async def run(self) -> None:
        """Heal until cancelled."""
        life, pause_s = self._commit_log.life, HEAL_S
        while True:
            await trio.sleep(pause_s)
            self._report(life.state)
            if life.state is State.REFUSING:
                self._ask_clean_up()
                await self.heal()
            elif life.state is State.FAILED:
                with suppress(StoreNotWritable):
                    self._drain()
            is_blind = life.state is State.REFUSING and not self._commit_log.is_full
            pause_s = min(2 * pause_s, HEAL_S_MAX) if is_blind else HEAL_S

    def _report(self, state: State) -> None:
        if state is State.OPEN:
            self._outages.worked(_ROOM)
        elif state is State.REFUSING:
            self._outages.failed(_ROOM, self._commit_log.life.refusal)

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
            commit_log.refuse_for(error, commit_log.files.directory)
        with suppress(StoreNotWritable):
            self._drain()
            if commit_log.life.refusal_count == refusal_count:
                commit_log.look_again(is_healed=True)

    def _make_room(self) -> None:
        """Free the file that was made ahead of its use, then allocate what found no room."""
        self._commit_log.files.drop_prepared()
        self._commit_log.room.retry()
