"""A real broker and nameserver inside this process, for tests, demos and small programs.

Under trio they run as tasks of the block. Under asyncio and in blocking code they run on a trio
loop in a separate thread.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
    from types import TracebackType

    from headrace.admin.client import Admin
    from headrace.consumer.push import Consumer
    from headrace.producer.producer import Producer
    from headrace.table.client import Table
    from headrace_broker.store.recovery import OnProgress
    from headrace_daemon.network import Network
    from headrace_protocol.drivers.aio import Connect

LOOPBACK = "127.0.0.1"
_BROKER_NAME = "broker-a"
# Large enough for the largest message, small on disk and quick to create. They go soon anyway, so a
# full disk is no reason to remove messages before.
_SMALL_FILES: dict[str, Any] = {
    "clean_file_forcibly_enable": False,
    "mapped_file_size_commit_log": 16 * 1024 * 1024,
    "mapped_file_size_consume_queue": 20 * 10_000,
    "max_hash_slot_num": 20_000,
    "max_index_num": 80_000,
}


class Embedded(NamedTuple):
    """A running nameserver and broker.

    nameserver, broker: ``host:port`` of each. data: the store's directory.
    connect: function that connects to them from this process; only with ``memory=True`` do
        clients need it.
    """

    nameserver: str
    broker: str
    data: Path
    connect: Connect

    def producer(self, **options: Any) -> Producer:
        """A Producer for this broker; options are those of ``Producer``."""
        from headrace.producer.producer import Producer

        return Producer(nameserver=self.nameserver, connect=self.connect, **options)

    def consumer(
        self, group: str, topics: str | Iterable[str] | Mapping[str, str], **options: Any
    ) -> Consumer:
        """A Consumer for this broker; options are those of ``Consumer``."""
        from headrace.consumer.push import Consumer

        return Consumer(group, topics, nameserver=self.nameserver, connect=self.connect, **options)

    def table(self, topic: str, **options: Any) -> Table[Any]:
        """A Table of this broker; options are those of ``Table``."""
        from headrace.table.client import Table

        return Table(topic, nameserver=self.nameserver, connect=self.connect, **options)

    def admin(self, **options: Any) -> Admin:
        """An Admin for this broker."""
        from headrace.admin.client import Admin

        return Admin(nameserver=self.nameserver, connect=self.connect, **options)


class embedded:  # noqa: N801 - used like a function
    """Run a broker and a nameserver for the duration of a ``with`` or ``async with`` block.

    data: the store's directory, created if missing and kept afterwards; its files have RocketMQ's
        sizes, so ``headrace broker`` and Apache RocketMQ open it with their defaults. If None, a
        temporary directory with small files, removed at the end.
    memory: use no sockets at all: only clients made by the ``Embedded`` object, or with its
        ``connect``, reach the broker. Requires trio.

    The first send to a topic creates it. Logs go to the standard library's ``logging`` as
    ``headrace.*``, unless the program has configured structlog.
    Raises StoreLocked if another broker has the directory open, ConfigurationError if ``data`` is
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
            from headrace.errors import ConfigurationError

            raise ConfigurationError(
                "memory=True requires trio; without trio the broker runs in its own thread, "
                "reachable only through sockets, so omit memory"
            )
        self._thread = _Thread(self._run_daemons)
        return self._thread

    def _run_daemons(self) -> AbstractAsyncContextManager[Embedded]:
        from headrace_daemon.network import MemoryNetwork, TcpNetwork

        _log_to_logging()
        return run_daemons(self._data, network=MemoryNetwork() if self._memory else TcpNetwork())


class DaemonOptions(NamedTuple):
    """Settings of both daemons.

    host: address to listen on; anyone who can reach it has full access.
    nameserver_port, broker_port: 0 selects any free port.
    log_file_bytes: size of the log's files in a new store; if None, RocketMQ's.
    settings: more of the broker's settings, by key of its file.
    """

    host: str = LOOPBACK
    nameserver_port: int = 0
    broker_port: int = 0
    log_file_bytes: int | None = None
    settings: Mapping[str, str] = MappingProxyType({})


@asynccontextmanager
async def run_daemons(
    data: Path | None,
    options: DaemonOptions | None = None,
    *,
    network: Network,
    owns_loop: bool = False,
    on_progress: OnProgress | None = None,
) -> AsyncIterator[Embedded]:
    """Run both daemons as tasks of the block, under trio; see ``embedded``.

    owns_loop: the process does nothing else; see ``RemotingServer``.
    on_progress: see ``Broker``; if None, progress is logged.
    Raises OSError (address), StoreError (directory), ConfigurationError (``data`` is a file).
    """
    from tempfile import TemporaryDirectory

    from headrace_broker.config import BrokerConfig
    from headrace_broker.server import Broker
    from headrace_nameserver.config import NameServerConfig
    from headrace_nameserver.server import NameServer

    options = options or DaemonOptions()
    async with AsyncExitStack() as stack:
        folder = data or Path(stack.enter_context(TemporaryDirectory(prefix="headrace-")))
        _make_directory(folder)
        nameserver = NameServer(
            NameServerConfig(
                bind_address=options.host,
                anonymous_access="allow",
                listen_port=options.nameserver_port,
            ),
            network,
        )
        await _start(stack, nameserver.run)
        config = BrokerConfig(
            broker_name=_BROKER_NAME,
            bind_address=options.host,
            anonymous_access="allow",
            listen_port=options.broker_port,
            namesrv_addr=nameserver.address,
            store_path_root_dir=folder,
            **(_SMALL_FILES if data is None else _file_sizes(data, options.log_file_bytes)),
        )
        broker = Broker(
            config.changed(options.settings, {}) if options.settings else config,
            network,
            owns_loop=owns_loop,
            on_progress=on_progress,
        )
        await _start(stack, broker.run)
        yield Embedded(nameserver.address, broker.address, folder, network.connect)


def _file_sizes(data: Path, log_file_bytes: int | None) -> dict[str, int]:
    """The log's file size: a store keeps that of its first start."""
    from headrace_broker.config import BrokerConfig
    from headrace_broker.store_tools.directory import log_file_bytes as found

    default = log_file_bytes or BrokerConfig().mapped_file_size_commit_log
    return {"mapped_file_size_commit_log": found(data, default)}


def _make_directory(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        from headrace.errors import ConfigurationError

        raise ConfigurationError(
            f"{folder} cannot hold a store: it or a parent of it is a file; name another one"
        ) from None


async def _start(stack: AsyncExitStack, run: Callable[..., Coroutine[Any, Any, object]]) -> None:
    """Start a daemon, to be stopped by the stack. Raises the error that prevented the start."""
    from headrace.tasks import Background, sole_error

    background = Background()
    tasks = await background.start()
    stack.push_async_callback(background.stop)
    reason: BaseException | None = None
    try:
        await tasks.start(run)
    except ExceptionGroup as group:
        reason = sole_error(group)
    # Raised inside the except block, the error would have its group as context.
    if reason:
        raise reason


def _log_to_logging() -> None:
    """Send logs to ``logging``, without touching the program's own settings or its stdout."""
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
    """A thread that runs the daemons on its own trio loop."""

    def __init__(self, run_daemons: Callable[[], AbstractAsyncContextManager[Embedded]]) -> None:
        # Imported here to keep `import headrace` cheap.
        import threading
        from concurrent.futures import Future

        self._run_daemons = run_daemons
        self._started: Future[Embedded] = Future()
        self._thread = threading.Thread(target=self._run, name="headrace", daemon=True)
        self._stop: Callable[[], None] = lambda: None
        self._error: BaseException | None = None

    def start(self) -> Embedded:
        """Start the daemons and wait for them. Raises the error that prevented the start."""
        self._thread.start()
        return self._started.result()

    def stop(self) -> None:
        """Stop the daemons and wait for them. Raises the error, if any, that ended them earlier."""
        self._stop()
        self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        import trio

        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - re-raised in the starting thread
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
