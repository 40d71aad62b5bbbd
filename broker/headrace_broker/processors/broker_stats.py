"""Requests of mqadmin and dashboards about a broker: 305, 306, 315, 316, 907, 2004, 5001.

Source: docs/protocol.md "Broker"; tests/broker/processors/test_dashboard.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_broker.statistics import WINDOWS_S
from headrace_protocol import fastjson
from headrace_protocol.admin_headers import SetReadModeHeader, ViewBrokerStatsHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.rights.late import visible_topics
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.statistics import BrokerStatistics, Counter
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.serving import Registry, Request

_WINDOWS: Final = ("statsMinute", "statsHour", "statsDay")
_READ_MODES: Final = ("0", "1")


class BrokerStatsProcessor:
    """Serves what only tools ask about the broker."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        topics: TopicTable,
        statistics: BrokerStatistics,
        changes: HostLog,
    ) -> None:
        self._config = config
        self._store = store
        self._topics = topics
        self._statistics = statistics
        self._changes = changes

    def register(self, registry: Registry) -> None:
        """Route the requests."""
        registry.route_long(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, self.system_topics)
        registry.route(RequestCode.VIEW_BROKER_STATS_DATA, self.stats)
        registry.route(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, self.clean_queues)
        registry.route(RequestCode.CLEAN_UNUSED_TOPIC, self.clean_topics)
        registry.route(RequestCode.GET_BROKER_HA_STATUS, self.ha_status)
        registry.route(RequestCode.SET_COMMITLOG_READ_MODE, self.read_mode)
        registry.route(RequestCode.SWITCH_TIMER_ENGINE, self.timer_engine)

    async def system_topics(self, request: Request) -> Reply:
        """GET_SYSTEM_TOPIC_LIST_FROM_BROKER: the topics that the broker has made for itself."""
        names = (topic.topic_name for topic in self._topics.all())
        system = sorted(name for name in names if self._topics.is_system(name))
        visible = list(await visible_topics(request, system, str))
        return Reply(body=fastjson.dumps_parts({"topicList": visible}))

    def stats(self, request: Request) -> Reply:
        """VIEW_BROKER_STATS_DATA: sum and rate of a counter for a minute, an hour and a day."""
        header = request.header(ViewBrokerStatsHeader)
        of, _, kind = header.stats_name.rpartition("_")
        counter = self._counter(of, header.stats_key)
        if counter is None or kind not in ("NUMS", "SIZE"):
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"The stats <{header.stats_name}> <{header.stats_key}> not exist",
            )
        body = {}
        for name, window_s in zip(_WINDOWS, WINDOWS_S, strict=True):
            sums = self._statistics.sums(counter, window_s)
            value = sums.body_bytes if kind == "SIZE" else sums.messages
            body[name] = {
                "avgpt": value / max(sums.messages, 1),
                "sum": value,
                "tps": value / sums.seconds,
            }
        return Reply(body=(fastjson.dumps(body),))

    def _counter(self, of: str, key: str) -> Counter | None:
        """The counter that Apache's brokers have under a name and a key."""
        statistics = self._statistics
        if of == "TOPIC_PUT":
            return statistics.topic_puts.get(key)
        if of in ("GROUP_GET", "SNDBCK_PUT"):
            topic, _, group = key.partition("@")
            found = statistics.group_gets if of == "GROUP_GET" else statistics.send_backs
            return found.get((group, topic))
        if key != self._config.broker_cluster_name:
            return None
        return {"BROKER_PUT": statistics.puts, "BROKER_GET": statistics.gets}.get(of)

    def clean_queues(self, request: Request) -> Reply:
        """CLEAN_EXPIRED_CONSUMEQUEUE: remove what has expired now, of the log and its queues."""
        self._store.cleaner.request()
        self._changes.info(request.channel.address, "removal of old files requested")
        return Reply()

    def clean_topics(self, _request: Request) -> Reply:
        """CLEAN_UNUSED_TOPIC: nothing to do, since a deleted topic takes its queues with it."""
        return Reply()

    def ha_status(self, _request: Request) -> Reply:
        """GET_BROKER_HA_STATUS: a master without slaves."""
        body = {
            "haClientRuntimeInfo": {},
            "haConnectionInfo": [],
            "inSyncSlaveNums": 0,
            "master": True,
            "masterCommitLogMaxOffset": self._store.commit_log.max_offset,
        }
        return Reply(body=(fastjson.dumps(body),))

    def read_mode(self, request: Request) -> Reply:
        """SET_COMMITLOG_READ_MODE: has no effect, since reads choose their own read-ahead."""
        mode = request.header(SetReadModeHeader).mode
        if mode not in _READ_MODES:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER, f"READ_AHEAD_MODE={mode}: expected 0 or 1"
            )
        return Reply(remark="taken without effect: reads choose their own read-ahead")

    def timer_engine(self, _request: Request) -> Reply:
        """SWITCH_TIMER_ENGINE: there is one engine."""
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            "switch timer engine failed: this broker has timers in files only, none in RocksDB",
        )
