"""Stores to be damaged: filled by the real store, with enough of everything to go wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.message_store import MessageStore
from headrace_protocol.message import TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from tests.support.stores import SetClock, open_store, put, read_all

TOPICS_TEXT = b'{"topicConfigTable":{"A":{"topicName":"A","perm":6}}}'


def fill_store(root: Path) -> None:
    """Several log, queue and index files; tags, keys, transactions; closed cleanly."""
    chance = random.Random(1)
    clock = SetClock()
    store = open_store(root, clock)
    for number in range(60):
        clock.ms += chance.randrange(2000)
        properties: dict[str, Any] = {
            "UNIQ_KEY": f"U{number:03}",
            "KEYS": f"k{number % 7} x{number}",
        }
        if chance.random() < 0.7:
            properties["TAGS"] = f"tag{number % 3}"
        queue = store.queue("ABC"[number % 3], number % 2)
        flag = TRANSACTION_PREPARED if number % 17 == 5 else 0
        flag = TRANSACTION_ROLLBACK if number % 17 == 9 else flag
        put(store, queue, chance.randbytes(chance.randrange(1, 200)), sys_flag=flag, **properties)
    store.close()
    for text in (b'{"topicConfigTable":{}}', TOPICS_TEXT):
        ConfigFile(root / "config" / "topics.json").save(text)


def contents(store: MessageStore) -> dict[tuple[str, int], list[bytes]]:
    """All that consumers can read, record by record."""
    return {
        (queue.topic, queue.queue_id): [message.encode() for message in read_all(store, queue)]
        for queue in store.queues
        if queue.next_offset
    }


def quiet(_count: int) -> None:
    """Takes no notice of how far a tool is."""
