"""A store that should be there: with its disk unmounted, a broker must not begin an empty one.

Looked for before the store is opened, so that nothing is created below the mount. Nameservers that
don't answer then are asked later.
Source: docs/operations.md "A store that is not there"; tests/broker/cluster/test_expected_store.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from headrace_broker.config import ConfigError
from headrace_broker.peers.connect import connected
from headrace_broker.peers.nameservers import DEPARTED, departed_in
from headrace_broker.store.errors import StoreMissing
from headrace_broker.store.files.config_file import ConfigFile
from headrace_protocol.drivers.errors import BrokerError, HeadraceError, MalformedAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.config import BrokerConfig
    from headrace_broker.peers.nameservers import Nameservers
    from headrace_daemon.network import Network
    from headrace_protocol.departed import DepartedBroker

log = structlog.get_logger("headrace.broker")

_TIMEOUT_S = 5.0
_TOPICS_NAMED_MAX = 3


def check_store(config: BrokerConfig) -> None:
    """Raise ConfigError if there should be a store and is none."""
    root = config.store_path_root_dir
    if config.expect_store and not _has_store(config):
        reason = "there is no store, and expectStore=true: mount its disk, or set expectStore=false"
        raise ConfigError([f"storePathRootDir={root}: {reason} to begin an empty one"])


async def check_never_left(config: BrokerConfig, network: Network) -> frozenset[str]:
    """Raise StoreMissing if there is no store, and a nameserver remembers this broker's topics.

    Returns the nameservers that can't tell, because they don't answer.
    """
    has_store = _has_store(config)
    asked = _begun_without(config) if has_store else frozenset(config.nameservers)
    missing: list[StoreMissing] = []
    silent: list[str] = []

    async def look(nameserver: str) -> None:
        try:
            with trio.fail_after(_TIMEOUT_S):
                departed = await _departed(config, network, nameserver)
        except (HeadraceError, trio.TooSlowError) as error:
            log.warning(
                "a new store begins, and a nameserver can't tell whether there was one",
                path=str(config.store_path_root_dir),
                nameserver=nameserver,
                reason=str(error) or f"no answer within {_TIMEOUT_S:g} s",
            )
            silent.append(nameserver)
        else:
            if departed is not None:
                missing.append(_error(config, departed, nameserver, is_begun=has_store))

    async with trio.open_nursery() as nursery:
        for nameserver in asked:
            nursery.start_soon(look, nameserver)
    if missing:
        raise missing[0]
    return frozenset(silent)


class BegunWithout:
    """The nameservers that could not tell whether there was a store when this one began.

    Each is asked when it answers, before the broker registers there, which would make it forget.
    Until then a file names them. If one remembers topics of this broker, the store refuses
    messages, and the broker registers nowhere: clients learn that messages are missing.
    """

    def __init__(
        self,
        config: BrokerConfig,
        nameservers: Nameservers,
        stop_writing: Callable[[str], None],
    ) -> None:
        """stop_writing: makes the store refuse messages until the next start."""
        self._config = config
        self._nameservers = nameservers
        self._stop_writing = stop_writing
        self._unasked = _begun_without(config)
        self._missing: dict[str, StoreMissing] = {}

    async def look(self, nameserver: str) -> None:
        """Ask a nameserver that could not tell. Raises StoreMissing, HeadraceError."""
        if nameserver in self._unasked:
            await self._ask(nameserver)
        for error in self._missing.values():
            raise error

    async def _ask(self, nameserver: str) -> None:
        config = self._config
        try:
            departed = _own(config, await self._nameservers.departed(nameserver))
        except (BrokerError, MalformedAnswer):  # another kind of nameserver; it was a warning
            departed = None
        if departed is not None:
            error = _error(config, departed, nameserver, is_begun=True)
            if not self._missing:
                self._stop_writing(f"{error}; then restart it")
            self._missing[nameserver] = error
            return
        self._missing.pop(nameserver, None)
        self._unasked -= {nameserver}
        await trio.to_thread.run_sync(keep_begun_without, config, self._unasked)


def keep_begun_without(config: BrokerConfig, nameservers: frozenset[str]) -> None:
    """Keep the nameservers that could not tell; without any there is no file."""
    file = _begun_file(config)
    if nameservers:
        file.save("\n".join(sorted(nameservers)).encode())
        return
    for path in (file.path, file.backup_path):
        path.unlink(missing_ok=True)


def _begun_without(config: BrokerConfig) -> frozenset[str]:
    """As the file has it, of those that the broker still has."""
    text = _begun_file(config).load() or b""
    return frozenset(text.decode().split()) & frozenset(config.nameservers)


def _begun_file(config: BrokerConfig) -> ConfigFile:
    return ConfigFile(config.store_path_root_dir / "config" / "begunWithout")


def _has_store(config: BrokerConfig) -> bool:
    return (config.store_path_root_dir / "commitlog").is_dir()


def _own(config: BrokerConfig, found: Iterable[DepartedBroker]) -> DepartedBroker | None:
    """This broker as a nameserver remembers it, if it had topics."""
    own = (config.broker_name, config.broker_cluster_name)
    same = (each for each in found if (each.broker_name, each.cluster) == own and each.topics)
    return next(same, None)


async def _departed(
    config: BrokerConfig, network: Network, nameserver: str
) -> DepartedBroker | None:
    """This broker as a nameserver remembers it. Raises HeadraceError."""
    inner = config.access_config().inner
    async with connected(network.connect, nameserver, inner) as connection:
        response = await connection.request(*DEPARTED, timeout_ms=_TIMEOUT_S * 1000)
    return _own(config, departed_in(response))


def _error(
    config: BrokerConfig, departed: DepartedBroker, nameserver: str, *, is_begun: bool
) -> StoreMissing:
    """is_begun: whether a store has begun meanwhile."""
    topics = departed.topics or []
    named = ", ".join(topics[:_TOPICS_NAMED_MAX])
    more = ", ..." if len(topics) > _TOPICS_NAMED_MAX else ""
    return StoreMissing(
        config.store_path_root_dir,
        f"nameserver {nameserver} remembers broker {departed.broker_name} with topics "
        f"({named}{more}); it {departed.left}",
        f"headrace broker forget {departed.broker_name}",
        "has begun anew" if is_begun else "is empty",
    )
