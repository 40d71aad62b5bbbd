"""Settings of a broker: the one table behind files, samples, admin requests and docs.

Keys are the peer's, so a broker.conf of Apache RocketMQ starts this broker too.
"""

from __future__ import annotations

import re
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import SecretStr, ValidationError, field_validator, model_validator

from headrace_broker.settings.access import AccessFields
from headrace_broker.settings.audit import AuditFields
from headrace_broker.settings.pop import PopFields
from headrace_broker.settings.setting import Effect, extra_of, text_of
from headrace_broker.settings.setting import setting as _setting
from headrace_broker.settings.setting_problems import problem_of
from headrace_broker.store.settings import BATCH_UNIT_BYTES, UNIT_BYTES
from headrace_broker.tiered.config import TierConfig
from headrace_daemon.access.exposure import check_exposure
from headrace_daemon.access.settings import AccessOptions
from headrace_daemon.audit.settings import audit_problem
from headrace_daemon.folders import folder_problem
from headrace_daemon.serving.ports import equal_ports, fast_port
from headrace_protocol.drivers.address import check_address
from headrace_protocol.errors import PortableError
from headrace_protocol.rights.access import AnonymousAccess, is_loopback
from headrace_protocol.system_topics import TRACE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOUR_MS = 3_600_000
_LONG_MAX = 2**63 - 1
_INT_MAX = 2**31 - 1
_DELAYS = re.compile(r"[1-9][0-9]{0,6}[smhd]( +[1-9][0-9]{0,6}[smhd])*", re.ASCII)


class ConfigError(PortableError):
    """Unusable settings.

    problems: a line for each, with its place, key, found value and expected value.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _host_name() -> str:
    return socket.gethostname() or "DEFAULT_BROKER"


def _percent(default: int, explanation: str) -> Any:
    return _setting(default, explanation, unit="percent", on_change=Effect.RETENTION, ge=0, le=100)


class BrokerConfig(AccessFields, AuditFields, PopFields, TierConfig):
    """All settings of a broker; attributes are the keys in Python's spelling."""

    # -- identity
    broker_cluster_name: str = _setting("DefaultCluster", "Cluster of the broker.")
    broker_name: str = _setting(_host_name, "Broker's name in routes; by default the host name.")
    broker_id: int = _setting(
        0, "Broker's id under its name; always 0, the master, as there are no slaves.", ge=0, le=0
    )

    # -- network
    bind_address: str = _setting(
        "127.0.0.1",
        "Address to listen on; any but loopback requires authenticationEnabled, certificates of"
        " clients, or anonymousAccess.",
    )
    anonymous_access: AnonymousAccess = _setting(
        "deny",
        "Access without a user: deny serves nobody, or without authenticationEnabled only this"
        " machine; read serves anyone, but not administration; allow serves anyone everything.",
    )
    listen_port: int = _setting(10911, "Port to listen on; 0 picks a free port.", ge=0, le=65535)
    fast_listen_port: int = _setting(
        -1,
        "Second port for the same requests, to which old Java clients send and dashboards ask;"
        " -1: listenPort less 2, 0: none.",
        ge=-1,
        le=65535,
    )
    tls_config_file: str = _setting(
        "",
        "File with the settings of TLS, Apache RocketMQ's tls.properties; if empty, no TLS. See"
        ' docs/security.md "TLS".',
    )
    broker_ip1: str = _setting(
        "",
        "IP address advertised to clients; if empty, the address that the broker listens on.",
        key="brokerIP1",
    )
    namesrv_addr: str = _setting(
        "", "Nameservers to register with, as HOST:PORT;HOST:PORT; if empty, none."
    )
    register_name_server_period: int = _setting(
        30_000,
        "Interval of registrations at the nameservers.",
        unit="ms",
        reloadable=True,
        ge=10_000,
        le=60_000,
    )
    monitor_port: int = _setting(
        -1,
        "Port for health checks and metrics over HTTP; 0 picks a free port, -1 disables them.",
        ge=-1,
        le=65535,
    )

    # -- rights of clients
    broker_permission: int = _setting(
        6,
        "Permission of the whole broker: 2 to write, 4 to read, 6 for both.",
        on_change=Effect.REGISTRATION,
        ge=0,
        le=7,
    )
    auto_create_topic_enable: bool = _setting(
        True,
        "Create a missing topic at the first send, from the template topic TBW102.",
        reloadable=True,
    )
    default_topic_queue_nums: int = _setting(
        8,
        "Queues of the template TBW102, and thus the maximum for a topic created by a send.",
        ge=1,
        le=65_536,
    )
    enforce_message_type: bool = _setting(
        False,
        "Reject messages of another kind than their topic takes by its attribute message.type.",
    )
    cluster_topic_enable: bool = _setting(
        True, "Let clients write and read the built-in topic with the cluster's name."
    )
    broker_topic_enable: bool = _setting(
        True, "Let clients write and read the built-in topic with the broker's name."
    )
    auto_create_subscription_group: bool = _setting(
        True, "Create a missing consumer group at its first request.", reloadable=True
    )
    use_server_side_reset_offset: bool = _setting(
        True,
        "Members learn of a reset of offsets by their pulls; else they are requested to seek.",
        reloadable=True,
    )
    default_message_request_mode: Literal["PULL", "POP"] = _setting(
        "PULL",
        "How groups read topics whose members have their queues assigned by the broker, unless set"
        " for group and topic.",
        reloadable=True,
    )
    default_pop_share_queue_num: int = _setting(
        -1,
        "Number of next members whose queues a member pops as well; with -1 each pops all queues.",
        ge=-1,
        le=65_536,
        reloadable=True,
    )
    notify_consumer_ids_changed_enable: bool = _setting(
        True,
        "Notify the members of a group when it changes, so that they rebalance.",
        reloadable=True,
    )
    subscription_conflict: Literal["warn", "refuse"] = _setting(
        "warn",
        "Log members of a group with different subscriptions, or refuse the newcomer's heartbeats.",
        reloadable=True,
    )
    long_polling_enable: bool = _setting(
        True,
        "Hold pulls at the end of a queue for as long as they request; otherwise for 1 s.",
        reloadable=True,
    )
    enable_property_filter: bool = _setting(
        True, "Let consumers filter by SQL92 expressions on properties; otherwise only by tag."
    )
    max_filter_message_size: int = _setting(
        16_000,
        "Maximum number of messages that a read looks at for a SQL92 filter before it answers.",
        reloadable=True,
        ge=32,
        le=1_000_000,
    )
    filter_support_retry: bool = _setting(
        False, "Apply the SQL92 filter of a topic also to the messages that its groups retry."
    )
    max_message_size: int = _setting(
        4 * 1024 * 1024,
        "Maximum size of a message body.",
        unit="bytes",
        ge=1,
        le=16 * 1024 * 1024,
    )

    # -- files
    store_path_root_dir: Path = _setting(
        lambda: Path.home() / "store",
        "Directory of the store, by default ~/store; its parent must exist.",
    )
    expect_store: bool = _setting(
        False,
        "Refuse to start without a store, as with its disk unmounted; for later starts.",
    )
    store_path_commit_log: Path | None = _setting(
        None, "Directory of the log; accepted only as commitlog in storePathRootDir, its default."
    )
    mapped_file_size_commit_log: int = _setting(
        1 << 30,
        "Size of a log file; fixed at the first start of the store.",
        unit="bytes",
        ge=1,
        le=_INT_MAX,
    )
    mapped_file_size_consume_queue: int = _setting(
        300_000 * UNIT_BYTES,
        "Size of a queue file, rounded up to a multiple of 20; fixed at the first start of the"
        " store.",
        unit="bytes",
        ge=UNIT_BYTES,
        le=_INT_MAX,
    )
    mapper_file_size_batch_consume_queue: int = _setting(
        300_000 * BATCH_UNIT_BYTES,
        "Size of a queue file of a topic with queue.type=BatchCQ, rounded up to a multiple of 46;"
        " fixed at the first start of the store.",
        unit="bytes",
        ge=BATCH_UNIT_BYTES,
        le=_INT_MAX,
    )
    max_hash_slot_num: int = _setting(
        5_000_000,
        "Hash slots of an index file; fixed at the first start of the store.",
        ge=1,
        le=_INT_MAX,
    )
    max_index_num: int = _setting(
        20_000_000,
        "Entries of an index file; fixed at the first start of the store.",
        ge=2,
        le=_INT_MAX,
    )
    append_checksums: bool = _setting(
        False,
        "End each new record with a checksum of the whole record, in the property __CRC32#.",
        key="enabledAppendPropCRC",
    )

    # -- flush
    flush_disk_type: Literal["ASYNC_FLUSH", "SYNC_FLUSH"] = _setting(
        "ASYNC_FLUSH",
        "When a send is answered: with SYNC_FLUSH once the message is on disk, with ASYNC_FLUSH"
        " once it is written.",
    )
    flush_interval_commit_log: int = _setting(
        500, "Interval of flushes of the log.", unit="ms", ge=1, le=_INT_MAX
    )
    flush_commit_log_least_pages: int = _setting(
        4,
        "Minimum number of dirty pages for a periodic flush of the log.",
        unit="pages of 4096 bytes",
        ge=0,
        le=_INT_MAX,
    )
    flush_commit_log_thorough_interval: int = _setting(
        10_000,
        "Interval of flushes of the log with any number of dirty pages.",
        unit="ms",
        ge=1,
        le=_INT_MAX,
    )
    flush_interval_consume_queue: int = _setting(
        1000, "Interval of flushes of the queues.", unit="ms", ge=1, le=_INT_MAX
    )
    flush_consume_queue_least_pages: int = _setting(
        2,
        "Minimum number of a queue's dirty pages for a periodic flush of the queue.",
        unit="pages of 4096 bytes",
        ge=0,
        le=_INT_MAX,
    )
    flush_consume_queue_thorough_interval: int = _setting(
        60_000,
        "Interval of flushes of all queues, the index and the checkpoint, with any number of dirty"
        " pages.",
        unit="ms",
        ge=1,
        le=_INT_MAX,
    )
    flush_consumer_offset_interval: int = _setting(
        5000,
        "Interval at which committed consumer offsets are saved.",
        unit="ms",
        reloadable=True,
        ge=1,
        le=_INT_MAX,
    )

    # -- delayed messages
    message_delay_level: str = _setting(
        "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
        "Delays of the delay levels 1, 2, ..., each a number with s, m, h or d.",
    )
    forward_timeout: int = _setting(
        3_000,
        "Longest wait for the answer of another broker that has a part of a static topic.",
        unit="ms",
        reloadable=True,
        ge=1,
        le=_INT_MAX,
    )
    flush_delay_offset_interval: int = _setting(
        10_000,
        "Interval at which the delay offsets are saved.",
        unit="ms",
        reloadable=True,
        ge=1,
        le=_INT_MAX,
    )

    timer_wheel_enable: bool = _setting(True, "Messages may have a delivery time.", reloadable=True)
    timer_precision_ms: int = _setting(
        1000, "Length of a slot of the timer wheel.", unit="ms", ge=1000, le=1000
    )
    timer_roll_window_slot: int = _setting(
        172_800,
        "Timers that wait longer are stored again on the way.",
        unit="s",
        ge=0,
        le=_INT_MAX,
    )
    timer_max_delay_sec: int = _setting(
        259_200, "Longest delay of a timer.", unit="s", reloadable=True, ge=0, le=_INT_MAX
    )
    timer_flush_interval_ms: int = _setting(
        1000, "Time between saves of the timers.", unit="ms", reloadable=True, ge=1, le=_INT_MAX
    )
    mapped_file_size_timer_log: int = _setting(
        104_857_600, "Size of a timer log file.", unit="bytes", ge=4096, le=_INT_MAX
    )
    timer_stop_enqueue: bool = _setting(
        False, "New timers stay in their queue until this is off again.", reloadable=True
    )
    timer_stop_dequeue: bool = _setting(
        False, "No timer is delivered until this is off again.", reloadable=True
    )
    recall_message_enable: bool = _setting(True, "Producers may recall timers.", reloadable=True)

    # -- traces of clients
    trace_topic_enable: bool = _setting(
        False, "Create msgTraceTopicName, the topic of message traces, at the start."
    )
    msg_trace_topic_name: str = _setting(TRACE_TOPIC, "Name of the topic of message traces.")

    # -- requests between clients
    store_reply_message_enable: bool = _setting(
        True, "Store replies to requests between clients, as well as pass them on.", reloadable=True
    )

    # -- transactions
    reject_transaction_message: bool = _setting(
        False, "Reject transactional messages.", reloadable=True
    )
    transaction_time_out: int = _setting(
        6000,
        "Time until the producer of an undecided transaction is asked.",
        unit="ms",
        reloadable=True,
        ge=1,
        le=_INT_MAX,
    )
    transaction_check_interval: int = _setting(
        30_000,
        "Interval of checks of undecided transactions.",
        unit="ms",
        reloadable=True,
        ge=100,
        le=_INT_MAX,
    )
    transaction_check_max: int = _setting(
        15,
        "Checks of an undecided transaction before it is discarded.",
        reloadable=True,
        ge=1,
        le=_INT_MAX,
    )
    transaction_op_msg_max_size: int = _setting(
        4096,
        "Largest body of a record that names decided transactions.",
        unit="bytes",
        reloadable=True,
        ge=100,
        le=_INT_MAX,
    )

    # -- compacted topics
    enable_compaction: bool = _setting(
        True, "Compact topics that keep the newest of each key.", reloadable=True
    )
    compaction_mapped_file_size: int = _setting(
        104_857_600,
        "Size of a compaction log file, rounded to a multiple of its index file.",
        unit="bytes",
        ge=4096,
        le=_INT_MAX,
    )
    compaction_cq_mapped_file_size: int = _setting(
        10_485_760, "Size of an index file of a compaction log.", unit="bytes", ge=460, le=_INT_MAX
    )
    compaction_schedule_internal: int = _setting(
        900_000,
        "Interval of compactions of a queue; up to as much is added at random.",
        unit="ms",
        reloadable=True,
        ge=100,
        le=_INT_MAX,
    )
    compaction_thread_num: int = _setting(
        6, "Queues compacted at a time; no more than there are cores.", ge=1, le=1024
    )
    compaction_bytes_per_second: int = _setting(
        0,
        "Most bytes that compactions read and write per second; 0 for no limit.",
        unit="bytes/s",
        reloadable=True,
        ge=0,
        le=_LONG_MAX,
    )
    rebuild_sources: str = _setting(
        "", "More brokers, HOST:PORT;HOST:PORT, from which compacted queues may be rebuilt."
    )
    max_offset_map_size: int = _setting(
        104_857_600,
        "Memory of all running compactions for keys; a queue with more keys takes more rounds.",
        unit="bytes",
        ge=4096,
        le=_INT_MAX,
    )

    # -- retention
    file_reserved_time: int = _setting(
        72,
        "Age since its last write at which a log file expires.",
        unit="hours",
        on_change=Effect.RETENTION,
        ge=1,
        le=1_000_000,
    )
    delete_when: str = _setting(
        "04",
        "Hours of the day, in local time, in which expired log files are deleted: HH;HH, from 00"
        " to 23.",
        on_change=Effect.RETENTION,
    )
    disk_max_used_space_ratio: int = _percent(
        75,
        "Disk usage (%) above which expired log files are deleted at any hour; clamped to 10–95.",
    )
    disk_space_clean_forcibly_ratio: int = _percent(
        85,
        "Disk usage (%) above which log files are deleted before they expire; clamped to 30–85.",
    )
    disk_space_warning_level_ratio: int = _percent(
        90, "Disk usage (%) above which messages are rejected; clamped to 35–90."
    )
    clean_file_forcibly_enable: bool = _setting(
        True,
        "Allow the deletion of log files that have not expired when the disk is full.",
        on_change=Effect.RETENTION,
    )
    delete_unconsumed_enable: bool = _setting(
        False,
        "Let clean-up also delete messages that a consumer group has not consumed, as Apache"
        " RocketMQ does.",
        on_change=Effect.RETENTION,
    )
    staged_messages_reserved_time: int = _setting(
        168,
        "Age at which uncommitted staged writes are deleted.",
        unit="hours",
        ge=1,
        le=1_000_000,
    )
    clean_resource_interval: int = _setting(
        10_000, "Interval of checks for files to delete.", unit="ms", ge=1, le=_INT_MAX
    )
    delete_file_batch_max: int = _setting(
        10,
        "Maximum number of log files deleted in one check.",
        unit="files",
        on_change=Effect.RETENTION,
        ge=1,
        le=_INT_MAX,
    )

    @field_validator("broker_name", "broker_cluster_name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not name or not all(
            char.isascii() and (char.isalnum() or char in "_-|%") for char in name
        ):
            raise ValueError("use only letters, digits, '%', '|', '_' and '-', and at least one")
        return name

    @field_validator("broker_ip1")
    @classmethod
    def _is_ip_address(cls, address: str) -> str:
        # Records store the address as 4 or 16 bytes, so a host name is not enough.
        try:
            ip_address(address or "0.0.0.0")  # noqa: S104 - parsed, not bound
        except ValueError:
            raise ValueError("expected an IPv4 or IPv6 address, or leave it out") from None
        return address

    @field_validator("delete_when")
    @classmethod
    def _are_hours(cls, hours: str) -> str:
        if not all(hour.isdecimal() and int(hour) < 24 for hour in split_list(hours)):
            raise ValueError("expected hours from 00 to 23 with ; in between, such as 04 or 02;14")
        return hours

    @field_validator("message_delay_level")
    @classmethod
    def _are_delays(cls, levels: str) -> str:
        if not _DELAYS.fullmatch(levels):
            raise ValueError("expected delays with blanks in between, such as 1s 5s 10m 2h")
        return levels

    @field_validator("namesrv_addr", "rebuild_sources")
    @classmethod
    def _are_addresses(cls, addresses: str) -> str:
        for address in split_list(addresses):
            check_address(address)
        return addresses

    @model_validator(mode="after")
    def _has_one_root(self) -> BrokerConfig:
        log_path = self.store_path_commit_log
        expected = self.store_path_root_dir / "commitlog"
        if log_path is not None and log_path != expected:
            raise ValueError(f"storePathCommitLog={log_path}: expected {expected}, or leave it out")
        return self

    @model_validator(mode="after")
    def _has_distinct_ports(self) -> BrokerConfig:
        if problem := equal_ports(self.ports()):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _is_exposed_on_purpose(self) -> BrokerConfig:
        check_exposure(self.bind_address, AccessOptions.of(self), self.tls_config_file)
        is_advertised = self.broker_ip1 and not is_loopback(self.broker_ip1)
        if is_advertised and is_loopback(self.bind_address):
            raise ValueError(
                f"brokerIP1={self.broker_ip1}: the broker advertises this address, but with "
                f"bindAddress={self.bind_address} does not listen there: set bindAddress to it "
                "and anonymousAccess=allow, or remove brokerIP1"
            )
        return self

    # -- derived values ----------------------------------------------------------------------------

    def ports(self) -> dict[str, int]:
        """The ports to listen on by setting; 0 or less for those that are free to choose or off."""
        return {
            "listenPort": self.listen_port,
            "fastListenPort": fast_port(self.listen_port, self.fast_listen_port),
            "monitorPort": self.monitor_port,
        }

    @property
    def nameservers(self) -> list[str]:
        """Addresses to register with, ``HOST:PORT``."""
        return split_list(self.namesrv_addr)

    @property
    def is_sync_flush(self) -> bool:
        """True if a send is answered only when the message is on disk."""
        return self.flush_disk_type == "SYNC_FLUSH"

    @property
    def staged_reserved_ms(self) -> int:
        """Age at which uncommitted staged writes are deleted."""
        return self.staged_messages_reserved_time * _HOUR_MS

    def check_paths(self) -> None:
        """Raise ConfigError if the store can't be in its directory; creates nothing."""
        root = self.store_path_root_dir
        if reason := folder_problem(root):
            raise ConfigError([f"storePathRootDir={root}: {reason}"])
        folder = self.tiered_store_file_path
        if self.message_store_plug_in and folder and (reason := folder_problem(folder)):
            raise ConfigError([f"tieredStoreFilePath={folder}: {reason}"])
        if reason := audit_problem(self.audit_log_path):
            raise ConfigError([f"auditLogPath={self.audit_log_path}: {reason}"])

    # -- text --------------------------------------------------------------------------------------

    def as_text(self) -> dict[str, str]:
        """Every set key with its value, as in a file; secrets are masked."""
        values = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        return {key: text_of(value) for key, value in values.items()}

    def changed(self, values: Mapping[str, str], places: Mapping[str, str]) -> BrokerConfig:
        """The settings with other values by key of the file. Raises ConfigError with the place."""
        fields = self.model_dump(by_alias=True).items()
        secrets = {key: value for key, value in fields if isinstance(value, SecretStr)}
        return validated({**self.as_text(), **secrets, **values}, places)

    def update(self, changes: Mapping[str, str]) -> set[Effect]:
        """Change reloadable settings, all or none; returns what is to be done then.

        changes: values by key of the file; all keys must be in ``RELOADABLE``.
        Raises ConfigError for an invalid value.
        """
        changed = self.changed(changes, {key: key for key in changes})
        effects = set()
        for name, field in type(self).model_fields.items():
            value = getattr(changed, name)
            if value == getattr(self, name):
                continue
            setattr(self, name, value)
            effects.add(extra_of(field)["on_change"])
        return effects - {None}


def split_list(text: str) -> list[str]:
    """The parts of a setting such as ``HOST:PORT;HOST:PORT``."""
    return [part.strip() for part in text.split(";") if part.strip()]


def validated(values: Mapping[str, str | SecretStr], places: Mapping[str, str]) -> BrokerConfig:
    """The settings with values by key of the file. Raises ConfigError with the places."""
    try:
        return BrokerConfig.model_validate(values)
    except ValidationError as errors:
        found = [problem_of(error, places) for error in errors.errors()]
        order = list(places.values())
        found.sort(key=lambda problem: order.index(problem[0]) if problem[0] in order else -1)
        lines = [line for place, reason in found for line in f"{place}: {reason}".split("\n")]
        raise ConfigError(lines) from None
