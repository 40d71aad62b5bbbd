"""The memory of one process as a network whose connections break, lag, and half-close."""

from __future__ import annotations

from collections import Counter
from random import Random

import trio
from anyio import BrokenResourceError, ClosedResourceError, EndOfStream

from headrace_daemon.network import Listener, MemoryByteStream, MemoryNetwork

CUT_PROBABILITY = 0.012
LAG_PROBABILITY = 0.03
LAG_S_MAX = 1.5
# A connection that only the client thinks lost: what it sent arrives later, maybe after what it
# sends again on the next connection.
GHOST_PROBABILITY = 0.01
GHOST_S_MAX = 4.0


class FaultyNetwork(MemoryNetwork):
    """Connections fail while they carry something; ``is_calm`` stops that."""

    def __init__(self, rng: Random, nursery: trio.Nursery) -> None:
        super().__init__()
        self.rng = rng
        self.nursery = nursery
        self.is_calm = True
        self.faults: Counter[str] = Counter()

    async def connect(self, address: str) -> MemoryByteStream:
        stream = await super().connect(address)
        assert isinstance(stream, MemoryByteStream)
        return FaultyStream(stream._stream, self)

    def drop(self, address: str) -> None:
        """Cut every connection to a server that is no more, and forget its address."""
        self._listeners.discard(address)
        if address in self._servers:
            self._servers[address][1].cancel_scope.cancel()

    def happens(self, fault: str, probability: float) -> bool:
        if self.is_calm or self.rng.random() >= probability:
            return False
        self.faults[fault] += 1
        return True


class FaultyStream(MemoryByteStream):
    """The client's end of a connection."""

    def __init__(self, stream: trio.abc.Stream, network: FaultyNetwork) -> None:
        super().__init__(stream)
        self._network = network
        self._is_ghost = False

    async def send(self, item: bytes) -> None:
        network = self._network
        if network.happens("cut request", CUT_PROBABILITY):
            await super().send(bytes(item)[: network.rng.randrange(len(item) + 1)])
            await self.aclose()
            raise BrokenResourceError
        if network.happens("ghost connection", GHOST_PROBABILITY):
            self._is_ghost = True
            network.nursery.start_soon(self._haunt, bytes(item))
            raise BrokenResourceError
        await self._lag()
        await super().send(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self._is_ghost:
            raise ClosedResourceError
        data = await super().receive(max_bytes)
        await self._lag()
        if self._network.happens("cut answer", CUT_PROBABILITY):
            await self.aclose()
            raise EndOfStream
        return data

    async def _lag(self) -> None:
        if self._network.happens("slow connection", LAG_PROBABILITY):
            await trio.sleep(self._network.rng.random() * LAG_S_MAX)

    async def _haunt(self, data: bytes) -> None:
        await trio.sleep(self._network.rng.random() * GHOST_S_MAX)
        try:
            await super().send(data)
            # Until the server closes, or has been silent for long.
            with trio.move_on_after(GHOST_S_MAX):
                while await self._stream.receive_some():
                    pass
        except (BrokenResourceError, ClosedResourceError, trio.BrokenResourceError):
            pass
        await super().aclose()

    async def aclose(self) -> None:
        if not self._is_ghost:
            await super().aclose()


class LifeNetwork:
    """The network as one life of a daemon sees it; after ``end`` it is out of reach."""

    def __init__(self, network: FaultyNetwork) -> None:
        self._network = network
        self.serve, self.names = network.serve, network.names
        self._address = ""
        self._streams: list[MemoryByteStream] = []
        self._is_over = False

    def listen(self, host: str, port: int) -> Listener:
        listener = self._network.listen(host, port)
        self._address = listener.address
        return listener

    async def connect(self, address: str) -> MemoryByteStream:
        if self._is_over:
            raise ConnectionRefusedError("this machine is off")
        stream = await self._network.connect(address)
        self._streams.append(stream)
        return stream

    def end(self) -> None:
        """Nobody hears of this life any more."""
        self._is_over = True
        self._network.drop(self._address)
        for stream in self._streams:
            self._network.nursery.start_soon(stream.aclose)
