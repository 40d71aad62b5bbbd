"""Where a bucket is, and with which credentials; known without the client of object stores."""

from __future__ import annotations

from typing import Literal, NamedTuple

Provider = Literal["s3", "gcs", "azure"]


class ObjectPlace(NamedTuple):
    """A bucket. Without keys the environment's or the machine's credentials apply.

    access_key, secret_key: for Azure, the account and its key; GCS takes its credentials from the
    environment. prefix: goes before every path.
    """

    provider: Provider
    bucket: str
    endpoint: str = ""
    region: str = ""
    access_key: str = ""
    secret_key: str = ""
    prefix: str = ""

    def __repr__(self) -> str:
        return f"ObjectPlace({self.provider}, {self.bucket!r}, {self.endpoint!r}, {self.prefix!r})"

    @property
    def url(self) -> str:
        """The bucket and the prefix, as obstore and others name them."""
        scheme = {"s3": "s3", "gcs": "gs", "azure": "az"}[self.provider]
        return f"{scheme}://{self.bucket}/{self.prefix.strip('/')}".rstrip("/")

    def secrets(self) -> tuple[str, ...]:
        """What must not appear in logs."""
        return tuple(secret for secret in (self.access_key, self.secret_key) if secret)
