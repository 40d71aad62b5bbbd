"""Whether members pull or pop, by topic and group: config/messageRequestMode.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import msgspec

from headrace_broker.persistence import SavedFile, load_table
from headrace_protocol import fastjson
from headrace_protocol.bodies import Body, SetMessageRequestModeRequestBody
from headrace_protocol.bounds import ITEMS_MAX
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.store.files.config_file import ConfigFile

_TABLE: Final = "messageRequestModeMap"
_MODES: Final = ("PULL", "POP")

Mode = SetMessageRequestModeRequestBody


class ModeDefaults(Protocol):
    """Settings of the broker for groups without an entry."""

    default_message_request_mode: Literal["PULL", "POP"]
    default_pop_share_queue_num: int


class RequestModes:
    """The mode of each group's reading of a topic. saved: the file."""

    def __init__(self, file: ConfigFile, defaults: ModeDefaults) -> None:
        """Load the table. Raises StoreFormatError if its file can't be read."""
        self._defaults = defaults
        # Entries as the file has them, with fields of other versions, and what they mean.
        loaded = load_table(file, _parse) or _Loaded({}, {}, {})
        self._fields, self._entries, self._modes = loaded
        self.saved = SavedFile(file, self._snapshot)

    def get(self, topic: str, group: str) -> Mode:
        """The mode in which a group reads a topic; PULL for retry topics."""
        if topic.startswith(RETRY_PREFIX):
            return Mode(topic=topic, consumer_group=group)
        mode = self._modes.get(topic, {}).get(group)
        if mode is not None:
            return mode
        return Mode(
            topic=topic,
            consumer_group=group,
            mode=self._defaults.default_message_request_mode,
            pop_share_queue_num=self._defaults.default_pop_share_queue_num,
        )

    def put(self, mode: Mode) -> None:
        """Set how a group reads a topic. Raises RequestError."""
        topic, group = mode.topic, mode.consumer_group
        if mode.mode not in _MODES:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"mode {mode.mode[:40]!r}: expected {' or '.join(_MODES)}",
            )
        if topic.startswith(RETRY_PREFIX):
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"retry topic is not allowed to set mode: {topic} is always pulled",
            )
        groups = self._entries.get(topic, {})
        if group not in groups and sum(map(len, self._entries.values())) >= ITEMS_MAX:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"{ITEMS_MAX} request modes are the most; set defaultMessageRequestMode instead",
            )
        entry = groups.get(group, {}) | fastjson.loads(mode.encode(strict=True))
        # Replaced, never changed: a thread may be writing the old one.
        self._entries = self._entries | {topic: groups | {group: entry}}
        self._modes.setdefault(topic, {})[group] = mode
        self.saved.changed()

    def text(self) -> bytes:
        """The table as its file has it."""
        return fastjson.dumps(self._fields | {_TABLE: self._entries})

    def _snapshot(self) -> Callable[[], bytes]:
        fields, entries = self._fields, self._entries
        return lambda: fastjson.dumps(fields | {_TABLE: entries}, pretty=True)


class _Table(Body):
    message_request_mode_map: dict[str, dict[str, Mode]] = msgspec.field(default_factory=dict)


class _Loaded(NamedTuple):
    """The file: its other fields, its entries, and the modes in them."""

    fields: dict[str, Any]
    entries: dict[str, dict[str, dict[str, Any]]]
    modes: dict[str, dict[str, Mode]]


def _parse(text: bytes) -> _Loaded:
    """Raises ValueError."""
    modes = _Table.decode(text).message_request_mode_map
    fields = fastjson.loads(text)
    return _Loaded(fields, fields.pop(_TABLE, None) or {}, modes)
