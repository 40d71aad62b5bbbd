"""Where a tier is, and its files or objects. Of Spark's modules only this one imports obstore."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from headrace.spark.errors import OptionError, TierGone, TierUnreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

Range = tuple[int, int]
# Reading what lies between two ranges costs less than another read of so many bytes.
_FILE_GAP_BYTES: Final = 64 << 10
_OBJECT_GAP_BYTES: Final = 1 << 20
# Of a read from a folder, and of a request.
_LIMIT_S: Final = 60.0
_CLIENT: Final = {"timeout": f"{_LIMIT_S:.0f}s", "connect_timeout": "5s"}
_REASON_CHARACTERS_MAX: Final = 300
# Of all ranges of one read, and of a manifest. Readers ask for some tens of MiB, and a catalog of
# 64 MiB names a million parts.
_READ_BYTES_MAX: Final = 128 << 20
_MANIFEST_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class TierAccess:
    """How a read gets at tiers.

    manifest: the tier to read without a broker; None if brokers name theirs. config: of obstore, by
    name, such as ``access_key_id``; it may hold secrets.
    """

    manifest: str | None = None
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder or a bucket. endpoint, region: "" for those of the provider or ``config``."""

    url: str
    endpoint: str = ""
    region: str = ""
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)


class Store(Protocol):
    """A place that is read. gap_bytes: ranges closer than that are better read as one.

    Whoever can write to a place chooses the names and ranges that its manifest and units state. So
    only names below the place are followed, and no range is read that is unreasonably large.
    """

    gap_bytes: int

    def read(self, path: str, /, ranges: Sequence[Range]) -> list[bytes | memoryview]:
        """All bytes of each range. Raises TierGone, TierUnreachable."""
        ...

    def read_all(self, path: str, /) -> bytes:
        """A whole file. Raises as ``read``."""
        ...


def open_place(place: Place) -> Store:
    """The place of a tier. Raises OptionError."""
    folder = local_folder(place.url)
    return _Files(folder) if folder is not None else _open_bucket(place)


def local_folder(url: str) -> Path | None:
    """The folder of a path or a ``file:`` URL; None for other URLs."""
    parts = urlsplit(url)
    if not parts.scheme:
        return Path(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


class _Files:
    """A folder that this machine has mounted."""

    gap_bytes = _FILE_GAP_BYTES

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, path: str, ranges: Sequence[Range]) -> list[bytes | memoryview]:
        """As ``Store.read``."""
        _check_request(path, ranges)
        return self._within_limit(path, lambda: self._read(path, ranges))

    def read_all(self, path: str) -> bytes:
        """As ``Store.read_all``."""
        return self._within_limit(path, lambda: self._read_all(path))

    def _read(self, path: str, ranges: Sequence[Range]) -> list[bytes | memoryview]:
        with self._opened(path) as (file, _):
            found: list[bytes | memoryview] = [
                os.pread(file, end - start, start) for start, end in ranges
            ]
        _check_lengths(path, ranges, found)
        return found

    def _read_all(self, path: str) -> bytes:
        with self._opened(path) as (file, file_bytes):
            _check_size(path, file_bytes)
            return os.pread(file, file_bytes, 0)

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, int]]:
        """The descriptor of a regular file below the folder, and its size."""
        full = (self._folder / path).resolve()
        if not full.is_relative_to(self._folder.resolve()):
            raise TierGone(path, "leads out of the tier's folder")
        file = os.open(full, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise TierGone(path, "is no regular file")
            yield file, status.st_size
        finally:
            os.close(file)

    def _within_limit(self, path: str, read: Callable[[], T]) -> T:
        """What a read returns, by a thread that is abandoned when it takes too long.

        A call into a folder whose server is gone may never return, and nothing can interrupt it.
        """
        answers: SimpleQueue[Callable[[], T]] = SimpleQueue()

        def run() -> None:
            try:
                found = read()
            except OSError as error:
                problem = self._error(path, error)
                answers.put(partial(_raise, problem, error))
            except Exception as error:  # noqa: BLE001 - raised by whoever waits
                answers.put(partial(_raise, error, None))
            else:
                answers.put(lambda: found)

        Thread(target=run, daemon=True).start()
        try:
            answer = answers.get(timeout=_LIMIT_S)
        except Empty:
            reason = f"no answer in {_LIMIT_S:.0f} s: is the folder's server gone?"
            raise TierUnreachable(f"{self._folder}/{path}", reason) from None
        return answer()

    def _error(self, path: str, error: OSError) -> TierGone | TierUnreachable:
        if isinstance(error, FileNotFoundError):
            if self._folder.is_dir():
                return TierGone(path, "is not there any more")
            reason = "this machine does not have the folder: mount it on the driver and all workers"
            return TierUnreachable(str(self._folder), reason)
        return TierUnreachable(f"{self._folder}/{path}", str(error))


def _raise(error: Exception, cause: Exception | None) -> Any:
    raise error from cause


def _open_bucket(place: Place) -> _Bucket:
    try:
        from obstore.store import from_url
    except ImportError:
        reason = f"reading {place.url} needs obstore: pip install obstore"
        raise OptionError("tier", None, reason) from None
    stated: Any = _config(place)
    client: Any = _CLIENT | {"allow_http": stated.get("endpoint", "").startswith("http://")}
    secrets = [value for _, value in place.config]
    try:
        store = from_url(place.url, config=stated, client_options=client)
    except _obstore_errors() as error:
        reason = f"{place.url} can't be addressed: {_reason(error, secrets)}"
        raise OptionError("tier", None, reason) from None
    return _Bucket(store, place.url, secrets)


def _config(place: Place) -> dict[str, str]:
    """Settings of obstore: those of the options, else those of the place."""
    config = {"endpoint": place.endpoint} if place.endpoint else {}
    if not place.url.startswith("s3:"):
        return config | dict(place.config)
    config |= {"region": place.region} if place.region else {}
    config |= dict(place.config)
    if "endpoint" in config:
        # Servers other than Amazon's rarely have a host name for each bucket.
        config = {"virtual_hosted_style_request": "false", "region": "us-east-1"} | config
    return config


def _obstore_errors() -> tuple[type[Exception], ...]:
    from obstore.exceptions import BaseError

    return BaseError, OSError, ValueError, TypeError


def _reason(error: Exception, secrets: Sequence[str]) -> str:
    """The first line of an error, without what some servers repeat of a request."""
    reason = str(error).partition("\n")[0]
    for secret in secrets:
        reason = reason.replace(secret, "...")
    return reason[:_REASON_CHARACTERS_MAX]


class _Bucket:
    """Objects below a prefix. secrets: removed from errors, in which some servers repeat them."""

    gap_bytes = _OBJECT_GAP_BYTES

    def __init__(self, store: Any, url: str, secrets: Sequence[str]) -> None:
        self._store = store
        self._url = url
        self._secrets = secrets

    def read(self, path: str, ranges: Sequence[Range]) -> list[bytes | memoryview]:
        """As ``Store.read``."""
        _check_request(path, ranges)
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        try:
            # obstore would join ranges, and panic where a joined one begins behind the object.
            answers = self._store.get_ranges(path, starts=starts, ends=ends, coalesce=0)
        except FileNotFoundError:
            raise TierGone(path, "is not there any more") from None
        except _obstore_errors() as error:
            raise self._unreachable(path, error) from None
        found = [memoryview(answer) for answer in answers]
        _check_lengths(path, ranges, found)
        return [*found]

    def read_all(self, path: str) -> bytes:
        """As ``Store.read_all``."""
        try:
            found = self._store.get(path)
            _check_size(path, found.meta["size"])
            return bytes(found.bytes())
        except FileNotFoundError:
            raise TierGone(path, "is not there any more") from None
        except _obstore_errors() as error:
            raise self._unreachable(path, error) from None

    def _unreachable(self, path: str, error: Exception) -> TierUnreachable:
        return TierUnreachable(f"{self._url}/{path}", _reason(error, self._secrets))


def _check_request(path: str, ranges: Sequence[Range]) -> None:
    """Raise TierGone for a name or for ranges that no tier has."""
    if any(part in {"", ".", ".."} for part in path.split("/")):
        raise TierGone(path, "is not the name of something below the tier's place")
    if any(not 0 <= start <= end for start, end in ranges):
        raise TierGone(path, "is to be read at places that no file has")
    read_bytes = sum(end - start for start, end in ranges)
    if read_bytes > _READ_BYTES_MAX:
        raise TierGone(
            path, f"{read_bytes} bytes of it are named; at most {_READ_BYTES_MAX} are read"
        )


def _check_size(path: str, file_bytes: int) -> None:
    if file_bytes > _MANIFEST_BYTES_MAX:
        raise TierGone(path, f"has {file_bytes} bytes; at most {_MANIFEST_BYTES_MAX} are read")


def _check_lengths(path: str, ranges: Sequence[Range], found: Sequence[bytes | memoryview]) -> None:
    # A range that ends behind the file or object is cut without an error.
    for (start, end), data in zip(ranges, found, strict=True):
        if len(data) != end - start:
            raise TierGone(path, f"has {len(data)} bytes at {start} instead of {end - start}")
