"""A broker, and members of a group that pop from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

from headrace_broker.pop.feature import Pop
from headrace_broker.pop.parts import PopParts
from headrace_broker.store.files.filesystem import Files
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import StoredMessage, decode_records
from headrace_protocol.pop.handle import Handle, TopicKind, parse
from headrace_protocol.pop.headers import (
    AckMessageHeader,
    ChangeInvisibleTimeHeader,
    PopMessageHeader,
)
from headrace_protocol.pop.infos import parse_offsets
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.stores import FaultyFiles, crash

INVISIBLE_MS = 60_000
BROKER = "broker-a"


class PopBroker(BrokerUnderTest):
    """A broker with a topic T of two queues and a group g."""

    def __init__(self, folder: Path, *args: Any, **store: Any) -> None:
        super().__init__(folder, *args, **store)
        self.part(Pop).load()
        if self.topics.get("T") is None:
            self.create_topic("T")

    @property
    def pop_parts(self) -> PopParts:
        return self.part(Pop).open()

    @property
    def disk(self) -> FaultyFiles:
        files = self.store.fs
        assert isinstance(files, FaultyFiles)
        return files

    def pop_header(self, **fields: Any) -> PopMessageHeader:
        header = {
            "consumer_group": "g",
            "topic": "T",
            "queue_id": -1,
            "max_msg_nums": 32,
            "invisible_time": INVISIBLE_MS,
            "poll_time": 0,
            "born_time": self.clock.ms,
            "init_mode": 0,
        }
        return PopMessageHeader(**{**header, **fields})

    def pop(self, **fields: Any) -> Answer:
        return self.ask(RequestCode.POP_MESSAGE, self.pop_header(**fields))

    def taken(self, **fields: Any) -> list[tuple[StoredMessage, Handle]]:
        """The messages of a POP, with their handles; none if it found none."""
        answer = self.pop(**fields)
        if answer.code == ResponseCode.POLLING_TIMEOUT:
            return []
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        return messages_of(answer)

    def ack(self, handle: Handle, **fields: Any) -> Answer:
        header = {
            "consumer_group": "g",
            "topic": handle.topic("T", "g"),
            "queue_id": handle.queue_id,
            "extra_info": handle.text(),
            "offset": handle.queue_offset,
        }
        return self.ask(RequestCode.ACK_MESSAGE, AckMessageHeader(**{**header, **fields}))

    def change(self, handle: Handle, invisible_ms: int, **fields: Any) -> Answer:
        header = {
            "consumer_group": "g",
            "topic": handle.topic("T", "g"),
            "queue_id": handle.queue_id,
            "extra_info": handle.text(),
            "offset": handle.queue_offset,
            "invisible_time": invisible_ms,
        }
        return self.ask(
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
            ChangeInvisibleTimeHeader(**{**header, **fields}),
        )

    def hold(self, **fields: Any) -> MemoryChannel:
        """A client whose POP waits."""
        channel = MemoryChannel()
        fields = {"poll_time": 10_000, **fields}
        self.send(RequestCode.POP_MESSAGE, self.pop_header(**fields), channel=channel)
        return channel

    def revive(self) -> None:
        """Store again what is due."""
        trio.run(self.pop_parts.revive.revive_due)

    def progress(self, queue_id: int = 0, topic: str = "T") -> int | None:
        return self.offsets.query("g", topic, queue_id)


def restarted(broker: PopBroker, folder: Path, files: Files | None = None) -> PopBroker:
    """The next life of a broker that was killed before it saved the offsets."""
    crash(broker.store)
    broker.pop_parts.log.close()
    return PopBroker(folder, clock=broker.clock, files=files, commit_log_file_bytes=1 << 16)


def damage(broker: PopBroker, body: bytes) -> None:
    """Damage the one message in the log whose body has these bytes."""
    (path,) = (broker.config.store_path_root_dir / "commitlog").iterdir()
    at = path.read_bytes().index(body)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")


def messages_of(answer: Answer) -> list[tuple[StoredMessage, Handle]]:
    """The messages of an answer, with handles."""
    return messages_in(answer.command.ext(), answer.body)


def messages_in(ext: Mapping[str, str], body: bytes) -> list[tuple[StoredMessage, Handle]]:
    """The same of its fields and its body; handles are as Java's client makes them."""
    infos = {
        (each.kind, each.queue_id): each
        for each in parse_offsets(ext["startOffsetInfo"], ext["msgOffsetInfo"])
    }
    found = []
    for message in decode_records(body):
        if (text := message.properties.get("POP_CK")) is not None:
            found.append((message, parse(text)))
            continue
        info = infos[TopicKind.NORMAL, message.queue_id]
        assert message.queue_offset in info.offsets
        handle = Handle(
            info.start_offset,
            int(ext["popTime"]),
            int(ext["invisibleTime"]),
            int(ext["reviveQid"]),
            TopicKind.NORMAL,
            BROKER,
            message.queue_id,
            message.queue_offset,
        )
        found.append((message, handle))
    return found


def answers(channel: MemoryChannel) -> list[Answer]:
    return [Answer(*reply) for reply in channel.replies()]


def bodies(taken: list[tuple[StoredMessage, Handle]]) -> list[bytes]:
    return sorted(message.body for message, _ in taken)
