"""POP as a feature, whose parts are imported at the first request for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from headrace_broker.feature import Feature
from headrace_broker.pop.revive_topic import unread
from headrace_daemon.services import Service
from headrace_protocol.codes import RequestCode

if TYPE_CHECKING:
    from headrace_broker.core import Core
    from headrace_broker.pop.parts import PopParts
    from headrace_daemon.metrics.samples import Samples
    from headrace_protocol.serving import Registry, Reply, Request, Work

FOLDER: Final = "pop"
# Between looks for what timers deliver to the revive topic.
_LOOK_S: Final = 1.0
_CODES: Final = (
    RequestCode.POP_MESSAGE,
    RequestCode.PEEK_MESSAGE,
    RequestCode.NOTIFICATION,
    RequestCode.POLLING_INFO,
    RequestCode.ACK_MESSAGE,
    RequestCode.BATCH_ACK_MESSAGE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
)


def build(core: Core) -> Feature:
    """See ``Feature``."""
    pop = Pop(core)
    return Feature(
        processors=(pop,),
        services=(Service(pop.run, pop.load, finish=pop.finish),),
        collectors=core.collectors(lambda: pop.collect),
        runtime_info=(pop.runtime_info,),
    )


class Pop:
    """The parts of POP, once somebody has popped from this store; ``parts`` is None until then."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._opened = trio.Event()
        self._registry: Registry
        self.parts: PopParts | None = None

    def register(self, registry: Registry) -> None:
        """Serve the codes."""
        self._registry = registry
        for code in _CODES:
            registry.route(code, self._serve)

    def _serve(self, request: Request) -> Reply | Work | None:
        return self.open().functions[request.command.code](request)

    def open(self) -> PopParts:
        """The parts, opened if they are not. Raises OSError, StoreFormatError."""
        if self.parts is None:
            from headrace_broker.pop.parts import PopParts

            self.parts = PopParts(self._core, self._registry, self._core.store.root / FOLDER)
            self._opened.set()
        return self.parts

    def load(self) -> None:
        """Read what was out, if anybody has ever popped."""
        if (self._core.store.root / FOLDER).exists():
            self.open()

    async def run(self) -> None:
        """Revive messages, and bring changes to disk, until cancelled."""
        while self.parts is None:
            with trio.move_on_after(_LOOK_S):
                await self._opened.wait()
            if self._has_peers_pops():
                self.open()
        await self.parts.run()

    def _has_peers_pops(self) -> bool:
        core = self._core
        cluster = core.config.broker_cluster_name
        return bool(unread(core.store, core.tables.offsets, cluster))

    def finish(self) -> None:
        """Bring everything to disk. Raises OSError."""
        if self.parts is not None:
            self.parts.finish()

    async def collect(self, samples: Samples) -> None:
        """See ``Collect``; nothing before the first POP."""
        if self.parts is not None:
            self.parts.collect(samples)

    def runtime_info(self) -> dict[str, str]:
        """The counts, for GET_BROKER_RUNTIME_INFO."""
        return self.parts.runtime_info() if self.parts is not None else {}
