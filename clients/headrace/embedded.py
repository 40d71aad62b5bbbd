"""A real broker and nameserver inside this process: for tests, demos and small programs.

Under trio they are tasks of the block. Under asyncio and in blocking code they run in a thread of
their own, with a trio loop of their own.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from types import TracebackType

    from headrace.admin.client import Admin
    from headrace.consumer.push import Consumer
    from headrace.producer.producer import Producer
    from headrace_broker.store.recovery import OnProgress
    from headrace_daemon.network import Network
    from headrace_protocol.drivers.aio import Connect

LOOPBACK = "127.0.0.1"
_BROKER_NAME = "broker-a"
# Room for the largest message, little disk, made in no time.
_SMALL_FILES: dict[str, Any] = {
    "mapped_file_size_commit_log": 16 * 1024 * 1024,
    "mapped_file_size_consume_queue": 20 * 10_000,
    "max_hash_slot_num": 20_000,
    "max_index_num": 80_000,
}


class Embedded(NamedTuple):
    """What runs.

    nameserver, broker: their ``host:port``. data: the store's folder.
    connect: how this process reaches them; clients need to be told only with ``memory=True``.
    """

    nameserver: str
    broker: str
    data: Path
    connect: Connect

    def producer(self, **options: Any) -> Producer:
        """A Producer for this broker; options are the Producer's own."""
        from headrace.producer.producer import Producer

        return Producer(nameserver=self.nameserver, connect=self.connect, **options)

    def consumer(self, group: str, topics: str | dict[str, str], **options: Any) -> Consumer:
        """A Consumer of this broker that begins with the first message unless told otherwise."""
        from headrace.consumer.push import Consumer

        options.setdefault("start", "first")
        return Consumer(group, topics, nameserver=self.nameserver, connect=self.connect, **options)

    def admin(self, **options: Any) -> Admin:
        """An Admin for this broker."""
        from headrace.admin.client import Admin

        return Admin(nameserver=self.nameserver, connect=self.connect, **options)


class embedded:  # noqa: N801 - used like a function
    """Run a broker and a nameserver for the length of a ``with`` or ``async with`` block.

    data: the store's folder, made if need be and kept; its files have RocketMQ's sizes, so that
        ``headrace broker`` and Apache RocketMQ open it with their defaults. Without it a temporary
        folder with small files, removed at the end.
    memory: no sockets at all: only clients made by this object, or with its ``connect``, reach the
        broker; under trio only.

    Topics are made by the first send. Logs go to the standard library's ``logging`` as
    ``headrace.*``, unless the program has configured structlog.
    Raises StoreLocked when another broker has the folder open, ConfigurationError when ``data`` is
    a file.
    """

    def __init__(self, data: str | Path | None = None, *, memory: bool = False) -> None:
        self._data = None if data is None else Path(data)
        self._memory = memory
        self._tasks: AbstractAsyncContextManager[Embedded] | None = None
        self._thread: _Thread | None = None

    async def __aenter__(self) -> Embedded:
        import sniffio

        if sniffio.current_async_library() == "trio":
            self._tasks = self._run_daemons()
            return await self._tasks.__aenter__()
        import anyio

        thread = self._new_thread()
        return await anyio.to_thread.run_sync(thread.start)

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._tasks:
            await self._tasks.__aexit__(error_type, error, traceback)
            return
        import anyio

        assert self._thread
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.stop)

    def __enter__(self) -> Embedded:
        return self._new_thread().start()

    def __exit__(self, *_: object) -> None:
        assert self._thread
        self._thread.stop()

    def _new_thread(self) -> _Thread:
        if self._memory:
            raise ConfigurationError(
                "memory=True needs trio: elsewhere the broker has its own thread, which is "
                "reached by sockets; leave memory out"
            )
        self._thread = _Thread(self._run_daemons)
        return self._thread

    def _run_daemons(self) -> AbstractAsyncContextManager[Embedded]:
        from headrace_daemon.network import MemoryNetwork, TcpNetwork

        _log_to_logging()
        return run_daemons(self._data, network=MemoryNetwork() if self._memory else TcpNetwork())


@asynccontextmanager
async def run_daemons(
    data: Path | None,
    *,
    network: Network,
    host: str = LOOPBACK,
    nameserver_port: int = 0,
    broker_port: int = 0,
    owns_loop: bool = False,
    on_progress: OnProgress | None = None,
) -> AsyncIterator[Embedded]:
    """Run both daemons as tasks of the block, under trio; see ``embedded``.

    host: to listen on; everyone who reaches it has full access.
    nameserver_port, broker_port: 0 takes any free one.
    owns_loop: the process does nothing else; see ``RemotingServer``.
    on_progress: see ``Broker``; without it the log tells.
    Raises OSError (address), StoreError (directory), ConfigurationError (``data`` is a file).
    """
    from tempfile import TemporaryDirectory

    from headrace_broker.config import BrokerConfig
    from headrace_broker.server import Broker
    from headrace_nameserver.config import NameServerConfig
    from headrace_nameserver.server import NameServer

    async with AsyncExitStack() as stack:
        folder = data or Path(stack.enter_context(TemporaryDirectory(prefix="headrace-")))
        _make(folder)
        nameserver = NameServer(
            NameServerConfig(
                bind_address=host, anonymous_access="allow", listen_port=nameserver_port
            ),
            network,
        )
        await _start(stack, nameserver.run)
        broker = Broker(
            BrokerConfig(
                broker_name=_BROKER_NAME,
                bind_address=host,
                anonymous_access="allow",
                listen_port=broker_port,
                namesrv_addr=nameserver.address,
                store_path_root_dir=folder,
                **(_SMALL_FILES if data is None else {}),
            ),
            network,
            owns_loop=owns_loop,
            on_progress=on_progress,
        )
        await _start(stack, broker.run)
        yield Embedded(nameserver.address, broker.address, folder, network.connect)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigurationError(
            f"no store can be in {folder}: it or what it lies in is a file; name another folder"
        ) from None


async def _start(stack: AsyncExitStack, run: Callable[..., Coroutine[Any, Any, object]]) -> None:
    """Start a daemon; the stack stops it. Raises what keeps it from starting."""
    from headrace.tasks import Background

    background = Background()
    tasks = await background.start()
    stack.push_async_callback(background.stop)
    reason = None
    try:
        await tasks.start(run)
    except ExceptionGroup as group:
        reason = _only(group)
    # Raised inside, it would have the group that held it as its context.
    if reason:
        raise reason


def _only(error: Exception) -> Exception:
    """What is inside groups of one; a group of several as it is."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _log_to_logging() -> None:
    """Leave the program's own settings alone, and its standard output."""
    import structlog

    if not structlog.is_configured():
        structlog.configure(
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
            logger_factory=structlog.stdlib.LoggerFactory(),
            wrapper_class=structlog.stdlib.BoundLogger,
        )


class _Thread:
    """The daemons on a trio loop of their own."""

    def __init__(self, run_daemons: Callable[[], AbstractAsyncContextManager[Embedded]]) -> None:
        # Not at the top of the file: whoever imports headrace would pay for them.
        import threading
        from concurrent.futures import Future

        self._run_daemons = run_daemons
        self._started: Future[Embedded] = Future()
        self._thread = threading.Thread(target=self._run, name="headrace", daemon=True)
        self._stop: Callable[[], None] = lambda: None
        self._error: BaseException | None = None

    def start(self) -> Embedded:
        """Raises what kept the daemons from starting."""
        self._thread.start()
        return self._started.result()

    def stop(self) -> None:
        """Stop the daemons and wait for their end. Raises what ended them before, if anything."""
        self._stop()
        self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        import trio

        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that started this one
            if self._started.done():
                self._error = error
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        import trio

        async with self._run_daemons() as running:
            stop = trio.Event()
            token = trio.lowlevel.current_trio_token()

            def stop_soon() -> None:
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(stop.set)

            self._stop = stop_soon
            self._started.set_result(running)
            await stop.wait()
