"""The SQL92 filters that groups have registered: config/consumerFilter.json.

A heartbeat registers the filters of its group, and is answered when they are on disk. A filter is
dead when the last member of its group has left, and is removed a day later, as in Apache's broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from headrace_broker.consumer.bloom_positions import BIT_COUNT, bit_positions
from headrace_broker.consumer.filters import Filter, filter_of, is_by_tag, sql_expression
from headrace_broker.persistence import SavedFile, load_table
from headrace_protocol import fastjson
from headrace_protocol.bodies import ConsumerFilterData, ConsumerFilterWrapper, TopicFilters
from headrace_protocol.bounds import NAME_CHARS_MAX
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.message import RETRY_TOPIC
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.consumer.filters import FilterPolicy
    from headrace_broker.host_budget import Host, HostBudget
    from headrace_broker.persistence import NowMs
    from headrace_broker.store.files.config_file import ConfigFile
    from headrace_protocol.bodies import SubscriptionData
    from headrace_protocol.filters.expression import Expression

FILTER_NAME: Final = "consumerFilter.json"
DEAD_LIFE_MS: Final = 24 * 3600 * 1000
# Time between two looks at all filters for dead ones.
PRUNE_INTERVAL_MS: Final = 60_000
# Memory of a filter without its text.
_FILTER_BYTES: Final = 4096
_TABLE: Final = "filterDataByTopic"


class _Entry(msgspec.Struct, frozen=True):
    """A registered filter. others: fields of the file that only another broker knows."""

    data: ConsumerFilterData
    others: dict[str, Any]

    def changed(self, **fields: Any) -> _Entry:
        """A copy with some fields of the data replaced."""
        return _Entry(msgspec.structs.replace(self.data, **fields), self.others)


class _Loaded(NamedTuple):
    """The file: its entries by group and topic, and fields that only another broker knows.

    fields: of the file. topics: of each topic.
    """

    entries: dict[tuple[str, str], _Entry]
    fields: dict[str, Any]
    topics: dict[str, dict[str, Any]]


class FilterTable:
    """The registered filters, by group and topic; an entry is replaced, never changed.

    saved: the table's file.
    """

    def __init__(
        self, policy: FilterPolicy, file: ConfigFile, now_ms: NowMs, budget: HostBudget
    ) -> None:
        """Load the table. Raises StoreFormatError if its file can't be read."""
        self.saved = SavedFile(file, self._snapshot)
        self._policy = policy
        self._now_ms = now_ms
        self._budget = budget
        loaded, self._fields, self._topics = load_table(file, _parse) or _Loaded({}, {}, {})
        # Members introduce themselves again; until then all filters are dead, as in the peer.
        now_ms_ = self._pruned_ms = now_ms()
        self._groups: dict[str, dict[str, _Entry]] = {}
        for (group, topic), entry in loaded.items():
            dead_time = entry.data.dead_time or now_ms_
            if now_ms_ - dead_time < DEAD_LIFE_MS:
                entry = entry.changed(dead_time=dead_time, dead=True)  # noqa: PLW2901
                self._groups.setdefault(group, {})[topic] = entry

    # -- registration ------------------------------------------------------------------------------

    def register(
        self, group: str, subscriptions: Iterable[SubscriptionData], host: Host
    ) -> list[RequestError]:
        """Adopt the filters of a heartbeat, which are to be saved before its answer.

        Returns an error for each that can't be evaluated; the others are adopted.
        """
        wanted = {each.topic: each for each in subscriptions if not is_by_tag(each.expression_type)}
        known = self._groups.get(group, {})
        refusals: list[RequestError] = []
        if not wanted and not known:
            return refusals
        for topic, subscription in wanted.items():
            try:
                self._register(group, subscription, known.get(topic), host)
            except RequestError as error:
                remark = f"group {group}, topic {topic[:NAME_CHARS_MAX]}: {error.remark}"
                refusals.append(RequestError(error.code, remark))
        self._end(group, known.keys() - wanted.keys())
        return refusals

    def _register(
        self, group: str, wanted: SubscriptionData, known: _Entry | None, host: Host
    ) -> None:
        data = known.data if known is not None else None
        is_newer = data is None or wanted.sub_version > data.client_version
        if data is not None and not data.dead and not is_newer:
            return
        filter_of(wanted.sub_string, wanted.expression_type, self._policy)
        topic, now_ms = wanted.topic, self._now_ms()
        entry_bytes = _FILTER_BYTES + 2 * len(wanted.sub_string)
        self._budget.keep(host, ("filter", group, topic), entry_bytes)
        is_same = data is not None and data.expression == wanted.sub_string
        if known is not None and (is_same or not is_newer):
            version = max(known.data.client_version, wanted.sub_version)
            entry = known.changed(client_version=version, dead_time=0, dead=False)
        else:
            entry = _Entry(_new_data(group, wanted, now_ms), known.others if known else {})
        self._groups.setdefault(group, {})[topic] = entry
        self._prune(now_ms)
        self.saved.changed()

    def is_unsaved(self, group: str) -> bool:
        """True if filters of a group may not be on disk yet."""
        return group in self._groups and not self.saved.is_saved

    def left(self, group: str) -> None:
        """The last member of a group has left."""
        self._end(group, self._groups.get(group, {}).keys())

    def _end(self, group: str, topics: Iterable[str]) -> None:
        entries, now_ms, has_changed = self._groups.get(group, {}), self._now_ms(), False
        for topic in list(topics):
            if not entries[topic].data.dead:
                entries[topic] = entries[topic].changed(dead_time=now_ms, dead=True)
                has_changed = True
        if has_changed:
            self._prune(now_ms)
            self.saved.changed()

    def _prune(self, now_ms: int) -> None:
        """Remove what has been dead for a day, at most once a minute."""
        if 0 <= now_ms - self._pruned_ms < PRUNE_INTERVAL_MS:
            return
        self._pruned_ms = now_ms
        for group, entries in list(self._groups.items()):
            for topic, entry in list(entries.items()):
                if entry.data.dead and now_ms - entry.data.dead_time >= DEAD_LIFE_MS:
                    del entries[topic]
                    self._budget.drop(("filter", group, topic))
            if not entries:
                del self._groups[group]

    def check(self, subscription: SubscriptionData) -> None:
        """Raise RequestError for a subscription that this broker can't evaluate."""
        filter_of(subscription.sub_string, subscription.expression_type, self._policy)

    def shown(self, group: str, topic: str) -> str:
        """A registered filter as JSON; ``null`` if there is none."""
        known = self._groups.get(group, {}).get(topic)
        return "null" if known is None else msgspec.json.format(known.data.encode()).decode()

    # -- filters of pulls --------------------------------------------------------------------------

    def of_pull(
        self, group: str, topic: str, text: str | None, expression_type: str | None
    ) -> Filter:
        """The filter of a subscription that came with its pull. Raises RequestError."""
        return self._with_retries(group, topic, filter_of(text, expression_type, self._policy))

    def of_group(self, group: str, subscription: SubscriptionData, version: int) -> Filter:
        """The filter of a group's heartbeats, for a pull that names a version of it.

        Raises RequestError.
        """
        topic, kind = subscription.topic, subscription.expression_type
        # The reason for a missing registration comes first.
        wanted = filter_of(subscription.sub_string, kind, self._policy)
        if is_by_tag(kind):
            return self._with_retries(group, topic, wanted)
        known = self._groups.get(group, {}).get(topic)
        if known is None or known.data.dead:
            raise RequestError(
                ResponseCode.FILTER_DATA_NOT_EXIST,
                "The broker's consumer filter data is not exist!Your expression may be wrong! "
                f"group {group}, topic {topic}: send a heartbeat with the subscription",
            )
        if known.data.client_version < version:
            raise RequestError(
                ResponseCode.FILTER_DATA_NOT_LATEST,
                f"the consumer's consumer filter data not latest: group {group} pulls {topic} with "
                f"version {version}, registered is {known.data.client_version}",
            )
        if known.data.expression != subscription.sub_string:
            wanted = Filter(None, sql_expression(known.data.expression))
        return wanted

    def _with_retries(self, group: str, topic: str, found: Filter) -> Filter:
        """A filter that is also applied to retries, by the topics that they come from."""
        if not self._policy.filter_support_retry or not topic.startswith(RETRY_PREFIX):
            return found
        live = {
            of_topic: sql_expression(entry.data.expression)
            for of_topic, entry in self._groups.get(group, {}).items()
            if not entry.data.dead
        }
        if not live or found != Filter(None):
            return found
        return Filter(None, _of_retries(live))

    # -- the file ----------------------------------------------------------------------------------

    def _snapshot(self) -> Callable[[], bytes]:
        rows = [entry for entries in self._groups.values() for entry in entries.values()]
        fields, topics = self._fields, self._topics
        return lambda: fastjson.dumps({**fields, _TABLE: _by_topic(rows, topics)}, pretty=True)


def _of_retries(live: dict[str, Expression]) -> Expression:
    from headrace_protocol.filters.expression import for_values

    return for_values(RETRY_TOPIC, live)


def _new_data(group: str, wanted: SubscriptionData, now_ms: int) -> ConsumerFilterData:
    positions = bit_positions(group, wanted.topic)
    return ConsumerFilterData(
        topic=wanted.topic,
        consumer_group=group,
        expression=wanted.sub_string,
        expression_type=wanted.expression_type,
        client_version=wanted.sub_version,
        born_time=now_ms,
        bloom_filter_data={"bitNum": BIT_COUNT, "bitPos": positions},
    )


def _by_topic(rows: list[_Entry], topics: dict[str, dict[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for data, others in ((row.data, row.others) for row in rows):
        new = {**topics.get(data.topic, {}), "groupFilterData": {}, "topic": data.topic}
        topic = table.setdefault(data.topic, new)
        topic["groupFilterData"][data.consumer_group] = {**others, **_fields(data)}
    return table


def _fields(data: ConsumerFilterData) -> dict[str, Any]:
    values = zip(data.__struct_encode_fields__, msgspec.structs.astuple(data), strict=True)
    return {name: value for name, value in values if value is not None}


def _parse(text: bytes) -> _Loaded:
    """Raises ValueError."""
    fields = fastjson.loads(text)
    entries, topics = {}, {}
    for topic, saved in ConsumerFilterWrapper.decode(text).filter_data_by_topic.items():
        topics[topic] = _others(fields[_TABLE].get(topic, {}), TopicFilters)
        for group, values in saved.group_filter_data.items():
            data = msgspec.convert(values, ConsumerFilterData, strict=False)
            data = msgspec.structs.replace(data, topic=topic, consumer_group=group)
            entries[group, topic] = _Entry(data, _others(values, ConsumerFilterData))
    return _Loaded(entries, _others(fields, ConsumerFilterWrapper), topics)


def _others(fields: dict[str, Any], known: type[msgspec.Struct]) -> dict[str, Any]:
    names = known.__struct_encode_fields__
    return {name: value for name, value in fields.items() if name not in names}
