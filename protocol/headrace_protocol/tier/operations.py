"""Operations of a driver, and a driver that runs each of another's operations in its own way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from headrace_protocol.tier.driver import REWRITTEN_BYTES_MAX, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_protocol.tier.driver import Buffer, Entry, Range

T = TypeVar("T")

# A read is shorter than the 10 s after which the peer's pull consumers give up. A listing walks
# through all files of a broker.
_LIMITS_S: Final = {"read": 5.0, "size": 5.0, "etag": 5.0, "list": 300.0}
_WRITE_LIMIT_S: Final = 30.0
_MIB: Final = 1 << 20


class Operation(NamedTuple):
    """A request to a driver.

    path: of a listing, the folder. byte_count: bytes that it moves. changes: paths that it writes
    or deletes. Each MiB and each of these paths takes a second more. replaces: whether it fails
    unless there is a certain object.
    """

    name: str
    path: str
    byte_count: int = 0
    changes: tuple[str, ...] = ()
    replaces: bool = False

    @property
    def limit_s(self) -> float:
        """The time after which it is abandoned."""
        limit_s = _LIMITS_S.get(self.name, _WRITE_LIMIT_S)
        return limit_s + self.byte_count / _MIB + max(len(self.changes) - 1, 0)

    def __str__(self) -> str:
        return f"{self.name} of {self.path}"


class Wrapped:
    """A driver of files or objects, as the one in it; see ``AppendDriver`` and ``PutDriver``."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def _run(self, operation: Operation, operate: Callable[[], T]) -> T | Failure:
        raise NotImplementedError

    def read(self, path: str, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """As ``Driver.read``."""
        operation = Operation("read", path, sum(end - start for start, end in ranges))
        return self._run(operation, lambda: self._driver.read(path, ranges))

    def size(self, path: str) -> int | Failure:
        """As ``Driver.size``."""
        return self._run(Operation("size", path), lambda: self._driver.size(path))

    def entries(self, folder: str) -> list[Entry] | Failure:
        """As ``Driver.entries``."""
        return self._run(Operation("list", folder), lambda: self._driver.entries(folder))

    def delete(self, paths: Sequence[str]) -> Failure | None:
        """As ``Driver.delete``."""
        if not paths:
            return None
        operation = Operation("delete", paths[0], changes=tuple(paths))
        return self._run(operation, lambda: self._driver.delete(paths))

    def append(self, path: str, position: int, data: Buffer) -> Failure | None:
        """As ``AppendDriver.append``."""
        operation = Operation("write", path, len(data), (path,))
        return self._run(operation, lambda: self._driver.append(path, position, data))

    def cut(self, path: str, size: int) -> Failure | None:
        """As ``AppendDriver.cut``."""
        operation = Operation("cut", path, changes=(path,))
        return self._run(operation, lambda: self._driver.cut(path, size))

    def rewrite(self, path: str, start: int) -> Failure | None:
        """As ``AppendDriver.rewrite``."""
        operation = Operation("rewrite", path, REWRITTEN_BYTES_MAX, (path,))
        return self._run(operation, lambda: self._driver.rewrite(path, start))

    def put(self, path: str, data: Buffer, replaces: str = "") -> str | Failure:
        """As ``PutDriver.put``."""
        operation = Operation("write", path, len(data), (path,), bool(replaces))
        return self._run(operation, lambda: self._driver.put(path, data, replaces))

    def etag(self, path: str) -> str | Failure:
        """As ``PutDriver.etag``."""
        return self._run(Operation("etag", path), lambda: self._driver.etag(path))
