"""The parts of POP, put together, and what a start makes of the log of pops."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import structlog
import trio

from headrace_broker.pop import pop_log
from headrace_broker.pop.acks import AckProcessor
from headrace_broker.pop.order_infos import FILE_NAME, OrderInfos
from headrace_broker.pop.peer_forms import PeerForms
from headrace_broker.pop.peer_pops import PeerPops
from headrace_broker.pop.pop_log import PopLog
from headrace_broker.pop.popping import Popping
from headrace_broker.pop.pops import Pops
from headrace_broker.pop.processor import PopProcessor
from headrace_broker.pop.progress import PopProgress
from headrace_broker.pop.recovery import LogTail, bring_in_line, name_again
from headrace_broker.pop.revive import Revive
from headrace_broker.pop.targets import PopTargets
from headrace_broker.store.recovery import read_log
from headrace_protocol.system_topics import revive_log_topic

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.core import Core
    from headrace_daemon.metrics.samples import Samples
    from headrace_protocol.serving import Registry

logger = structlog.get_logger("headrace.broker")


class PopParts:
    """Everything that serves pops. functions: by the code of the requests."""

    def __init__(self, core: Core, registry: Registry, folder: Path) -> None:
        """Reads the log of pops. Raises OSError, StoreFormatError."""
        config, store, tables = core.config, core.store, core.tables
        self._store = store
        log = store.commit_log
        self.log = PopLog(folder, store.fs, lambda: log.max_offset, pop_log.FILE_BYTES)
        self.pops = Pops(self.log, config.revive_interval)
        for event in self.log.read():
            self.pops.replay(event, log.max_offset)
        tail = LogTail(revive_log_topic(config.broker_cluster_name))
        if self.pops.out_count:
            read_log(tail.take, log, self.log.log_end)
            name_again(self.pops, tail.names, config.broker_name, log.max_offset)
        self.order_infos = OrderInfos(core.file(FILE_NAME), tables, self.pops)
        is_adopted = self.order_infos.adopt()
        bring_in_line(self.pops, tables, core.directory, tail.sources)
        self.pops.replayed()
        self.progress = PopProgress(store, tables.offsets, self.pops, self.log)
        self.progress.settle()
        with suppress(OSError):  # both are retried while the broker runs
            self.progress.write_out()
            if is_adopted:
                self.order_infos.save()
        targets = PopTargets(config, tables, core.directory)
        popping = Popping(config, store, tables.offsets, self.pops, core.statistics)
        long_polling = core.clients.long_polling
        self._processor = PopProcessor(
            registry,
            config,
            core.rights.access,
            store,
            tables.topics,
            long_polling,
            targets,
            popping,
            self.progress,
        )
        self._acks = AckProcessor(
            config, store, tables.topics, core.directory, self.pops, self.progress
        )
        self.revive = Revive(
            config,
            store,
            tables,
            core.directory,
            core.messages.writer,
            self.pops,
            self.progress,
            long_polling,
            popping.threshold,
        )
        self.peer_pops = PeerPops(
            store, tables, config.broker_cluster_name, self.pops, self.progress
        )
        self.peer_forms = PeerForms(config, store, core.messages, self.pops, self.progress)
        self.functions = self._processor.functions() | self._acks.functions()
        self._connect(tables.offsets)
        core.serving.frames.add_turn_end(self.progress.end_turn)

    def _connect(self, offsets: ConsumerOffsets) -> None:
        offsets.on_moved = self._moved
        offsets.before_save = self.progress.bring_to_disk
        offsets.save_problem = self.progress.save_problem
        offsets.count_out = self.pops.count_out

    def _moved(self, group: str, topic: str, queue_id: int | None, offset: int | None) -> None:
        """Follow a group's offset that something else has moved or deleted."""
        if queue_id is None:
            queues = self.pops.queues_of(group, topic)
        else:
            found = self.pops.find(group, topic, queue_id)
            queues = [found] if found is not None else []
        for queue in queues:
            if offset is None:
                self.pops.forget(queue)
            elif offset != queue.settled_offset:
                self.pops.reset(queue, offset)

    async def run(self) -> None:
        """Revive messages, and bring changes to disk, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.progress.run)
            nursery.start_soon(self.revive.run)
            nursery.start_soon(self.peer_pops.run)
            nursery.start_soon(self.peer_forms.run)
            nursery.start_soon(self.order_infos.run)

    def finish(self) -> None:
        """Bring everything to disk, before the groups' offsets. Raises OSError.

        What is out is also there in the form of Apache's brokers then.
        """
        try:
            if self._store.commit_log.life.is_writable:
                self.peer_forms.write()
                self._store.flusher.flush_log_now()
            self.progress.finish()
        finally:
            self.log.close()
        try:
            self.order_infos.save()
        except OSError as error:
            # This broker reads its own log.
            logger.error("orderly pops not saved for another broker", reason=str(error))

    def collect(self, samples: Samples) -> None:
        """Add what is out, what became of it, and what waits."""
        from headrace_broker.metrics import table

        revive = self.revive
        samples.add(table.POPS_OUT, self.pops.out_count)
        samples.add(table.POPS_ACKED, self._acks.acked)
        samples.add(table.POPS_EXPIRED, revive.revived, "retry")
        samples.add(table.POPS_EXPIRED, revive.buried, "dead")
        samples.add(table.POPS_EXPIRED, revive.given_up, "given_up")
        samples.add(table.HELD_POPS, self._processor.held_count)

    def runtime_info(self) -> dict[str, str]:
        """The counts, for GET_BROKER_RUNTIME_INFO."""
        return {
            "popMessagesOut": str(self.pops.out_count),
            "popMessagesRevived": str(self.revive.revived),
            "popMessagesBuried": str(self.revive.buried),
        }
