"""A compacted static topic whose queues move between brokers, beside a dictionary.

Each broker compacts its own items, at any time and with delete markers that stay for a second, and
is stopped or killed in between. At each look a reader from offset 0 gets the newest value of each
key last, and GET_BY_KEY finds the same. A seed decides everything.
"""

from __future__ import annotations

from headrace_broker.compaction import follower
from headrace_broker.compaction.compactor import Request
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import GetByKeyHeader, GetByKeyResponseHeader
from headrace_protocol.key_lookup import NoRecord, WantedKey, decode_found, encode_keys
from headrace_protocol.message import decode_record, decode_records
from headrace_protocol.statictopic.mapping import MappingItem
from headrace_protocol.statictopic.offsets import round_up
from tests.broker.compaction.test_compaction_source import SIZES
from tests.simulation.compacted_lives import KEYS, POLICY, Table
from tests.simulation.history import PromiseBroken
from tests.simulation.totals import Outcome
from tests.simulation.world import Kind, World
from tests.support.static_brokers import TOPIC, Brokers, item
from tests.support.stores import crash
from tests.support.wire import pull_header, send_header

NAMES = "abc"
QUEUES = 2
STEPS = 100
COMMIT_LOG_FILE_BYTES = 4096
_PULL_MAX = 1000


class Chains(Kind):
    """The brokers, and the chains of the topic's queues."""

    name = "brokers of a compacted static topic"
    # The key index is brought to disk each time, not once a minute.
    constants = ((follower, "INDEX_SYNC_S", -1.0),)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.counts, self.faults = self.outcome.counts, self.outcome.faults
        self._table = Table()
        store = {"commit_log_file_bytes": COMMIT_LOG_FILE_BYTES}
        self.brokers = Brokers(world.folder, NAMES, store=store, **SIZES)
        self.brokers.attributes = "+cleanup.policy=COMPACTION"
        self._chains: list[tuple[MappingItem, ...]] = [
            (item("a", 0, 0, queue),) for queue in range(QUEUES)
        ]
        self.brokers.map(*self._chains)
        self.steps = [
            *[self.send] * 5,
            *[self.compact] * 4,
            *[self.move] * 2,
            self.restart,
            self.look,
        ]

    def run(self) -> Outcome:
        for _ in range(STEPS):
            self.rng.choice(self.steps)()
        self.look()
        self.brokers.close()
        return self.outcome

    def _leader(self, queue: int) -> str:
        return self._chains[queue][-1].bname[-1]

    # -- steps -------------------------------------------------------------------------------------

    def send(self) -> None:
        for _ in range(self.rng.randrange(1, 9)):
            number = self.rng.randrange(len(KEYS))
            self._put(number, self._leader(number % QUEUES))

    def _put(self, number: int, broker: str) -> None:
        value = b"" if self.rng.random() < 0.25 else b"%d" % self.rng.randrange(10**6)
        header = send_header(number % QUEUES, properties=f"KEYS\x01{KEYS[number]}\x02")
        answer = self.brokers[broker].ask(RequestCode.SEND_MESSAGE_V2, header, value)
        if answer.code != ResponseCode.SUCCESS:
            raise PromiseBroken(f"not sent: {answer.remark}")
        self._table.put(KEYS[number], value)
        self.counts["messages sent"] += 1

    def compact(self) -> None:
        """One of the physical queues of a broker."""
        name = self.rng.choice(NAMES)
        broker = self.brokers[name]
        broker.store.flusher.flush_now()
        broker.store.followers.all[0].catch_up()
        # Time passes, so that delete markers may go.
        broker.clock.ms += self.rng.choice([0, 1000, 30_000])
        compaction = broker.compaction
        queues = sorted(compaction.queues.all())
        if not queues:
            return
        queue = self.rng.choice(queues)
        keeps_markers = broker.core.own_queues.has_older(*queue)
        request = Request(queue, POLICY, broker.clock.ms, 2000, True, keeps_markers)
        result = compaction.compactor.compact(request)
        if result is not None:
            self.counts["compactions"] += 1
            self.counts["messages dropped"] += result.dropped_count
            self.counts["markers kept for older items"] += keeps_markers * result.marker_count

    def move(self) -> None:
        """A queue to another broker; in available mode its start is decided later."""
        queue = self.rng.randrange(QUEUES)
        chain = self._chains[queue]
        leader, old = chain[-1], self.brokers[self._leader(queue)]
        store_queue = old.store.find_queue(TOPIC, leader.queue_id)
        if store_queue is None or not store_queue.next_offset:
            return
        name = self.rng.choice([each for each in NAMES if each != self._leader(queue)])
        config = self.brokers[name].topics.get(TOPIC)
        assert config is not None
        physical, gen = config.write_queue_nums, leader.gen + 1
        end = leader.logic_offset + store_queue.next_offset
        if self.rng.random() < 0.5:
            self._chains[queue] = (*chain, item(name, gen, -1, physical))
            self.brokers.map(*self._chains)
            # Not there for readers yet.
            keys = [number for number in range(len(KEYS)) if number % QUEUES == queue]
            for number in self.rng.choices(keys, k=self.rng.randrange(3)):
                self._put(number, name)
            end = round_up(end)
        self._chains[queue] = (*chain, item(name, gen, end, physical))
        self.brokers.map(*self._chains)
        self.counts["moves"] += 1

    def restart(self) -> None:
        name = self.rng.choice(NAMES)
        clock_ms = self.brokers[name].clock.ms
        if self.rng.random() < 0.5:
            crash(self.brokers[name].store)
            self.faults["kill"] += 1
        else:
            self.brokers[name].close()
            self.faults["restart"] += 1
        self.brokers.start(name)
        self.brokers[name].clock.ms = clock_ms

    # -- checks ------------------------------------------------------------------------------------

    def look(self) -> None:
        found: dict[str, bytes] = {}
        for queue in range(QUEUES):
            table = self._read(queue)
            by_key = self._by_key(queue)
            for name, value in by_key.items():
                if table.get(name, NoRecord.NEVER) != value:
                    raise PromiseBroken(f"{name} is {table.get(name)!r} read, {value!r} by key")
            found |= table
        self._table.check(found)
        self.counts["looks"] += 1

    def _read(self, queue: int) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        offset, last = 0, -1
        for _ in range(_PULL_MAX):
            header = pull_header(offset, queue, max_msg_nums=self.rng.randrange(1, 20))
            answer = self.brokers[self._leader(queue)].ask(RequestCode.PULL_MESSAGE, header)
            fields = answer.command.ext()
            delta = int(fields.get("offsetDelta") or 0)
            for record in decode_records(answer.body) if answer.body else ():
                if not max(last + 1, offset) <= record.queue_offset + delta:
                    raise PromiseBroken(f"offset {record.queue_offset + delta} after {last}")
                last = record.queue_offset + delta
                found[record.properties["KEYS"]] = bytes(record.body)
            if answer.code == ResponseCode.PULL_NOT_FOUND:
                return found
            offset = int(fields["nextBeginOffset"])
        raise PromiseBroken(f"queue {queue} has no end")

    def _by_key(self, queue: int) -> dict[str, bytes | NoRecord]:
        names = [name for number, name in enumerate(KEYS) if number % QUEUES == queue]
        found: dict[str, bytes | NoRecord] = {}
        while len(found) < len(names):
            rest = names[len(found) :]
            body = encode_keys([WantedKey(name.encode(), queue) for name in rest])
            bytes_max = self.rng.choice([1, 300, 1 << 20])
            header = GetByKeyHeader(topic=TOPIC, count=len(rest), max_msg_bytes=bytes_max)
            broker = self.brokers[self._leader(queue)]
            answer = broker.ask(RequestCode.GET_BY_KEY, header, body)
            count = answer.command.header(GetByKeyResponseHeader).count
            for name, each in zip(rest, decode_found(count, answer.body), strict=False):
                if isinstance(each, NoRecord):
                    found[name] = each
                else:
                    found[name] = bytes(decode_record(each).body)
        return found
