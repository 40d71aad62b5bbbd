"""The options of ``format("headrace")``, checked before any connection is opened.

Source: docs/spark.md "Reading"; tests/spark/test_options.py.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from headrace.config import resolve_account, resolve_nameservers, resolve_tls
from headrace.errors import ConfigurationError, InvalidMessage
from headrace.names import check_group, check_topic
from headrace.spark.cluster import Topics
from headrace.spark.connections import Dial
from headrace.spark.errors import OptionError
from headrace.spark.retry import READING, Patience
from headrace.spark.tier.locations import TierAccess
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.system_topics import READER_GROUP
from headrace_protocol.tls.names import ServerNames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace.accounts import Account
    from headrace.config import ConnectOptions
    from headrace.spark.body.format import BodyFormat
    from headrace_protocol.tls.settings import ClientTls

# Large enough to justify a task, small enough to read again after a failure.
SPLIT_BYTES = 128 * 1024 * 1024

# Options of TLS and of the user, as arguments of clients. Passwords come from files and from the
# environment of each process: options of Spark appear in plans and logs.
_TLS_OPTIONS = {
    "tls": "tls",
    "caFile": "ca_file",
    "certFile": "cert_file",
    "keyFile": "key_file",
    "serverName": "server_name",
}
DIAL_OPTIONS = (*_TLS_OPTIONS, "user", "passwordFile", "tokenFile")
_LIMITS = ("maxRows", "maxBytes", "maxSeconds")
_READ_OPTIONS = (
    "nameserver",
    *DIAL_OPTIONS,
    "topic",
    "group",
    "starting",
    "ending",
    "filter",
    *_LIMITS,
    "splitBytes",
    "failOnDataLoss",
    "schema",
    "encoding",
    "table",
    "tier",
    "manifest",
)
# Before the names of obstore's settings, such as ``tier.access_key_id``.
_TIER_PREFIX = "tier."
# Common names of options for credentials, which would be seen in plans and logs.
_SECURITY = frozenset(("accesskey", "secretkey", "securitytoken", "username", "password", "token"))
# Spark adds these when it creates a table.
_OF_CREATE_TABLE = frozenset(("owner", "provider"))
_TABLE_NOTE = (
    ". Spark gives the reader of a table no options: use CREATE TEMPORARY VIEW ... USING headrace "
    "OPTIONS (topic '...')"
)
# Options of Spark's Kafka source, and what is here in their place.
_KAFKA = {
    "kafka.bootstrap.servers": "belongs to the Kafka source; here it is nameserver",
    "kafka.group.id": "belongs to the Kafka source; here it is group",
    "groupidprefix": "belongs to the Kafka source; here it is group",
    "subscribe": "belongs to the Kafka source; here it is topic",
    "subscribepattern": "belongs to the Kafka source; here it is topic, with *, ? or [...]",
    "assign": "belongs to the Kafka source; here it is topic, and a filter on the column queue",
    "startingoffsets": "belongs to the Kafka source; here it is starting",
    "startingtimestamp": "belongs to the Kafka source; here it is starting",
    "startingoffsetsbytimestamp": "belongs to the Kafka source; here it is starting",
    "endingoffsets": "belongs to the Kafka source; here it is ending",
    "endingtimestamp": "belongs to the Kafka source; here it is ending",
    "endingoffsetsbytimestamp": "belongs to the Kafka source; here it is ending",
    "maxoffsetspertrigger": "belongs to the Kafka source; here it is maxRows",
    "minpartitions": "belongs to the Kafka source; here it is splitBytes",
    "maxrecordsperpartition": "belongs to the Kafka source; here it is splitBytes",
    "includeheaders": "belongs to the Kafka source; here the column properties is always there",
}
_TAGS = re.compile(r"[^\s|<>=()'\"]+(\s*\|\|\s*[^\s|<>=()'\"]+)*")
_PATTERN_CHARACTERS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Point:
    """A position in every queue.

    kind: ``"earliest"``, ``"latest"``, ``"time"`` (``timestamp_ms`` since 1970) or ``"offsets"``
    (for the queues named; the others start at ``earliest`` and end at ``latest``).
    """

    kind: str
    timestamp_ms: int = 0
    offsets: Mapping[MessageQueue, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one trigger; None is no limit. seconds: from the first store time to the last."""

    rows: int | None = None
    bytes: int | None = None
    seconds: int | None = None

    def __bool__(self) -> bool:
        return bool(self.named())

    def named(self) -> dict[str, int]:
        """The limits that are set, by option name."""
        values = zip(_LIMITS, (self.rows, self.bytes, self.seconds), strict=True)
        return {name: value for name, value in values if value is not None}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read; ``starting`` and ``ending`` are None if not given.

    group: the consumer group that commits its positions; None commits none.
    tags, sql: see ``plan.tasks.ReadPlan``.
    schema, encoding: of message bodies, see ``body.format.body_format``.
    table: whether the topics are tables.
    tier: how tiers are read; None if brokers read them.
    patience: with brokers and nameservers that restart.
    """

    nameservers: tuple[str, ...]
    dial: Dial
    topics: Topics
    group: str | None
    starting: Point | None
    ending: Point | None
    tags: str
    sql: str | None
    limits: Limits
    split_bytes: int
    fail_on_data_loss: bool
    schema: str | None
    encoding: str | None
    table: bool
    tier: TierAccess | None = None
    patience: Patience = READING

    @property
    def reader_group(self) -> str:
        """The consumer group named in pull requests."""
        return self.group or READER_GROUP


class Options:
    """Options as Spark passes them: text by case-insensitive name."""

    def __init__(self, options: Mapping[str, str], known: Iterable[str]) -> None:
        """known: the valid names. Raises OptionError for any other, naming the nearest."""
        by_lower = {name.lower(): name for name in known}
        for name, value in options.items():
            if name.lower() in _SECURITY:
                raise OptionError(
                    name, None, "use user and passwordFile, or tokenFile: plans show options"
                )
            if name.lower() not in by_lower:
                raise _unknown(name, value, by_lower)
        self._values = {name.lower(): value for name, value in options.items()}

    def text(self, name: str) -> str | None:
        """The value, stripped; None if not given. Raises OptionError if it is empty."""
        value = self._values.get(name.lower())
        if value is not None and not value.strip():
            raise OptionError(name, value, "is empty: give it a value or leave it out")
        return value.strip() if value else None

    def required(self, name: str, example: str) -> str:
        """The value of a mandatory option. Raises OptionError."""
        value = self.text(name)
        if value is None:
            note = "" if self._values else _TABLE_NOTE
            raise OptionError(name, None, f'is missing: .option("{name}", "{example}"){note}')
        return value

    def whole_number(self, name: str) -> int | None:
        """A whole number of at least 1; None if not given. Raises OptionError."""
        value = self.text(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit() and 0 < int(value) < 2**63):
            raise OptionError(name, value, "expected a whole number from 1 to 2**63 - 1")
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """The value of a ``true`` or ``false`` option. Raises OptionError."""
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in {"true", "false"}:
            raise OptionError(name, value, "expected true or false")
        return value.lower() == "true"


def _unknown(name: str, value: str, by_lower: Mapping[str, str]) -> OptionError:
    """The error for an option that is not among the known ones."""
    lower = name.lower()
    if lower in _OF_CREATE_TABLE:
        return OptionError("topic", None, f"cannot be read by CREATE TABLE{_TABLE_NOTE}")
    if lower == "path":
        return OptionError(
            name,
            value,
            f'load(), save() and start() take no topic: use .option("topic", "{value}")',
        )
    if lower in _KAFKA or lower.startswith("kafka."):
        return OptionError(name, value, _KAFKA.get(lower, "belongs to the Kafka source"))
    near = get_close_matches(lower, by_lower, n=1)
    return OptionError(
        name,
        value,
        f"unknown; valid options are {', '.join(sorted(by_lower.values()))}",
        by_lower[near[0]] if near else None,
    )


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Check the options of a read. Raises OptionError."""
    of_tier = {name.lower(): text for name, text in given.items() if _is_of_tier(name)}
    options = Options({n: t for n, t in given.items() if not _is_of_tier(n)}, _READ_OPTIONS)
    tags, sql = _filter(options.text("filter"))
    starting, ending = _span(options.text("starting"), options.text("ending"))
    return ReadOptions(
        nameservers=nameservers(options),
        dial=dial(options),
        topics=_topics(options.required("topic", "flights")),
        group=_group(options.text("group")),
        starting=starting,
        ending=ending,
        tags=tags,
        sql=sql,
        limits=Limits(*map(options.whole_number, _LIMITS)),
        split_bytes=options.whole_number("splitBytes") or SPLIT_BYTES,
        fail_on_data_loss=options.flag("failOnDataLoss", default=True),
        schema=options.text("schema"),
        encoding=options.text("encoding"),
        table=_table(options),
        tier=_tier(options, of_tier),
    )


def body_option(schema: str | None, encoding: str | None) -> BodyFormat | None:
    """The format of the options ``schema`` and ``encoding``; None without. Raises OptionError."""
    if schema is None:
        if encoding is not None:
            reason = "only takes effect together with option schema"
            raise OptionError("encoding", encoding, reason)
        return None
    from headrace.spark.body.format import body_format

    return body_format(schema, encoding or "json")


def _is_of_tier(name: str) -> bool:
    return name.lower().startswith(_TIER_PREFIX)


def _tier(options: Options, config: Mapping[str, str]) -> TierAccess | None:
    """The access to tiers; None if brokers read them. Raises OptionError."""
    mode, manifest = options.text("tier"), options.text("manifest")
    if mode not in {None, "direct"}:
        raise OptionError("tier", mode, "the only value is direct")
    name = "manifest" if manifest is not None else "tier"
    if mode is None and manifest is None:
        if config:
            raise OptionError(min(config), None, "takes effect only with option tier or manifest")
        return None
    if options.flag("table", default=False):
        raise OptionError(name, None, "does not apply to tables: leave it out")
    value = options.text("filter")
    if _filter(value)[1] is not None:
        raise OptionError("filter", value, f"is SQL92, which option {name} does not support")
    stated = tuple((key.removeprefix(_TIER_PREFIX), text) for key, text in sorted(config.items()))
    return TierAccess(manifest, stated)


def _table(options: Options) -> bool:
    """True if the topics are tables. Raises OptionError."""
    is_table = options.flag("table", default=False)
    if is_table and (value := options.text("filter")):
        raise OptionError(
            "filter", value, "would hide newer values of a key from a table; use where() instead"
        )
    return is_table


def nameservers(options: Options) -> tuple[str, ...]:
    """Nameserver addresses, see ``config.resolve_nameservers``. Raises OptionError."""
    value = options.text("nameserver")
    try:
        return resolve_nameservers(value)
    except ConfigurationError as error:
        raise OptionError("nameserver", value, str(error)) from error


def dial(options: Options) -> Dial:
    """How connections are opened, without passwords. Raises OptionError."""
    tls = _tls(options)
    return Dial(tls, _account(options), None if tls is None else ServerNames())


def _account(options: Options) -> Account | None:
    """The user of all connections, see ``resolve_account``. Raises OptionError."""
    user, file = options.text("user"), options.text("passwordFile")
    if user is None and file is not None:
        raise OptionError("passwordFile", file, "takes effect only with option user")
    arguments = cast("ConnectOptions", {"user": user, "token_file": options.text("tokenFile")})
    try:
        found = resolve_account(arguments, options.text("nameserver"))
    except ConfigurationError as error:
        raise OptionError("user", user, str(error)) from error
    if found is None:
        return None
    return found._replace(password=None, password_file=file or found.password_file)


def _tls(options: Options) -> ClientTls | None:
    """TLS of all connections, without a password, see ``resolve_tls``. Raises OptionError."""
    given = {argument: options.text(name) for name, argument in _TLS_OPTIONS.items()}
    is_wanted = options.flag("tls", default=True) if given["tls"] else None
    arguments = cast("ConnectOptions", {**given, "tls": is_wanted})
    try:
        found = resolve_tls(arguments, options.text("nameserver"))
    except ConfigurationError as error:
        raise OptionError("tls", given["tls"], str(error)) from error
    return found._replace(key_password=None) if found else None


def _topics(value: str) -> Topics:
    parts = [part.strip() for part in value.split(",") if part.strip()]
    patterns = tuple(part for part in parts if _PATTERN_CHARACTERS & set(part))
    names = tuple(part for part in parts if part not in patterns)
    try:
        for name in names:
            check_topic(name)
    except InvalidMessage as error:
        raise OptionError("topic", value, str(error)) from error
    return Topics(names, patterns)


def _group(value: str | None) -> str | None:
    try:
        if value is not None:
            check_group(value)
    except ConfigurationError as error:
        raise OptionError("group", value, str(error)) from error
    return value


def _filter(value: str | None) -> tuple[str, str | None]:
    """A tag expression and no SQL92 filter, or ``"*"`` and an SQL92 filter."""
    if value is None:
        return "*", None
    return (value, None) if _TAGS.fullmatch(value) else ("*", value)


def _span(starting: str | None, ending: str | None) -> tuple[Point | None, Point | None]:
    """Start and end of a read. Raises OptionError if the start lies after the end."""
    start, end = _point("starting", starting), _point("ending", ending)
    if start and end and _is_after(start, end):
        raise OptionError(
            "starting", starting, f"lies after option ending={ending!r}, so nothing can be read"
        )
    return start, end


def _is_after(start: Point, end: Point) -> bool:
    """True if ``start`` lies after ``end`` regardless of the queues' contents."""
    match start.kind, end.kind:
        case "offsets", "offsets":
            return any(at > end.offsets.get(queue, at) for queue, at in start.offsets.items())
        case "time", "time":
            return start.timestamp_ms > end.timestamp_ms
        case "latest", "offsets":
            return True
    return end.kind == "earliest" != start.kind


def _point(name: str, value: str | None) -> Point | None:
    if value is None:
        return None
    if value.lower() in {"earliest", "latest"}:
        return Point(value.lower())
    if value.startswith("{"):
        return Point("offsets", offsets=_offsets(name, value))
    return Point("time", timestamp_ms=_timestamp_ms(name, value))


def _timestamp_ms(name: str, value: str) -> int:
    if value.isascii() and value.isdigit() and int(value) < 2**63:
        return int(value)
    try:
        time = dt.datetime.fromisoformat(value)
    except ValueError:
        raise OptionError(name, value, f"expected {_POINTS}") from None
    if time.tzinfo is None:
        hint = f"{time.isoformat()}Z?"
        raise OptionError(name, value, f"has no time zone: did you mean {hint}")
    return round(time.timestamp() * 1000)


_POINTS = (
    "earliest, latest, a time (2026-01-31T12:00:00Z, or milliseconds since 1970) or offsets "
    '({"topic": {"broker": {"0": 17}}})'
)


def _offsets(name: str, value: str) -> dict[MessageQueue, int]:
    try:
        return {
            MessageQueue(topic, broker, int(queue_id)): _offset(offset)
            for topic, brokers in json.loads(value).items()
            for broker, queues in brokers.items()
            for queue_id, offset in queues.items()
        }
    except (ValueError, AttributeError) as error:
        raise OptionError(name, value, f"expected {_POINTS}: {error}") from error


def _offset(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a queue offset")
    return value
