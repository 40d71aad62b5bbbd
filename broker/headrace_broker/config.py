"""Settings of a broker: one table, from which the file, its sample, admin requests and docs come.

Keys are the peer's, so that a broker.conf of Apache RocketMQ starts this broker too.
"""

from __future__ import annotations

import difflib
import re
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from headrace_broker.apache_keys import EXPECTED_VALUES, WITHOUT_EFFECT
from headrace_daemon.folders import why_no_files
from headrace_protocol.access import AnonymousAccess, is_loopback, why_exposed
from headrace_protocol.drivers.address import split_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_broker.store.settings import Retention, StoreSettings

_PAGE_BYTES = 4096
_UNIT_BYTES = 20
_HOUR_MS = 3_600_000
_INT_MAX = 2**31 - 1
_UNIT_MS = {"s": 1000, "m": 60_000, "h": _HOUR_MS, "d": 24 * _HOUR_MS}
_DELAYS = re.compile(r"[1-9][0-9]{0,6}[smhd]( +[1-9][0-9]{0,6}[smhd])*", re.ASCII)


class ConfigError(Exception):
    """Settings that can't be used.

    problems: one line each: place, key, what was found and what was expected.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _setting(
    default: Any,
    explanation: str,
    *,
    unit: str = "",
    reloadable: bool = False,
    key: str | None = None,
    **limits: int,
) -> Any:
    """One row of the table.

    reloadable: UPDATE_BROKER_CONFIG may change it while the broker runs.
    limits: ge and le, both included.
    """
    extra = {"unit": unit, "reloadable": reloadable}
    field: Any = Field
    if callable(default):
        return field(
            default_factory=default, description=explanation, alias=key, json_schema_extra=extra
        )
    return field(default, description=explanation, alias=key, json_schema_extra=extra, **limits)


def _host_name() -> str:
    return socket.gethostname() or "DEFAULT_BROKER"


def _percent(default: int, explanation: str) -> Any:
    return _setting(default, explanation, unit="percent", reloadable=True, ge=0, le=100)


class BrokerConfig(BaseModel):
    """What a broker can be told; attributes are the keys in Python's spelling."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")

    # -- who it is
    broker_cluster_name: str = _setting("DefaultCluster", "cluster that the broker belongs to")
    broker_name: str = _setting(_host_name, "name in routes; by default this machine's name")
    broker_id: int = _setting(0, "0 is the master, the only role of this broker", ge=0, le=0)

    # -- where it is reached and whom it tells
    bind_address: str = _setting(
        "127.0.0.1", "address to listen on; any but loopback requires anonymousAccess"
    )
    anonymous_access: AnonymousAccess = _setting(
        "deny",
        "deny: serve loopback only; read: anyone, unauthenticated, without administration;"
        " allow: all",
    )
    listen_port: int = _setting(10911, "port to listen on; 0 takes any free one", ge=0, le=65535)
    broker_ip1: str = _setting(
        "", "IP address that clients are told; empty: the one it listens on", key="brokerIP1"
    )
    namesrv_addr: str = _setting("", "nameservers to register with: HOST:PORT;HOST:PORT")
    register_name_server_period: int = _setting(
        30_000, "time between registrations", unit="ms", reloadable=True, ge=10_000, le=60_000
    )

    monitor_port: int = _setting(
        -1, "port for health checks over HTTP; 0 takes any free one, -1 none", ge=-1, le=65535
    )

    # -- what clients may do
    broker_permission: int = _setting(6, "2 write, 4 read, 6 both", reloadable=True, ge=0, le=7)
    auto_create_topic_enable: bool = _setting(
        True, "a send to an unknown topic makes it, as TBW102 says", reloadable=True
    )
    default_topic_queue_nums: int = _setting(
        8, "queues of TBW102, so the most that a topic made by a send gets", ge=1, le=65_536
    )
    cluster_topic_enable: bool = _setting(True, "the topic named like the cluster may be used")
    broker_topic_enable: bool = _setting(True, "the topic named like the broker may be used")
    auto_create_subscription_group: bool = _setting(
        True, "a group that is not known yet may consume", reloadable=True
    )
    long_polling_enable: bool = _setting(
        True, "hold pulls at a queue's end as long as they ask; else 1 s", reloadable=True
    )
    max_message_size: int = _setting(
        4 * 1024 * 1024, "largest message body", unit="bytes", ge=1, le=16 * 1024 * 1024
    )

    # -- where messages are kept
    store_path_root_dir: Path = _setting(
        lambda: Path.home() / "store",
        "directory of the store, by default ~/store; its parent must be there",
    )
    store_path_commit_log: Path | None = _setting(
        None, "must be commitlog inside storePathRootDir, which it is by default"
    )
    mapped_file_size_commit_log: int = _setting(
        1 << 30, "size of a log file; fixed by the first start", unit="bytes", ge=1, le=_INT_MAX
    )
    mapped_file_size_consume_queue: int = _setting(
        300_000 * _UNIT_BYTES,
        "size of a queue file, rounded up to units of 20; fixed by the first start",
        unit="bytes",
        ge=_UNIT_BYTES,
        le=_INT_MAX,
    )
    max_hash_slot_num: int = _setting(
        5_000_000, "hash slots of an index file; fixed by the first start", ge=1, le=_INT_MAX
    )
    max_index_num: int = _setting(
        20_000_000, "entries of an index file; fixed by the first start", ge=2, le=_INT_MAX
    )

    append_checksums: bool = _setting(
        False,
        "each record ends with a checksum of all of it, the property __CRC32#",
        key="enabledAppendPropCRC",
    )

    # -- when they are safe on disk
    flush_disk_type: Literal["ASYNC_FLUSH", "SYNC_FLUSH"] = _setting(
        "ASYNC_FLUSH", "SYNC_FLUSH answers a send when the message is on disk"
    )
    flush_interval_commit_log: int = _setting(
        500, "time between flushes of the log", unit="ms", ge=1, le=_INT_MAX
    )
    flush_commit_log_least_pages: int = _setting(
        4, "least that is worth such a flush", unit="pages of 4096 bytes", ge=0, le=_INT_MAX
    )
    flush_commit_log_thorough_interval: int = _setting(
        10_000, "after this time whatever waits is flushed", unit="ms", ge=1, le=_INT_MAX
    )
    flush_interval_consume_queue: int = _setting(
        1000, "time between flushes of queues", unit="ms", ge=1, le=_INT_MAX
    )
    flush_consume_queue_least_pages: int = _setting(
        2, "least that is worth such a flush", unit="pages of 4096 bytes", ge=0, le=_INT_MAX
    )
    flush_consume_queue_thorough_interval: int = _setting(
        60_000, "after this time whatever waits is flushed", unit="ms", ge=1, le=_INT_MAX
    )
    flush_consumer_offset_interval: int = _setting(
        5000,
        "time between saves of consumer offsets",
        unit="ms",
        reloadable=True,
        ge=1,
        le=_INT_MAX,
    )

    # -- messages that wait
    message_delay_level: str = _setting(
        "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
        "Delays of the levels 1, 2, ..., each a number with s, m, h or d.",
    )
    flush_delay_offset_interval: int = _setting(
        10_000,
        "Time between saves of the delay offsets.",
        unit="ms",
        reloadable=True,
        ge=1,
        le=_INT_MAX,
    )

    # -- how long they are kept
    file_reserved_time: int = _setting(
        72,
        "age at which log files are removed",
        unit="hours",
        reloadable=True,
        ge=1,
        le=1_000_000,
    )
    delete_when: str = _setting(
        "04", "hours of the day in which they are, 00 to 23: HH;HH", reloadable=True
    )
    disk_max_used_space_ratio: int = _percent(
        75, "used part of the disk above which they are at any hour (10 to 95 count)"
    )
    disk_space_clean_forcibly_ratio: int = _percent(
        85, "used part of the disk above which younger ones are, too (30 to 85 count)"
    )
    disk_space_warning_level_ratio: int = _percent(
        90, "used part of the disk above which messages are refused (35 to 90 count)"
    )
    clean_file_forcibly_enable: bool = _setting(
        True, "younger files may be removed when the disk is full", reloadable=True
    )
    delete_unconsumed_enable: bool = _setting(
        False,
        "as the peer, remove also what some consumer group has not consumed",
        reloadable=True,
    )
    staged_messages_reserved_time: int = _setting(
        168,
        "age at which staged writes are removed that nobody committed",
        unit="hours",
        ge=1,
        le=1_000_000,
    )
    clean_resource_interval: int = _setting(
        10_000, "time between looks for such files", unit="ms", ge=1, le=_INT_MAX
    )
    delete_file_batch_max: int = _setting(
        10, "log files removed at one look", unit="files", reloadable=True, ge=1, le=_INT_MAX
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
        # Records hold 4 or 16 bytes of it, which a name does not have.
        try:
            ip_address(address or "0.0.0.0")  # noqa: S104 - parsed, not bound
        except ValueError:
            raise ValueError("expected an IPv4 or IPv6 address, or leave it out") from None
        return address

    @field_validator("delete_when")
    @classmethod
    def _are_hours(cls, hours: str) -> str:
        if not all(hour.isdecimal() and int(hour) < 24 for hour in _split_hours(hours)):
            raise ValueError("expected hours from 00 to 23 with ; in between, such as 04 or 02;14")
        return hours

    @field_validator("message_delay_level")
    @classmethod
    def _are_delays(cls, levels: str) -> str:
        if not _DELAYS.fullmatch(levels):
            raise ValueError("expected delays with blanks in between, such as 1s 5s 10m 2h")
        return levels

    @field_validator("namesrv_addr")
    @classmethod
    def _are_addresses(cls, addresses: str) -> str:
        for address in filter(None, addresses.split(";")):
            split_address(address.strip())
        return addresses

    @model_validator(mode="after")
    def _has_one_root(self) -> BrokerConfig:
        log_path = self.store_path_commit_log
        expected = self.store_path_root_dir / "commitlog"
        if log_path is not None and log_path != expected:
            raise ValueError(f"storePathCommitLog={log_path}: expected {expected}, or leave it out")
        return self

    @model_validator(mode="after")
    def _is_exposed_on_purpose(self) -> BrokerConfig:
        if reason := why_exposed(self.bind_address, self.anonymous_access):
            raise ValueError(f"bindAddress={self.bind_address}: {reason}")
        is_advertised = self.broker_ip1 and not is_loopback(self.broker_ip1)
        if is_advertised and is_loopback(self.bind_address):
            raise ValueError(
                f"brokerIP1={self.broker_ip1}: the broker advertises this address, but with "
                f"bindAddress={self.bind_address} does not listen there: set bindAddress to it "
                "and anonymousAccess=allow, or remove brokerIP1"
            )
        return self

    # -- what others read --------------------------------------------------------------------------

    @property
    def nameservers(self) -> list[str]:
        """Addresses to register with, ``HOST:PORT``."""
        return [address.strip() for address in self.namesrv_addr.split(";") if address.strip()]

    @property
    def is_sync_flush(self) -> bool:
        """Whether a send is answered only when the message is on disk."""
        return self.flush_disk_type == "SYNC_FLUSH"

    @property
    def staged_reserved_ms(self) -> int:
        """Age at which staged writes are removed that nobody committed."""
        return self.staged_messages_reserved_time * _HOUR_MS

    def store_settings(self, store_host: bytes) -> StoreSettings:
        """What the store is told.

        store_host: address and port that records carry; see ``message.encode_host``.
        """
        from headrace_broker.store.settings import StoreSettings

        units = -(-self.mapped_file_size_consume_queue // _UNIT_BYTES)
        return StoreSettings(
            root=self.store_path_root_dir,
            commit_log_file_bytes=self.mapped_file_size_commit_log,
            consume_queue_file_bytes=units * _UNIT_BYTES,
            index_slot_count=self.max_hash_slot_num,
            index_entry_count=self.max_index_num,
            store_host=store_host,
            body_bytes_max=self.max_message_size,
            delay_levels_ms=tuple(map(_delay_ms, self.message_delay_level.split())),
            appends_checksums=self.append_checksums,
            flush="sync" if self.is_sync_flush else "async",
            flush_interval_ms=self.flush_interval_commit_log,
            flush_least_bytes=self.flush_commit_log_least_pages * _PAGE_BYTES,
            flush_thorough_interval_ms=self.flush_commit_log_thorough_interval,
            queue_flush_interval_ms=self.flush_interval_consume_queue,
            queue_flush_least_bytes=self.flush_consume_queue_least_pages * _PAGE_BYTES,
            queue_flush_thorough_interval_ms=self.flush_consume_queue_thorough_interval,
            retention=self.retention(),
            clean_interval_ms=self.clean_resource_interval,
        )

    def retention(self) -> Retention:
        """How long the store keeps messages."""
        from headrace_broker.store.settings import Retention

        return Retention(
            reserved_ms=self.file_reserved_time * _HOUR_MS,
            delete_hours=frozenset(map(int, _split_hours(self.delete_when))),
            files_max=self.delete_file_batch_max,
            clean_ratio=_ratio(self.disk_max_used_space_ratio, 10, 95),
            force_ratio=_ratio(self.disk_space_clean_forcibly_ratio, 30, 85),
            refuse_ratio=_ratio(self.disk_space_warning_level_ratio, 35, 90),
            removes_young=self.clean_file_forcibly_enable,
            removes_unconsumed=self.delete_unconsumed_enable,
        )

    def check_paths(self) -> None:
        """Raise ConfigError when the store can't be where it shall be; makes nothing."""
        root = self.store_path_root_dir
        if reason := why_no_files(root):
            raise ConfigError([f"storePathRootDir={root}: {reason}"])

    # -- text --------------------------------------------------------------------------------------

    def as_text(self) -> dict[str, str]:
        """Every key with its value, as they stand in a file; what is not set is left out."""
        values = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        return {key: _text(value) for key, value in values.items()}

    def update(self, changes: Mapping[str, str]) -> None:
        """Change reloadable settings, all or none.

        changes: by key of the file. Raises ConfigError for a value that can't be; the keys must
        have been looked up in ``RELOADABLE``.
        """
        changed = _validate({**self.as_text(), **changes}, {key: key for key in changes})
        for name in type(self).model_fields:
            setattr(self, name, getattr(changed, name))


def _split_hours(hours: str) -> list[str]:
    return [hour.strip() for hour in hours.split(";") if hour.strip()]


def _delay_ms(delay: str) -> int:
    return int(delay[:-1]) * _UNIT_MS[delay[-1]]


def _ratio(percent: int, least: int, most: int) -> float:
    """Within the peer's limits, which it applies without a word."""
    return min(max(percent, least), most) / 100


class Setting(NamedTuple):
    """A row of the table, for docs and samples. default: as in a file; None: found at start."""

    key: str
    type: str
    default: str | None
    unit: str
    reloadable: bool
    explanation: str


def settings() -> list[Setting]:
    """The whole table."""
    rows = []
    for field in BrokerConfig.model_fields.values():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        assert field.alias is not None
        default = None if field.default_factory or field.default is None else _text(field.default)
        rows.append(
            Setting(
                key=field.alias,
                type=_type_name(field.annotation),
                default=default,
                unit=str(extra["unit"]),
                reloadable=bool(extra["reloadable"]),
                explanation=field.description or "",
            )
        )
    return rows


def _type_name(annotation: Any) -> str:
    names = {int: "number", bool: "true or false", str: "text"}
    if annotation in names:
        return names[annotation]
    choices = getattr(annotation, "__args__", ())
    return (
        " or ".join(choices)
        if all(isinstance(choice, str) for choice in choices) and choices
        else "path"
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


RELOADABLE = frozenset(setting.key for setting in settings() if setting.reloadable)
_KEYS = [setting.key for setting in settings()]


def sample() -> str:
    """A commented file with every key at its default: conf/broker.conf."""
    parts = [
        "# Settings of a headrace broker: key=value, one a line; the rest has its default.",
        "# Made from the table in broker/headrace_broker/config.py by conf/generate.py.",
    ]
    for setting in settings():
        notes = [setting.type, setting.unit, "reloadable" if setting.reloadable else ""]
        parts.append(f"\n# {setting.explanation} ({', '.join(filter(None, notes))})")
        parts.append(f"#{setting.key}={setting.default or ''}")
    return "\n".join(parts) + "\n"


# -- files -----------------------------------------------------------------------------------------


def load_config(path: Path) -> tuple[BrokerConfig, list[str]]:
    """Read a file of settings; touches nothing else.

    Returns the settings, and warnings about keys that the peer knows and this broker does not need.
    Raises ConfigError naming file, line, key and what was expected.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: can't read settings: {error}"]) from error
    values, places = parse_properties(text, str(path))
    warnings, problems = [], []
    for key in list(values):
        if key in _KEYS:
            continue
        value = values.pop(key)
        if key in WITHOUT_EFFECT or EXPECTED_VALUES.get(key) == value:
            warnings.append(f"{places[key]}: {key} has no effect in this broker")
        else:
            problems.append(f"{places[key]}: {_not_ours(key, value)}")
    if problems:
        raise ConfigError(problems)
    config = _validate(values, places)
    config.check_paths()
    return config, warnings


def parse_properties(text: str, place: str) -> tuple[dict[str, str], dict[str, str]]:
    """Values by key, and where each key stands: ``place:line``.

    Lines are ``key=value``; empty ones and those that begin with # or ! are skipped.
    Raises ConfigError for other lines, for keys that stand twice and for lines that go on.
    """
    values: dict[str, str] = {}
    places: dict[str, str] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.strip()
        if not content or content[0] in "#!":
            continue
        here = f"{place}:{number}"
        key, equals, value = (part.strip() for part in content.partition("="))
        if not equals or not key:
            problems.append(f"{here}: expected key=value, found {content[:60]!r}")
        elif content.endswith("\\"):
            problems.append(f"{here}: {key} goes on in the next line: write it in one line")
        elif key in values:
            problems.append(f"{here}: {key} was set at {places[key]}: keep one of them")
        else:
            values[key], places[key] = value, here
    if problems:
        raise ConfigError(problems)
    return values, places


def _validate(values: Mapping[str, str], places: Mapping[str, str]) -> BrokerConfig:
    try:
        return BrokerConfig.model_validate(values)
    except ValidationError as errors:
        found = [_problem(error, places) for error in errors.errors()]
        order = list(places.values())
        found.sort(key=lambda problem: order.index(problem[0]) if problem[0] in order else -1)
        raise ConfigError([f"{place}: {reason}" for place, reason in found]) from None


def _problem(error: Any, places: Mapping[str, str]) -> tuple[str, str]:
    """Where a value stands, and what is wrong with it."""
    reason = str(error["msg"]).removeprefix("Value error, ")
    if error["loc"]:
        key = error["loc"][0]
        reason = f"{key}={error['input']}: {reason}"
    else:
        key = reason.partition("=")[0]
    return places.get(key, key), reason


def _not_ours(key: str, value: str) -> str:
    if key in EXPECTED_VALUES:
        expected = EXPECTED_VALUES[key]
        return (
            f"{key}={value} is not supported by this broker: expected {expected!r}, or leave it out"
        )
    nearest = difflib.get_close_matches(key, _KEYS, 1)
    hint = f"did you mean {nearest[0]}?" if nearest else "see conf/broker.conf for all keys"
    return f"unknown key {key}: {hint}"
