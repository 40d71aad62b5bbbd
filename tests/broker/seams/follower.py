"""A follower that copies one topic to files of its own."""

from __future__ import annotations

import threading

from headrace_broker.core import Core
from headrace_broker.store.queues.queue_blocks import QueueBlock
from tests.support.followers import CopyingFollower


class Copy(CopyingFollower):
    """has_copied: set once ``copied`` has something new."""

    def __init__(self, core: Core, topic: str) -> None:
        folder = core.config.store_path_root_dir / "copies"
        super().__init__(folder, core.store.fs, (topic,))
        self.has_copied = threading.Event()

    def follow(self, block: QueueBlock) -> None:
        super().follow(block)
        self.has_copied.set()
