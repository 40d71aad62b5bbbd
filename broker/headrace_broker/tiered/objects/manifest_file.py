"""The manifest in the store, and the epoch that says who may replace it.

Every replacement names the etag of the manifest it replaces. A broker takes the next epoch at its
start; whoever wrote in an older one is refused from then on, and finds out why by reading.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.rows import (
    FORMAT,
    MANIFEST,
    Manifest,
    Reference,
    decode_manifest,
    encode,
)

if TYPE_CHECKING:
    from headrace_protocol.tier.driver import PutDriver

_TRIES: Final = 8
_WRITER_BYTES: Final = 8
_CONFLICTS: Final = {FailureKind.EXISTS, FailureKind.CHANGED, FailureKind.MISSING}


class _Read(NamedTuple):
    manifest: Manifest
    etag: str


class ManifestFile:
    """The manifest as this broker wrote it last. replaced: why it may write no more."""

    def __init__(self, driver: PutDriver, folder: str, cluster: str, broker: str) -> None:
        self.replaced: Failure | None = None
        self._driver = driver
        self.path = f"{folder}/{MANIFEST}"
        self._etag = ""
        self.manifest = Manifest(FORMAT, cluster, broker, 0, "", 0, 0, [], [])
        self._number = 0

    def new_name(self, folder: str, now_ms: int) -> str:
        """A name that was never used: the epoch is this broker's alone.

        It tells the age of its object as well.
        """
        self._number += 1
        return f"{folder}/{self.manifest.epoch:08}-{self._number:010}-{now_ms:014}"

    def take(self) -> Failure | None:
        """Take the next epoch. Fails with UNREACHABLE, DAMAGED."""
        writer = secrets.token_hex(_WRITER_BYTES)
        for _ in range(_TRIES):
            found = self._read()
            if isinstance(found, Failure):
                if found.kind is not FailureKind.MISSING:
                    return found
                found = _Read(self.manifest, "")
            elif found.manifest.writer == writer:  # the answer of the put was lost
                self.manifest, self._etag = found
                return None
            old = found.manifest
            taken = msgspec.structs.replace(
                old, epoch=old.epoch + 1, writer=writer, generation=0, number=0
            )
            put = self._driver.put(self.path, encode(taken), found.etag)
            if isinstance(put, str):
                self.manifest, self._etag = taken, put
                return None
            if put.kind not in _CONFLICTS:
                return put
        return Failure(FailureKind.UNREACHABLE, self.path, "other brokers replace it all the time")

    def look(self) -> Failure | None:
        """Read the manifest without taking an epoch; it can't be replaced then.

        Fails with MISSING, UNREACHABLE, DAMAGED.
        """
        found = self._read()
        if isinstance(found, Failure):
            return found
        self.manifest = found.manifest
        self.replaced = Failure(FailureKind.CHANGED, self.path, "was opened for reading only")
        return None

    def take_anew(self, epoch: int) -> Failure | None:
        """Begin an epoch although there is no manifest that can be read.

        The first ``commit`` writes it. Fails with UNREACHABLE.
        """
        etag = self._driver.etag(self.path)
        if isinstance(etag, Failure) and etag.kind is not FailureKind.MISSING:
            return etag
        self._etag = etag if isinstance(etag, str) else ""
        writer = secrets.token_hex(_WRITER_BYTES)
        self.manifest = msgspec.structs.replace(self.manifest, epoch=epoch, writer=writer)
        return None

    def commit(self, catalogs: list[Reference], tail: list[Reference]) -> Failure | None:
        """Replace the lists. After UNREACHABLE they may be replaced nevertheless.

        Fails with CHANGED for good once another broker has taken over.
        """
        if self.replaced is not None:
            return self.replaced
        now = self.manifest
        wanted = msgspec.structs.replace(
            now,
            generation=now.generation + 1,
            number=self._number,
            catalogs=catalogs,
            tail=tail,
        )
        data = encode(wanted)
        for _ in range(_TRIES):
            put = self._driver.put(self.path, data, self._etag)
            if isinstance(put, str):
                self.manifest, self._etag = wanted, put
                return None
            if put.kind not in _CONFLICTS:
                return put
            found = self._own()
            if isinstance(found, Failure):
                return found
            self._etag = found.etag
            if found.manifest == wanted:  # the answer of the put was lost
                self.manifest = wanted
                return None
        return Failure(FailureKind.UNREACHABLE, self.path, "can't be replaced")

    def settle(self) -> Failure | None:
        """Have the store say what this broker knows, whatever became of puts without an answer.

        Fails with CHANGED for good once another broker has taken over.
        """
        found = self._own() if self.replaced is None else self.replaced
        if isinstance(found, Failure):
            return found
        if found.manifest == self.manifest:
            return None
        return self.commit(self.manifest.catalogs, self.manifest.tail)

    def _own(self) -> _Read | Failure:
        """The manifest, if it is still this broker's."""
        found = self._read()
        if isinstance(found, Failure):
            if found.kind is FailureKind.MISSING:
                reason = "is gone: restore it from a backup, or move the broker's folder away"
                return Failure(FailureKind.DAMAGED, self.path, reason)
            return found
        theirs, ours = found.manifest, self.manifest
        if theirs.writer == ours.writer:
            return found
        self.replaced = Failure(
            FailureKind.CHANGED,
            self.path,
            f"another broker named {ours.broker} has taken over the tier in epoch {theirs.epoch}, "
            f"after {ours.epoch} of this one, which uploads nothing more: stop one of the two, or "
            "restart this one to take the tier back",
        )
        return self.replaced

    def _read(self) -> _Read | Failure:
        """The manifest with its etag: read until the etag is the same before and after."""
        etag = self._driver.etag(self.path)
        for _ in range(_TRIES):
            if isinstance(etag, Failure):
                return etag
            size = self._driver.size(self.path)
            if isinstance(size, Failure):
                return size
            data = self._driver.read(self.path, [(0, size)])
            after = self._driver.etag(self.path)
            if isinstance(data, list) and after == etag:
                manifest = decode_manifest(data[0], self.path)
                return manifest if isinstance(manifest, Failure) else self._checked(manifest, etag)
            if isinstance(data, Failure) and data.kind is not FailureKind.SHORT:
                return data
            etag = after
        return Failure(FailureKind.UNREACHABLE, self.path, "changes while it is read")

    def _checked(self, manifest: Manifest, etag: str) -> _Read | Failure:
        ours = self.manifest
        if (manifest.cluster, manifest.broker) != (ours.cluster, ours.broker):
            reason = f"belongs to broker {manifest.broker} of cluster {manifest.cluster}"
            return Failure(FailureKind.DAMAGED, self.path, reason)
        return _Read(manifest, etag)
