"""Messages of a file's rows, sent while the file is read."""

from __future__ import annotations

import select
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.admin.rows import LINE_BYTES_MAX, BadRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import FileIO

    import trio

    from headrace.messages import Message

_CHUNK_BYTES = 256 * 1024
_IN_FLIGHT = 2000

Chunk = list["Message"]


class Source(NamedTuple):
    """A file to read. file_bytes: its size, if it is known."""

    name: str
    file: FileIO
    file_bytes: int | None


@contextmanager
def open_source(path: Path | None) -> Iterator[Source]:
    """A file, or standard input if it is None or "-"."""
    if path is None or path == Path("-"):
        # A buffered reader has a lock, and Python aborts at exit if a thread still holds it.
        yield Source("standard input", sys.stdin.buffer.raw, None)  # type: ignore[union-attr]
        return
    with path.open("rb", buffering=0) as file:
        yield Source(str(path), file, path.stat().st_size)


def _read(file: FileIO) -> bytes:
    """The next bytes; empty at the end. Waits even if the file was made non-blocking."""
    while (data := file.read(_CHUNK_BYTES)) is None:
        select.select([file], [], [])
    return data


class RowSender:
    """Sends rows to the broker: reads them in a thread, and sends them through a pipeline.

    sent: number of messages stored, once ``send`` is done. failure: the bad row, or the file's
    error, that ended it early.
    """

    def __init__(
        self,
        source: Source,
        messages: Callable[[Iterator[bytes]], Iterator[Message]],
        advance: Callable[[int], None] = lambda _bytes: None,
    ) -> None:
        """messages: those of lines. Raises BadRow at the first that cannot become one.

        advance: called with the size of each part that is read.
        """
        self.sent = 0
        self.failure: BadRow | OSError | None = None
        self._source = source
        self._messages = messages
        self._advance = advance

    async def send(self, nameserver: str | None) -> None:
        """Send all messages up to the first bad row."""
        import trio

        from headrace.producer.producer import Producer

        chunks_in, chunks_out = trio.open_memory_channel["Chunk"](2)
        async with Producer(nameserver=nameserver) as producer, trio.open_nursery() as nursery:
            nursery.start_soon(self._read, chunks_in)
            async with producer.pipeline(max_in_flight=_IN_FLIGHT) as pipeline:
                async for chunk in chunks_out:
                    await pipeline.send_all(chunk)
                    self.sent += len(chunk)

    async def _read(self, chunks: trio.MemorySendChannel[Chunk]) -> None:
        import trio

        async with chunks:
            # A read of standard input cannot be interrupted, only abandoned.
            await trio.to_thread.run_sync(self._read_in_thread, chunks, abandon_on_cancel=True)

    def _read_in_thread(self, chunks: trio.MemorySendChannel[Chunk]) -> None:
        import trio

        chunk: Chunk = []

        def hand_over() -> None:
            nonlocal chunk
            if chunk:
                trio.from_thread.run(chunks.send, chunk)
                chunk = []

        try:
            for message in self._messages(self._lines(before_read=hand_over)):
                chunk.append(message)
        except (BadRow, OSError) as error:
            self.failure = error
        hand_over()

    def _lines(self, before_read: Callable[[], None]) -> Iterator[bytes]:
        """Lines with their line ends; calls ``before_read`` before each read, which may block.

        Raises BadRow for a line that is too long, and OSError.
        """
        rest, count = b"", 0
        while True:
            before_read()
            data = _read(self._source.file)
            self._advance(len(data))
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line + b"\n"
            count += len(lines)
            if len(rest) > LINE_BYTES_MAX:
                location = f"{self._source.name}:{count + 1}"
                raise BadRow(location, f"a line of more than {LINE_BYTES_MAX} bytes")
        if rest:
            yield rest
