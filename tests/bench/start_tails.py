"""Stores whose log has a tail that a start must read: messages that waited, with their ends."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from headrace_broker.schedule.offsets import DeliveredLevels
from headrace_broker.staging.known import KnownQueries
from headrace_broker.staging.state import QueryState, state_file
from headrace_broker.store.files.filesystem import Files, make_private
from headrace_broker.store.files.positions import FOLDER, PositionFile
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.settings import StoreSettings
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.timer.checkpoint import TimerCheckpoint
from headrace_broker.transaction import halves
from headrace_broker.transaction.rebuild import Checkpoint
from headrace_protocol.message import TRANSACTION_COMMIT
from headrace_protocol.message_ids import encode_host
from headrace_protocol.staging import Decision, StagedAttempt
from headrace_protocol.system_topics import (
    HALF_TOPIC,
    OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
)

# MiB by kind.
TAILS: Final = {
    "messages": 1024,
    "delayed": 200,
    "timers": 200,
    "transactions": 200,
    "staged": 200,
}
HOST: Final = encode_host("127.0.0.1", 1)
NOW_MS: Final = 1_700_000_000_000
AT_ONCE: Final = 500
TAG: Final = 0x1234567890ABCDEF
REAL: Final = b"REAL_TOPIC\x01T\x02REAL_QID\x010\x02"
# Where messages wait, with which properties, and the sys flag of what ends their wait.
WAITS: Final = {
    "delayed": (SCHEDULE_TOPIC, REAL + b"DELAY\x011\x02", 0),
    "timers": (TIMER_TOPIC, REAL + b"TIMER_OUT_MS\x01%d\x02" % NOW_MS, 0),
    "transactions": (HALF_TOPIC, REAL + b"TRAN_MSG\x01true\x02PGROUP\x01g\x02", TRANSACTION_COMMIT),
}
POSITIONS: Final = {
    "delayed": ("schedule", lambda begin: DeliveredLevels({}, begin)),
    "timers": ("timer", lambda begin: TimerCheckpoint(0, 0, begin, 0, 1, 1)),
    "transactions": ("transaction", lambda begin: Checkpoint(0, 0, begin)),
}


def make_tail(root: Path, kind: str, mib: int) -> None:
    """A store that was killed after ``mib`` of one kind, with the positions from before."""
    store = MessageStore(StoreSettings(root=root))
    store.load()
    _append(store, store.queue("T", 0), b"")
    store.write_path.publish()
    store.flusher.flush_now()
    saved = {path: path.read_bytes() for path in (root / "checkpoint", *root.glob("positions/*"))}
    begin, count = store.commit_log.max_offset, 0
    while store.commit_log.max_offset - begin < mib << 20:
        store.write_path.begin()
        _append_some(store, kind, count)
        store.write_path.publish()
        store.index_tick()
        count += AT_ONCE
    store.abandon()
    for path, data in saved.items():
        path.write_bytes(data)
    _save_position(root, kind, begin)


def _append(store: MessageStore, queue: StoreQueue, properties: bytes, *end: int) -> int:
    """Append a message; its physical offset. end: sys flag and what it ends, if anything."""
    sys_flag, source = end or (0, 0)
    message = (queue, bytes(900), properties, 0, 0, sys_flag, NOW_MS, 0)
    return store.write_path.append(message, HOST, source)


def _append_some(store: MessageStore, kind: str, first: int) -> None:
    target = store.queue("T", 0)
    names = [b"UNIQ_KEY\x01%032X\x02" % (first + number) for number in range(AT_ONCE)]
    if kind not in WAITS:
        for name in names:
            _append(store, target, name, 0, TAG if kind == "staged" else 0)
        return
    topic, properties, sys_flag = WAITS[kind]
    queue = store.queue(topic, 0)
    waiting = [(name, _append(store, queue, name + properties)) for name in names]
    for name, source in waiting:
        _append(store, target, name + properties, sys_flag, source)
    if kind == "transactions":
        queue = store.queue(OP_HALF_TOPIC, 0)
        for op, _ in halves.ops(list(range(first, first + AT_ONCE)), 4096, NOW_MS, HOST):
            store.write_path.append((queue, *op[2:9]), op.born_host)


def _save_position(root: Path, kind: str, begin: int) -> None:
    files = Files()
    if kind in POSITIONS:
        owner, value_of = POSITIONS[kind]
        value: msgspec.Struct = value_of(begin)
        PositionFile(root / FOLDER / f"{owner}.json", type(value), files).save(value)
    elif kind == "staged":
        decision = Decision("d", 0, {"b": (StagedAttempt("one", 10, 10**7),)})
        make_private(root / "staged/query")
        state = QueryState(decision=decision, tag=TAG, from_offset=begin)
        state_file(root / "staged/query", files).save(state)
        KnownQueries(root, files).add("query")
