"""The file that keeps departed brokers across restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace_nameserver.config import ConfigError
from headrace_nameserver.departed import Departed
from headrace_protocol.bodies import QueueData  # noqa: TC001 - msgspec
from headrace_protocol.departed import Departure
from headrace_protocol.drivers.files import replace_file
from headrace_protocol.errors import reason_of
from headrace_protocol.statictopic.mapping import MappingInfo  # noqa: TC001 - msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_nameserver.departed import Known


class _Line(msgspec.Struct, rename="camel", omit_defaults=True):
    """A broker in the file. since: ms since 1970; None if it was live when the file was saved."""

    name: str
    cluster: str
    address: str
    host: str
    how: str
    since: int | None = None
    queues: dict[str, QueueData] = {}
    mappings: dict[str, MappingInfo] = {}
    compacted: list[str] = []


class DepartedFile:
    """departedBrokers.json: a line of JSON for each broker that was departed or live.

    Brokers that were live count as departed after a start, until they register. A nameserver that
    starts after a power cut thus misses a broker that does not come back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, now_ms: int, wall_ms: int) -> list[Departed]:
        """The brokers of the file, the longest away first. Raises ConfigError.

        now_ms, wall_ms: now on the clock of the table, and in ms since 1970.
        """
        try:
            data = self.path.read_bytes()
            lines = [msgspec.json.decode(line, type=_Line) for line in data.splitlines()]
            found = [_departed(line, now_ms, wall_ms) for line in lines]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{self.path}: cannot read which brokers have left: {reason_of(error)}; "
                "move it away"
            ) from error
        return sorted(found, key=lambda each: each.since_ms)

    def save(self, known: Known, clock_ms: int) -> None:
        """Replace the file. For any thread. Raises OSError.

        clock_ms: ms since 1970 at which the clock of the table was 0.
        """
        lines = [_line(each, each.since_ms + clock_ms) for each in known.departed]
        lines += [_line(each, None) for each in known.live]
        encoded = [msgspec.json.encode(line) + b"\n" for line in lines]
        replace_file(self.path, b"".join(encoded))


def _line(broker: Departed, since: int | None) -> _Line:
    return _Line(
        broker.name,
        broker.cluster,
        broker.address,
        broker.host,
        broker.how.name,
        since,
        broker.queues,
        broker.mappings,
        sorted(broker.compacted),
    )


def _departed(line: _Line, now_ms: int, wall_ms: int) -> Departed:
    return Departed(
        line.name,
        line.cluster,
        line.address,
        line.host,
        Departure[line.how],
        now_ms if line.since is None else now_ms - max(wall_ms - line.since, 0),
        line.queues,
        line.mappings,
        frozenset(line.compacted),
    )
