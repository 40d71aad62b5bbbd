"""A real broker and nameserver inside this process, for tests, demos and small programs.

Under trio they run as tasks of the block. Under asyncio and in blocking code they run on a trio
loop in a separate thread.
"""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
    from types import TracebackType

    from headrace.admin.client import Admin
    from headrace.consumer.push import Consumer
    from headrace.producer.producer import Producer
    from headrace.rights import Rule
    from headrace.table.client import Table
    from headrace_broker.config import BrokerConfig
    from headrace_broker.store.recovery import OnProgress
    from headrace_daemon.network import Network
    from headrace_nameserver.config import NameServerConfig
    from headrace_protocol.drivers.aio import Connect

LOOPBACK = "127.0.0.1"
_BROKER_NAME = "broker-a"
# As in ``secured``, which brokers without users do not import.
_ROOT = "root"
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
    passwords: of the users, if requests need one; among them the Super user ``root``, as whom
        clients connect that this object makes without ``user=``.
    """

    nameserver: str
    broker: str
    data: Path
    connect: Connect
    passwords: Mapping[str, str] = MappingProxyType({})

    def __repr__(self) -> str:
        return f"Embedded(nameserver={self.nameserver!r}, broker={self.broker!r})"

    def options(self, **options: Any) -> dict[str, Any]:
        """Arguments with which a client connects, in addition to ``options``."""
        found = {"nameserver": self.nameserver, "connect": self.connect, **options}
        if self.passwords and not found.keys() & {"password", "token", "token_file"}:
            user = found.setdefault("user", _ROOT)
            found["password"] = self.passwords[user] if user else None
        return found

    def producer(self, **options: Any) -> Producer:
        """A Producer for this broker; options are those of ``Producer``."""
        from headrace.producer.producer import Producer

        return Producer(**self.options(**options))

    def consumer(
        self, group: str, topics: str | Iterable[str] | Mapping[str, str], **options: Any
    ) -> Consumer:
        """A Consumer for this broker; options are those of ``Consumer``."""
        from headrace.consumer.push import Consumer

        return Consumer(group, topics, **self.options(**options))

    def table(self, topic: str, **options: Any) -> Table[Any]:
        """A Table of this broker; options are those of ``Table``."""
        from headrace.table.client import Table

        return Table(topic, **self.options(**options))

    def admin(self, **options: Any) -> Admin:
        """An Admin for this broker."""
        from headrace.admin.client import Admin

        return Admin(**self.options(**options))


class embedded:  # noqa: N801 - used like a function
    """Run a broker and a nameserver for the duration of a ``with`` or ``async with`` block.

    data: the store's directory, created if missing and kept afterwards; its files have RocketMQ's
        sizes, so ``headrace broker`` and Apache RocketMQ open it with their defaults. If None, a
        temporary directory with small files, removed at the end.
    memory: use no sockets at all: only clients made by the ``Embedded`` object, or with its
        ``connect``, reach the broker. Requires trio.
    users: the rules of users by name, for tests of them; then each request needs a user. Without
        it, everyone on this machine may do everything.
    jwks_file: public keys of a provider of tokens, a JWK set; users may then log in by its tokens
        for the audience ``headrace``. With ``users`` only.

    The first send to a topic creates it. Logs go to the standard library's ``logging`` as
    ``headrace.*``, unless the program has configured structlog.
    Raises StoreLocked if another broker has the directory open, ConfigurationError if ``data`` is
    a file.
    """

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        memory: bool = False,
        users: Mapping[str, Iterable[Rule]] | None = None,
        jwks_file: str | Path | None = None,
    ) -> None:
        if jwks_file is not None and users is None:
            from headrace.errors import ConfigurationError

            raise ConfigurationError("jwks_file needs users: tokens name users that have rules")
        self._jwks_file = jwks_file
        self._data = None if data is None else Path(data)
        self._memory = memory
        self._users = users
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
        return run_daemons(
            self._data,
            DaemonOptions(users=self._users, jwks_file=self._jwks_file),
            network=MemoryNetwork() if self._memory else TcpNetwork(),
        )


class DaemonOptions(NamedTuple):
    """Settings of both daemons.

    host: address to listen on; anyone who can reach it has full access.
    nameserver_port, broker_port: 0 selects any free port.
    log_file_bytes: size of the log's files in a new store; if None, RocketMQ's.
    settings: more of the broker's settings, by key of its file.
    users: rules of users by name; then each request needs a user. is_encrypted: serve TLS only.
    jwks_file: of a provider whose tokens users may log in by, also without TLS.
    """

    host: str = LOOPBACK
    nameserver_port: int = 0
    broker_port: int = 0
    log_file_bytes: int | None = None
    settings: Mapping[str, str] = MappingProxyType({})
    users: Mapping[str, Iterable[Rule]] | None = None
    is_encrypted: bool = False
    jwks_file: str | Path | None = None


# Folder of passwords and certificates, in that of the store.
SECURITY = "config/security"


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

    from headrace_broker.server import Broker
    from headrace_nameserver.server import NameServer

    options = options or DaemonOptions()
    async with AsyncExitStack() as stack:
        folder = data or Path(stack.enter_context(TemporaryDirectory(prefix="headrace-")))
        _make_directory(folder)
        if options.is_encrypted:
            network = _encrypted(folder / SECURITY, options.host)
        nameserver = NameServer(_nameserver_config(folder, options), network)
        await _start(stack, nameserver.run)
        sizes = _SMALL_FILES if data is None else _file_sizes(data, options.log_file_bytes)
        config = _broker_config(folder, options, namesrv_addr=nameserver.address, **sizes)
        broker = Broker(config, network, owns_loop=owns_loop, on_progress=on_progress)
        await _start(stack, broker.run)
        running = Embedded(nameserver.address, broker.address, folder, network.connect)
        if options.users is None:
            yield running
        else:
            yield await _with_users(running, options.users)


def _nameserver_config(folder: Path, options: DaemonOptions) -> NameServerConfig:
    from headrace_daemon.access.settings import Secret
    from headrace_nameserver.config import NameServerConfig

    return NameServerConfig(
        bind_address=options.host,
        listen_port=options.nameserver_port,
        auth_users_path=str(folder / SECURITY / "nameserver.json"),
        **_access(folder / SECURITY, options, Secret),
    )


def _broker_config(folder: Path, options: DaemonOptions, **settings: Any) -> BrokerConfig:
    from pydantic import SecretStr

    from headrace_broker.config import BrokerConfig

    config = BrokerConfig(
        broker_name=_BROKER_NAME,
        bind_address=options.host,
        listen_port=options.broker_port,
        store_path_root_dir=folder,
        **settings,
        **_access(folder / SECURITY, options, SecretStr),
    )
    return config.changed(options.settings, {}) if options.settings else config


def _encrypted(folder: Path, host: str) -> Network:
    from headrace.secured import server_tls
    from headrace_daemon.network import TcpNetwork

    return TcpNetwork(server_tls(folder, host))


# Of both daemons: Super users as the files of settings name them.
_SECRETS: Final = {
    "init_authentication_user": ("username", "password"),
    "inner_client_authentication_credentials": ("accessKey", "secretKey"),
}


def _access(folder: Path, options: DaemonOptions, secret: Callable[[str], Any]) -> dict[str, Any]:
    """Settings of either daemon. secret: makes a value that is not shown."""
    if options.users is None:
        return {"anonymous_access": "allow"}
    from headrace.secured import INNER, ROOT, credentials

    texts = {
        key: secret(json.dumps(dict(zip(fields, credentials(folder, name), strict=True))))
        for (key, fields), name in zip(_SECRETS.items(), (ROOT, INNER), strict=True)
    }
    tokens = {
        "auth_jwks_file": str(options.jwks_file),
        "auth_jwt_audience": "headrace",
        "auth_requires_tls": "none",
    }
    return {
        "authentication_enabled": True,
        "authorization_enabled": True,
        **texts,
        **({} if options.jwks_file is None else tokens),
    }


async def _with_users(running: Embedded, users: Mapping[str, Iterable[Rule]]) -> Embedded:
    """Make users anew, each with its rules and a random password."""
    from headrace.secured import ROOT, credentials, new_password

    root = credentials(running.data / SECURITY, ROOT).password
    passwords = {ROOT: root} | {name: new_password() for name in users}
    running = running._replace(passwords=passwords)
    if users:
        async with running.admin() as admin:
            known = {name for found in (await admin.users()).values() for name in found}
            for name, rules in users.items():
                if name in known:
                    await admin.delete_user(name)
                await admin.create_user(name, passwords[name])
                if found := list(rules):
                    await admin.set_rules(name, found)
    return running


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
