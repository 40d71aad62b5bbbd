"""Settings of consumer groups: config/subscriptionGroup.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_broker.consumer.own_groups import check_not_own
from headrace_broker.host_budget import HostBudget
from headrace_broker.persistence import (
    SavedFile,
    TableText,
    field_text,
    file_text,
    load_table,
    next_version,
    warn_if_missing,
)
from headrace_protocol.bodies import (
    DataVersion,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
)
from headrace_protocol.bounds import check_depth, check_group, check_items, check_queue_nums
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.forbidden import ForbiddenType, reading_forbidden
from headrace_protocol.system_topics import TRANSACTION_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.host_budget import Host
    from headrace_broker.persistence import NowMs
    from headrace_broker.store.files.config_file import ConfigFile

# Memory of a group and its retry topic, in tables and in files.
_GROUP_BYTES = 6 * 1024

# In the table of what is forbidden, the bit of reading.
_UNREADABLE = 1 << 2
TOOLS_CONSUMER = "TOOLS_CONSUMER"
# Groups that the peer creates at its first start.
_BUILT_IN = (
    TOOLS_CONSUMER,
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    TRANSACTION_GROUP,
)


class GroupPolicy(Protocol):
    """Settings of the broker about groups; they may change while it runs."""

    auto_create_subscription_group: bool


class SubscriptionGroups:
    """The settings of all consumer groups; an entry is replaced, never changed.

    change_count: grows with every change, to invalidate caches.
    saved: the table's file.
    """

    def __init__(
        self,
        policy: GroupPolicy,
        file: ConfigFile,
        now_ms: NowMs,
        budget: HostBudget | None = None,
    ) -> None:
        """Load the table. Raises StoreFormatError if its file can't be read."""
        self.change_count = 0
        self._budget = budget or HostBudget()
        self._policy = policy
        self.saved = SavedFile(file, self._snapshot)
        self._text = TableText()
        self._now_ms = now_ms
        found = load_table(file, SubscriptionGroupWrapper.decode)
        loaded = found or SubscriptionGroupWrapper()
        self.data_version: DataVersion = loaded.data_version
        self._forbidden = loaded.forbidden_table
        self._groups = {name: SubscriptionGroupConfig(group_name=name) for name in _BUILT_IN}
        self._groups.update(loaded.subscription_group_table)
        if found is None:
            warn_if_missing(
                file, "all groups have the default settings, even those created with others"
            )
            self._changed()

    def __len__(self) -> int:
        return len(self._groups)

    def all(self) -> Iterable[SubscriptionGroupConfig]:
        """Every group."""
        return self._groups.values()

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        """A group, or None if it does not exist."""
        return self._groups.get(group)

    def get_or_create(
        self, group: str, host: Host, before_create: Callable[[], None] = lambda: None
    ) -> SubscriptionGroupConfig:
        """A group; a new one has the defaults and counts for ``host``.

        before_create: raises RequestError unless the client may create it.

        Raises RequestError if it does not exist and can't be created.
        """
        check_not_own(group)
        config = self._groups.get(group)
        if config is None:
            if not self._policy.auto_create_subscription_group:
                raise _unknown(group)
            before_create()
            config = SubscriptionGroupConfig(group_name=group)
            _check(config)
            self._budget.keep(host, ("group", group), _GROUP_BYTES)
            self.put(config)
        return config

    def check_consumable(
        self, group: str, host: Host, before_create: Callable[[], None] = lambda: None
    ) -> SubscriptionGroupConfig:
        """A group that may consume, created if necessary; see ``get_or_create``."""
        config = self.get_or_create(group, host, before_create)
        if not config.consume_enable:
            raise reading_forbidden(
                ForbiddenType.GROUP,
                f"subscription group no permission, {group}: consumeEnable is false, "
                "set it to true with mqadmin updateSubGroup -s true",
            )
        return config

    def is_readable(self, group: str, topic: str) -> bool:
        """True unless a group is forbidden to read a topic."""
        return not self._forbidden.get(group, {}).get(topic, 0) & _UNREADABLE

    def check_readable(self, group: str, topic: str) -> None:
        """Raise RequestError if a group is forbidden to read a topic."""
        if not self.is_readable(group, topic):
            raise reading_forbidden(
                ForbiddenType.SUBSCRIPTION,
                f"the consumer group[{group}] is not permitted to read topic {topic}: an "
                "administrator has forbidden it (request 353)",
            )

    def set_readable(self, group: str, topic: str, *, readable: bool) -> None:
        """Permit or forbid a group to read a topic. Raises RequestError for an unknown group."""
        check_not_own(group)
        if group not in self._groups:
            raise _unknown(group)
        topics = dict(self._forbidden.get(group, {}))
        bits = topics.pop(topic, 0) & ~_UNREADABLE | (0 if readable else _UNREADABLE)
        if bits:
            topics[topic] = bits
            check_items(f"topics that group {group} may not read", topics)
        others = {name: known for name, known in self._forbidden.items() if name != group}
        self._forbidden = others | ({group: topics} if topics else {})
        self._changed()

    def put_all(self, configs: Iterable[SubscriptionGroupConfig]) -> None:
        """Create or replace groups, all or none. Raises RequestError for invalid settings."""
        configs = list(configs)
        for config in configs:
            _check(config)
        new = [each.group_name for each in configs if each.group_name not in self._groups]
        self._budget.makers.check("groups", len(new))
        for config in configs:
            self.put(config)

    def put(self, config: SubscriptionGroupConfig) -> None:
        """Create or replace a group. Raises RequestError for invalid settings."""
        _check(config)
        if config.group_name not in self._groups:
            self._budget.makers.check("groups", 1)
            self._budget.makers.made("groups", [config.group_name])
        self._groups[config.group_name] = config
        self._changed()

    def delete(self, group: str) -> bool:
        """Remove a group; return whether it existed."""
        if self._groups.pop(group, None) is None:
            return False
        self._forbidden = {name: each for name, each in self._forbidden.items() if name != group}
        self._budget.drop(("group", group))
        self._budget.makers.gone("groups", group)
        self._changed()
        return True

    def wrapper(self) -> SubscriptionGroupWrapper:
        """The table in the form of message bodies and of the file."""
        return SubscriptionGroupWrapper(
            subscription_group_table=self._groups,
            forbidden_table=self._forbidden,
            data_version=self.data_version,
        )

    def _changed(self) -> None:
        self.change_count += 1
        self.data_version = next_version(self.data_version, self._now_ms())
        self.saved.changed()

    def _snapshot(self) -> Callable[[], bytes]:
        groups, version = dict(self._groups), self.data_version
        forbidden = field_text(self._forbidden)
        return lambda: file_text(
            {
                "dataVersion": field_text(version),
                "forbiddenTable": forbidden,
                "subscriptionGroupTable": self._text.text(groups),
            }
        )


def _check(config: SubscriptionGroupConfig) -> None:
    """Raise RequestError for invalid settings of a group."""
    group = config.group_name
    check_not_own(group)
    check_group(group)
    check_queue_nums(f"group {group}: retryQueueNums", config.retry_queue_nums)
    # The peer defines their structure. Values nested too deep could be saved, but not read back.
    check_depth(f"groupRetryPolicy of group {group}", config.group_retry_policy)
    check_depth(f"subscriptionDataSet of group {group}", config.subscription_data_set)


def _unknown(group: str) -> RequestError:
    return RequestError(
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        f"subscription group [{group}] does not exist and autoCreateSubscriptionGroup is off: "
        "create it with mqadmin updateSubGroup",
    )
