"""Address and credentials of a tier; needs no client of object stores."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit


class Location(NamedTuple):
    """A folder or a bucket. endpoint, region: "" for those of the provider or ``config``.

    url: with the prefix of all paths. config: of obstore, by name, such as ``access_key_id``; it
    may hold secrets. Without keys the environment's or the machine's credentials apply.
    """

    url: str
    endpoint: str = ""
    region: str = ""
    config: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Location({self.url!r}, {self.endpoint!r}, {self.region!r})"

    @property
    def folder(self) -> Path | None:
        """The folder of a path or a ``file:`` URL; None for other URLs."""
        parts = urlsplit(self.url)
        if not parts.scheme:
            return Path(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    @property
    def settings(self) -> dict[str, str]:
        """Settings of obstore: those of ``config``, else those of the location."""
        found = {"endpoint": self.endpoint} if self.endpoint else {}
        if not self.url.startswith("s3:"):
            return found | dict(self.config)
        found |= ({"region": self.region} if self.region else {}) | dict(self.config)
        if "endpoint" not in found:
            return {"virtual_hosted_style_request": "true"} | found
        # Servers other than Amazon's rarely have a host name for each bucket.
        return {"virtual_hosted_style_request": "false", "region": "us-east-1"} | found
