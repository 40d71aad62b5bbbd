"""All followers of a store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import structlog

from headrace_broker.store.followers.follower_work import position_file
from headrace_broker.store.followers.following import (
    SAVE_S,
    FollowedLog,
    FollowedRecord,
    FollowerStatus,
    Following,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from headrace_broker.store.files.mapped_file import MappedFile
    from headrace_broker.store.followers.follower_work import Follower
    from headrace_broker.store.log.commit_log import CommitLog
    from headrace_broker.store.store_queue import StoreQueue

log = structlog.get_logger("headrace.broker")


class Followers:
    """All followers of a store; ``add`` them after it is loaded and before it runs."""

    def __init__(
        self,
        root: Path,
        commit_log: CommitLog,
        topics: Mapping[str, Mapping[int, StoreQueue]],
        dispatched_offset: Callable[[], int],
    ) -> None:
        """dispatched_offset: records before it have their units."""
        self.all: list[Following] = []
        self._root = root
        self._log = FollowedLog(commit_log, topics, dispatched_offset)

    def add(
        self,
        follower: Follower,
        save_s: float = SAVE_S,
        holds_log: Callable[[], bool] = lambda: True,
    ) -> Following:
        """Have a follower resume all queues. Raises StoreFormatError, OSError.

        save_s: time between two calls of its ``sync``. holds_log: whether the log keeps what the
        follower needs.
        """
        positions = position_file(self._root, follower.name, self._log.commit_log.files.fs)
        following = Following(follower, positions, self._log, save_s, holds_log)
        self.all.append(following)
        return following

    def notify(self, queues: Collection[StoreQueue]) -> None:
        """Have all followers scan these queues, which got units."""
        for following in self.all:
            following.notify(queues)

    def hurry(self) -> None:
        """Make all followers save soon."""
        for following in self._holding():
            following.hurry()

    def forget(self, queue: StoreQueue) -> None:
        """Drop a queue that is about to be deleted."""
        for following in self.all:
            following.forget(queue)

    def needed_from(self) -> int:
        """Physical offset from which the log must be kept; very large if no record is needed."""
        return min((following.needed_from() for following in self._holding()), default=sys.maxsize)

    def _holding(self) -> list[Following]:
        return [following for following in self.all if following.holds_log()]

    def oldest(self) -> FollowedRecord | None:
        """The oldest record that followers need; None if all are in the log's last file."""
        oldest = min(
            (following.oldest() for following in self._holding()),
            key=lambda record: record.physical_offset,
            default=None,
        )
        files = self._log.commit_log.files.files
        is_kept = oldest is not None and files and oldest.physical_offset < files[-1].start_offset
        return oldest if is_kept else None

    def finish(self) -> bool:
        """Catch up before a stop; returns whether it is clean as far as followers are part of it.

        Apache's broker takes it for granted after a clean stop that its queues are complete.
        """
        for following in self.all:
            following.finish()
        return all(
            following.needed_from() == sys.maxsize
            for following in self.all
            if following.follower.is_part_of_stop
        )

    def used(self) -> list[tuple[MappedFile, int]]:
        """The files of all followers with the bytes in use, to be sealed at a clean stop."""
        return [used for following in self.all for used in following.follower.used()]

    def close(self) -> None:
        """Have all followers release descriptors and maps."""
        for following in self.all:
            following.follower.close()

    def statistics(self) -> tuple[FollowerStatus, ...]:
        """The state of each follower."""
        return tuple(following.status() for following in self.all)

    def report(self) -> dict[str, dict[str, Any]]:
        """The state of each follower by name, for /ready; from any thread."""
        return {
            status.name: {
                "behindMessages": status.behind_messages,
                "behindBytes": status.behind_bytes,
                **({"problem": status.problem} if status.problem else {}),
                **(
                    {"problemSeconds": round(status.problem_seconds)}
                    if status.problem_seconds
                    else {}
                ),
                **({"behindSeconds": behind} if (behind := round(status.behind_seconds)) else {}),
            }
            for status in self.statistics()
        }

    def runtime_info(self) -> dict[str, str]:
        """The same values for GET_BROKER_RUNTIME_INFO."""
        return {
            f"follower.{name}.{key}": str(value)
            for name, values in self.report().items()
            for key, value in values.items()
        }
