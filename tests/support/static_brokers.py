"""Brokers of a static topic without sockets: each answers the others' requests at once."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace_protocol.admin_headers import CreateStaticTopicHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import Command
from headrace_protocol.drivers.errors import ConnectFailed
from headrace_protocol.drivers.response import Response
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import (
    PullMessageResponseHeader,
    SendMessageResponseHeader,
)
from headrace_protocol.message import decode_records
from headrace_protocol.statictopic.mapping import (
    MappingInfo,
    MappingItem,
    TopicMapping,
    encode_detail,
)
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.channel import MemoryChannel
from tests.support.wire import pull_header, send_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from headrace_broker.peers.callers import Caller
    from headrace_broker.peers.peers import Ask, Outcome, Then
    from headrace_broker.store.files.filesystem import Files

    Chain = tuple[MappingItem, ...]

TOPIC = "T"
GROUP = "g"


def item(broker: str, gen: int, logic_offset: int, queue_id: int = 0, end: int = -1) -> MappingItem:
    return MappingItem(
        bname=f"broker-{broker}",
        gen=gen,
        queue_id=queue_id,
        logic_offset=logic_offset,
        end_offset=end,
    )


class Brokers(dict[str, BrokerUnderTest]):
    """Brokers by the last letter of their names.

    asked: what they asked of each other: broker, code, fields. away: brokers that don't answer.
    answer: answers their requests instead of them, if set. attributes: of the topic, as changes.
    """

    answer: Callable[[Ask], Outcome] | None = None
    _held: list[tuple[Caller, Ask, Then]] | None = None

    def __init__(
        self,
        folder: Path,
        names: str = "ab",
        *,
        store: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """store: changes of the stores' small sizes."""
        self.asked: list[tuple[str, int, Mapping[str, str]]] = []
        self.away: set[str] = set()
        self.epoch = 0
        self.attributes = ""
        self._folder = folder
        self._settings = settings
        self._store = store or {}
        for name in names:
            self.start(name)

    def start(self, name: str, files: Files | None = None) -> None:
        """Start a broker, with what is in its folder."""
        folder = self._folder / name
        config = broker_config(folder, **self._settings).model_copy(
            update={"broker_name": f"broker-{name}"}
        )
        store = {**self._store, "files": files} if files else self._store
        broker = self[name] = BrokerUnderTest(folder, config, **store)
        broker.peers.begin = self.begin  # type: ignore[method-assign,assignment]
        broker.traffic.forwarding.find_infos = self.infos

    def close(self) -> None:
        for broker in self.values():
            broker.close()
            assert not broker.unexpected

    def begin(self, caller: Caller, ask: Ask, then: Then) -> None:
        """As ``Peers.begin``."""
        broker, code, fields, body, *_ = ask
        assert fields is not None
        if self._held is not None:
            self._held.append((caller, ask, then))
            return
        self.asked.append((broker, code, fields))
        if self.answer is not None:
            then(self.answer(ask))
            return
        name = broker.removeprefix("broker-")
        if name in self.away or name not in self:
            then(ConnectFailed(broker, "it is away"))
            return
        channel = MemoryChannel()
        frame = encode_frame(SerializeType.JSON, code, 9, fields=fields, body_bytes=len(body))
        self[name].take(frame + bytes(body), channel)
        (answer,) = channel.replies()
        command, data = answer
        then(Response(broker, code, command, memoryview(data)))

    @contextmanager
    def holding(self) -> Iterator[list[tuple[Caller, Ask, Then]]]:
        """Keep the requests between brokers in a block; ``release`` begins them."""
        self._held = []
        yield self._held
        self._held = None

    def release(self, held: list[tuple[Caller, Ask, Then]]) -> None:
        for each in held:
            self.begin(*each)

    async def infos(self, topic: str) -> list[MappingInfo]:
        """The topic in a nameserver's route."""
        mappings = (broker.mappings.get(topic) for broker in self.values())
        return [mapping.info() for mapping in mappings if mapping is not None]

    # -- mappings ----------------------------------------------------------------------------------

    def map(self, *chains: Chain, only: str = "") -> None:
        """Give each broker its mapping of the topic: the chains that it leads, or led before."""
        self.epoch += 1000
        for name in only or self:
            bname = f"broker-{name}"
            hosted = {
                queue: chain
                for queue, chain in enumerate(chains)
                if bname in {each.bname for each in chain[-2:]}
            }
            own = [each.queue_id for chain in chains for each in chain if each.bname == bname]
            known = self[name].topics.get(TOPIC)
            queue_nums = max(max(own, default=-1) + 1, known.write_queue_nums if known else 0)
            mapping = TopicMapping(
                bname=bname,
                epoch=self.epoch,
                hosted=hosted,
                topic=TOPIC,
                total_queues=len(chains),
            )
            header = CreateStaticTopicHeader(
                topic=TOPIC,
                default_topic="TBW102",
                read_queue_nums=queue_nums,
                write_queue_nums=queue_nums,
                perm=6,
                topic_filter_type="SINGLE_TAG",
                topic_sys_flag=0,
                order=False,
                force=False,
                attributes=self.attributes or None,
            )
            code = RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC
            answer = self[name].ask(code, header, encode_detail(mapping))
            assert answer.code == ResponseCode.SUCCESS, answer.remark

    # -- clients -----------------------------------------------------------------------------------

    def send(self, broker: str, body: bytes, queue_id: int = 0) -> tuple[int, int]:
        """Send a message; returns the queue and the offset of the answer."""
        answer = self[broker].ask(RequestCode.SEND_MESSAGE_V2, send_header(queue_id), body)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        header = answer.command.header(SendMessageResponseHeader)
        return header.queue_id, header.queue_offset

    def pull(
        self, broker: str, offset: int, queue_id: int = 0, **fields: Any
    ) -> tuple[int, PullMessageResponseHeader, list[tuple[int, bytes]]]:
        """Pull; returns code, header, and offset and body of each message as clients see them."""
        answer = self[broker].ask(RequestCode.PULL_MESSAGE, pull_header(offset, queue_id, **fields))
        header = answer.command.header(PullMessageResponseHeader)
        delta = header.offset_delta or 0
        records = decode_records(answer.body)
        found = [(record.queue_offset + delta, bytes(record.body)) for record in records]
        return answer.code, header, found

    def read_all(self, broker: str, offset: int = 0, queue_id: int = 0) -> list[tuple[int, bytes]]:
        """All messages from an offset on, read as a client does."""
        found: list[tuple[int, bytes]] = []
        for _ in range(1000):
            code, header, messages = self.pull(broker, offset, queue_id)
            found += messages
            if code == ResponseCode.PULL_NOT_FOUND:
                return found
            assert code in {ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY}
            offset = header.next_begin_offset
        raise AssertionError("the queue has no end")


def response(ask: Ask, code: int, fields: Mapping[str, Any], body: bytes = b"") -> Response:
    """An answer of another broker, with an escape sequence as its remark."""
    command = Command(code, ext_fields=dict(fields), remark="\x1b[2J")
    return Response(ask.peer, ask.code, command, memoryview(body))
