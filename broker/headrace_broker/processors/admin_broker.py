"""Requests about the broker itself: runtime info, settings, and tables for slaves to copy.

Source: docs/protocol.md "Broker"; tests/broker/processors/test_admin_broker.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headrace_broker.config import ConfigError
from headrace_broker.persistence import next_version
from headrace_broker.settings.files import is_key, not_reloadable, parse_properties
from headrace_broker.settings.listing import RELOADABLE
from headrace_broker.settings.of_store import retention
from headrace_broker.settings.setting import Effect
from headrace_protocol import __version__, fastjson
from headrace_protocol.admin_headers import GetBrokerConfigResponseHeader
from headrace_protocol.bodies import DataVersion, KVTable
from headrace_protocol.bounds import check_items
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import VERSION
from headrace_protocol.errors import RequestError
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import ready

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.persistence import NowMs
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.serving import Registry, Request

# Called with a request, and old and new value of each setting that it has changed.
OnSettings = Callable[["Request", Mapping[str, tuple[str, str]]], None]

_SECOND_MS = 1000
# Lines in one change of settings; there are about 200 settings.
_CHANGES_MAX = 1000
# Thread pools of the peer, which its tools show; this broker has none.
_NO_QUEUES = dict.fromkeys(
    (
        "sendThreadPoolQueueSize",
        "pullThreadPoolQueueSize",
        "queryThreadPoolQueueSize",
        "ackThreadPoolQueueSize",
        "sendThreadPoolQueueCapacity",
        "pullThreadPoolQueueCapacity",
        "queryThreadPoolQueueCapacity",
        "ackThreadPoolQueueCapacity",
        "sendThreadPoolQueueHeadWaitTimeMills",
        "pullThreadPoolQueueHeadWaitTimeMills",
        "queryThreadPoolQueueHeadWaitTimeMills",
        "ackThreadPoolQueueHeadWaitTimeMills",
        "pageCacheLockTimeMills",
    ),
    "0",
)


# What was read is found, and counted once; the old spelling is that of RocketMQ up to 4.9.
_GET_RATES = ("getTransferredTps", "getTransferedTps", "getFoundTps", "getTotalTps")
_NO_RATES = "0.00 0.00 0.00"
# The log and the queues have one disk.
_DISK_RATIOS = ("commitLogDiskRatio", "consumeQueueDiskRatio")
# Figures that tools read without looking whether they are there, and that nobody measures here.
_NOT_MEASURED = {
    "putMessageDistributeTime": "",
    "getMessageEntireTimeMax": "0",
    "putMessageEntireTimeMax": "0",
    "dispatchMaxBuffer": "0",
    # Sends are accepted from the start, and no buffers run out: as the peer says it by default.
    "startAcceptSendRequestTimeStamp": "0",
    "remainTransientStoreBufferNumbs": str(2**31 - 1),
}


class AdminBrokerProcessor:
    """Serves requests about the broker."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        topics: TopicTable,
        offsets: ConsumerOffsets,
        statistics: BrokerStatistics,
        now_ms: NowMs,
        changes: HostLog,
        health: Callable[[], Mapping[str, str]] = dict,
        on_settings: OnSettings | None = None,
    ) -> None:
        """health: further values for the runtime info. on_settings: called after each change."""
        self._config = config
        self._store = store
        self._topics = topics
        self._offsets = offsets
        self._statistics = statistics
        self._now_ms = now_ms
        self._changes = changes
        self._health = health
        self._on_settings = on_settings
        self._effects = {
            Effect.RETENTION: self._limit_retention,
            Effect.REGISTRATION: topics.registration_changed,
        }
        self._started_ms = now_ms()
        self._config_version = next_version(DataVersion(), self._started_ms)

    def register(self, registry: Registry) -> None:
        """Route the requests about the broker."""
        registry.route(RequestCode.GET_BROKER_RUNTIME_INFO, self.runtime_info)
        registry.route(RequestCode.GET_BROKER_CONFIG, self.config)
        registry.route(RequestCode.UPDATE_BROKER_CONFIG, self.update_config)
        registry.route(RequestCode.TRIGGER_DELETE_FILES, self.delete_expired_files)
        registry.route(RequestCode.DELETE_EXPIRED_COMMITLOG, self.delete_expired_files)
        registry.route_long(RequestCode.GET_ALL_CONSUMER_OFFSET, self.all_consumer_offsets)

    # -- runtime info ------------------------------------------------------------------------------

    async def runtime_info(self, _request: Request) -> Reply:
        """GET_BROKER_RUNTIME_INFO: values under the names that the peer's tools expect."""
        table = await ready(self._runtime_info)
        return Reply(body=(KVTable(table=table).encode(),))

    def _runtime_info(self) -> dict[str, str]:
        return {
            **_NO_QUEUES,
            **_NOT_MEASURED,
            **self._broker_info(),
            **self._message_info(),
            **self._store_info(),
            **self._health(),
        }

    def _broker_info(self) -> dict[str, str]:
        running_ms = self._now_ms() - self._started_ms
        return {
            "brokerVersionDesc": f"headrace {__version__}",
            "brokerVersion": str(VERSION),
            "brokerActive": "true",
            "bootTimestamp": str(self._started_ms),
            "currentTimestamp": str(self._now_ms()),
            "runtime": _duration(running_ms),
        }

    def _message_info(self) -> dict[str, str]:
        puts, gets = self._statistics.puts, self._statistics.gets
        return {
            "putTps": self._statistics.rates(puts),
            **dict.fromkeys(_GET_RATES, self._statistics.rates(gets)),
            "getMissTps": _NO_RATES,
            "msgPutTotalYesterdayMorning": str(puts.yesterday_morning),
            "msgPutTotalTodayMorning": str(puts.today_morning),
            "msgPutTotalTodayNow": str(puts.count),
            "msgGetTotalYesterdayMorning": str(gets.yesterday_morning),
            "msgGetTotalTodayMorning": str(gets.today_morning),
            "msgGetTotalTodayNow": str(gets.count),
            "putMessageAverageSize": f"{puts.body_bytes / max(puts.count, 1):.1f}",
            "putMessageTimesTotal": str(puts.count),
            "getMessageTransferredMsgCount": str(gets.count),
            "putMessageSizeTotal": str(puts.body_bytes),
        }

    def _store_info(self) -> dict[str, str]:
        store, disk = self._store.statistics(), self._store.disk_usage()
        info = {
            "commitLogDirCapacity": f"Total : {_size(disk.used_bytes + disk.usable_bytes)}, "
            f"Free : {_size(disk.usable_bytes)}.",
            "commitLogMinOffset": str(store.min_offset),
            "commitLogMaxOffset": str(store.max_offset),
            **dict.fromkeys(_DISK_RATIOS, f"{store.disk_ratio:.4f}"),
            "remainHowManyDataToFlush": f"{store.max_offset - store.flushed_offset} B",
            "dispatchBehindBytes": str(store.max_offset - store.dispatched_offset),
            "dispatchBehindMessages": str(store.behind_rows["consumequeue"]),
            "indexBehindMessages": str(store.behind_rows["index"]),
            "queueCount": str(store.queue_count),
            "refusesWrites": store.refusal or "no",
            "filesRemoved": str(store.cleaner.removed_files),
            "filesWaitingForReaders": str(store.cleaner.waiting_files),
            "oldestUnconsumed": store.cleaner.oldest_unconsumed,
        }
        if store.refusal is not None:
            info["refusesWritesSince"] = str(store.refused_since_ms)
        if store.cleaner.full_in_hours is not None:
            info["diskFullInHours"] = f"{store.cleaner.full_in_hours:.1f}"
        earliest_ms = self._store.commit_log.store_timestamp_at(store.min_offset)
        info["earliestMessageTimeStamp"] = str(-1 if earliest_ms is None else earliest_ms)
        return info

    # -- settings ----------------------------------------------------------------------------------

    def config(self, _request: Request) -> Reply:
        """GET_BROKER_CONFIG: all settings, in the format of the broker's file."""
        lines = [f"{key}={value}\n" for key, value in self._config.as_text().items()]
        header = GetBrokerConfigResponseHeader(version=self._config_version.encode().decode())
        return Reply(header, ("".join(lines).encode(),))

    def update_config(self, request: Request) -> Reply:
        """UPDATE_BROKER_CONFIG: change reloadable settings, all or none."""
        changes = _read_changes(request)
        for key in changes:
            if key not in RELOADABLE:
                code = ResponseCode.NO_PERMISSION if is_key(key) else ResponseCode.INVALID_PARAMETER
                raise RequestError(code, not_reloadable(key))
        before = self._config.as_text()
        try:
            effects = self._config.update(changes)
        except ConfigError as error:
            raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from None
        self._config_version = next_version(self._config_version, self._now_ms())
        for effect in effects:
            self._effects[effect]()
        self._changes.info(request.channel.address, "settings changed", **changes)
        if self._on_settings is not None:
            self._on_settings(request, _differences(before, self._config.as_text()))
        return Reply()

    def _limit_retention(self) -> None:
        self._store.cleaner.retention = retention(self._config)

    def delete_expired_files(self, request: Request) -> Reply:
        """TRIGGER_DELETE_FILES, DELETE_EXPIRED_COMMITLOG: remove old files now, at any hour."""
        self._store.cleaner.request()
        self._changes.info(request.channel.address, "removal of old files requested")
        return Reply()

    # -- tables ------------------------------------------------------------------------------------

    async def all_consumer_offsets(self, _request: Request) -> Reply:
        """GET_ALL_CONSUMER_OFFSET: progress of all groups, for slaves."""
        offsets = self._offsets
        body = {
            "dataVersion": offsets.data_version,
            "groupTopicMap": await fastjson.dumps_sliced(offsets.topics_by_group()),
            "offsetTable": await fastjson.dumps_sliced(offsets.committed()),
            "pullOffsetTable": await fastjson.dumps_sliced(offsets.pulled()),
        }
        return Reply(body=fastjson.dumps_parts(body))


def _read_changes(request: Request) -> Mapping[str, str]:
    try:
        text = str(request.body, "utf-8")
        check_items("lines", text.splitlines(), _CHANGES_MAX)
        values, _ = parse_properties(text, "body")
    except (ConfigError, UnicodeDecodeError) as error:
        raise RequestError(ResponseCode.INVALID_PARAMETER, str(error)) from None
    if not values:
        raise RequestError(ResponseCode.INVALID_PARAMETER, "nothing to change: send key=value")
    return values


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Old and new value of each setting that has changed."""
    return {key: (old, new) for key, new in after.items() if (old := before.get(key, "")) != new}


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.1f} GiB"


def _duration(duration_ms: int) -> str:
    seconds = duration_ms // _SECOND_MS
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"
