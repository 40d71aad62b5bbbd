"""Settings of tiered storage: a part of the table in ``config.py``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path  # noqa: TC003 - pydantic reads the annotations
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, SecretStr, field_validator, model_validator
from pydantic.alias_generators import to_camel

from headrace_broker.settings.setting import setting

if TYPE_CHECKING:
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_protocol.tier.location import Location
    from headrace_protocol.tier.paths import Home

# Values that switch the tier on, and its providers: the peer's classes, and short names.
_TIER_PLUG_INS = {"org.apache.rocketmq.tieredstore.TieredMessageStore", "tieredstore"}
_TIER_PROVIDERS = {
    "org.apache.rocketmq.tieredstore.provider.PosixFileSegment": "posix",
    "org.apache.rocketmq.tieredstore.provider.MemoryFileSegment": "memory",
    **{name: name for name in ("posix", "memory", "file", "s3", "gcs", "azure")},
}
_FOLDERS = {"posix", "file"}
# With the scheme of their URLs, and what obstore calls their two keys.
_BUCKETS = {
    "s3": ("s3", "access_key_id", "secret_access_key"),
    "gcs": ("gs",),
    "azure": ("az", "account_name", "account_key"),
}
_UNIT_BYTES = 20
_HOUR_MS = 3_600_000
_INT_MAX = 2**31 - 1


class TierConfig(BaseModel):
    """The settings with which ``BrokerConfig`` begins; off unless ``message_store_plug_in``."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")

    message_store_plug_in: str = setting(
        "",
        "tieredstore (or Apache's class org.apache.rocketmq.tieredstore.TieredMessageStore) keeps"
        " messages in tiered storage as well; if empty, only in the log.",
    )
    tiered_backend_service_provider: str = setting(
        "",
        "Where tiered storage keeps messages: posix, in the folder tieredStoreFilePath; s3, gcs or"
        " azure, in the bucket objectStoreBucket; file, in the folder as in a bucket; memory, for"
        " trials. Apache's classes PosixFileSegment and MemoryFileSegment are posix and memory.",
    )
    tiered_store_file_path: Path | None = setting(
        None, "Folder of tiered storage, on another disk or a mounted file system."
    )
    object_store_endpoint: str = setting(
        "", "URL of the object store; if empty, that of the provider's own service."
    )
    object_store_bucket: str = setting("", "Bucket of tiered storage; with azure, the container.")
    object_store_prefix: str = setting(
        "", "Goes before the names of all objects, for a bucket with other contents."
    )
    object_store_region: str = setting("", "Region of the bucket, for s3; if empty, us-east-1.")
    object_store_access_key: SecretStr = setting(
        SecretStr(""),
        "Access key of the bucket; with azure, the account. If empty, the credentials of the"
        " environment or the machine apply, as with gcs always.",
    )
    object_store_secret_key: SecretStr = setting(
        SecretStr(""), "Secret of objectStoreAccessKey; never shown."
    )
    tiered_storage_level: Literal["DISABLE", "NOT_IN_DISK", "NOT_IN_MEM", "FORCE"] = setting(
        "NOT_IN_DISK",
        "Messages read from tiered storage, of those that it has: none; those that have left the"
        " log; also those that are not in memory; all.",
    )
    tiered_store_commit_log_max_size: int = setting(
        1 << 30, "Size of a queue's log segment in the tier.", unit="bytes", ge=1, le=_INT_MAX
    )
    tiered_store_consume_queue_max_size: int = setting(
        100 << 20,
        "Size of a queue's unit segment in the tier; a multiple of 20.",
        unit="bytes",
        ge=20,
        le=_INT_MAX,
    )
    tiered_store_index_file_max_hash_slot_num: int = setting(
        5_000_000, "Slots of an index file of the tier.", ge=1, le=_INT_MAX
    )
    tiered_store_index_file_max_index_num: int = setting(
        20_000_000, "Items of an index file of the tier.", ge=2, le=_INT_MAX
    )
    commit_log_rolling_interval: int = setting(
        24,
        "Age of a log segment in the tier at which another is begun, if it has"
        " commitLogRollingMinimumSize.",
        unit="hours",
        ge=1,
        le=1_000_000,
    )
    commit_log_rolling_minimum_size: int = setting(
        16 << 20, "Size that a log segment of that age must have.", unit="bytes", ge=0, le=_INT_MAX
    )
    tiered_store_group_commit_timeout: int = setting(
        30_000, "Time after which messages are uploaded.", unit="ms", ge=1, le=_INT_MAX
    )
    tiered_store_group_commit_count: int = setting(
        4096, "Messages of a queue that are uploaded at once.", ge=1, le=_INT_MAX
    )
    tiered_store_group_commit_size: int = setting(
        4 << 20, "Bytes of a queue that are uploaded at once.", unit="bytes", ge=1, le=_INT_MAX
    )
    delete_untiered_enable: bool = setting(
        False,
        "Let clean-up also delete messages that are still to be copied to tiered storage.",
        reloadable=True,
    )
    tiered_store_delete_file_enable: bool = setting(
        True, "Delete expired segments of tiered storage."
    )
    tiered_store_file_reserved_time: int = setting(
        72,
        "Age at which messages in tiered storage expire, unless their topic has a reserve.time.",
        unit="hours",
        ge=1,
        le=1_000_000,
    )
    tiered_store_delete_file_interval: int = setting(
        3_600_000, "Interval of clean-ups of tiered storage.", unit="ms", ge=1, le=_INT_MAX
    )
    tiered_store_crc_check_enable: bool = setting(
        False, "Check the CRC of bodies that are read from tiered storage."
    )
    read_ahead_cache_enable: bool = setting(
        True, "Read more of tiered storage than a consumer asks for, if it reads on."
    )
    read_ahead_message_count_threshold: int = setting(
        4096, "Most messages that are read ahead at once.", ge=1, le=_INT_MAX
    )
    read_ahead_message_size_threshold: int = setting(
        16 << 20,
        "Most bytes that are read ahead at once, and never more than 4 MiB.",
        unit="bytes",
        ge=1,
        le=_INT_MAX,
    )
    read_ahead_cache_expire_duration: int = setting(
        15_000,
        "How long messages that were read stay in memory after their last use.",
        unit="ms",
        ge=1,
        le=_INT_MAX,
    )

    @field_validator("message_store_plug_in")
    @classmethod
    def _is_tier(cls, name: str) -> str:
        if name and name not in _TIER_PLUG_INS:
            raise ValueError("expected tieredstore or Apache's TieredMessageStore, or leave it out")
        return name

    @field_validator("tiered_backend_service_provider")
    @classmethod
    def _is_provider(cls, name: str) -> str:
        if name and name not in _TIER_PROVIDERS:
            raise ValueError(
                "expected posix, s3, gcs, azure, file or memory, or Apache's class for one of them"
            )
        return name

    @model_validator(mode="after")
    def _has_a_location_for_the_tier(self) -> Self:
        if not self.message_store_plug_in:
            return self
        provider = self.tiered_backend_service_provider
        if not provider:
            raise ValueError(
                "tieredBackendServiceProvider=: expected posix, with tieredStoreFilePath, or s3, "
                "with objectStoreBucket; by default Apache RocketMQ keeps what is tiered in "
                "memory, where a stop loses it"
            )
        kind = _TIER_PROVIDERS[provider]
        if kind in _FOLDERS and self.tiered_store_file_path is None:
            raise ValueError("tieredStoreFilePath=: expected a folder")
        if kind in _BUCKETS:
            self._check_bucket(kind)
        return self

    def _check_bucket(self, kind: str) -> None:
        if not self.object_store_bucket:
            raise ValueError("objectStoreBucket=: expected the name of a bucket")
        endpoint = self.object_store_endpoint
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"objectStoreEndpoint={endpoint}: expected http:// or https://")
        has_key = bool(self.object_store_access_key.get_secret_value())
        if has_key != bool(self.object_store_secret_key.get_secret_value()):
            missing = "objectStoreSecretKey" if has_key else "objectStoreAccessKey"
            raise ValueError(f"{missing}=: expected both keys or none")
        if kind == "gcs" and (has_key or endpoint):
            raise ValueError(
                "tieredBackendServiceProvider=gcs: takes credentials and endpoint from the "
                "environment; leave out objectStoreAccessKey, objectStoreSecretKey and "
                "objectStoreEndpoint"
            )
        if find_spec("obstore") is None:
            raise ValueError(
                f"tieredBackendServiceProvider={kind}: needs obstore, which is not installed: "
                "pip install obstore"
            )

    def tier_settings(self, root: Path, home: Home) -> TierSettings | None:
        """Settings of tiered storage; None if it is off. root: the store's directory."""
        if not self.message_store_plug_in:
            return None
        from headrace_broker.cold.reader import ReadAhead
        from headrace_broker.tiered.access.settings import StorageLevel, TierSettings
        from headrace_broker.tiered.container.flat_queue import SegmentLimits
        from headrace_broker.tiered.container.index_file import IndexSize

        units = -(-self.tiered_store_consume_queue_max_size // _UNIT_BYTES)
        kind = _TIER_PROVIDERS[self.tiered_backend_service_provider]
        return TierSettings(
            root=root,
            folder=self.tiered_store_file_path if kind in _FOLDERS else None,
            bucket=self._bucket(kind),
            keeps_objects=kind == "file" or kind in _BUCKETS,
            home=home,
            level=StorageLevel[self.tiered_storage_level],
            limits=SegmentLimits(
                log_bytes=self.tiered_store_commit_log_max_size,
                units_bytes=units * _UNIT_BYTES,
                log_age_ms=self.commit_log_rolling_interval * _HOUR_MS,
                log_aged_bytes=self.commit_log_rolling_minimum_size,
            ),
            index_size=IndexSize(
                self.tiered_store_index_file_max_hash_slot_num,
                self.tiered_store_index_file_max_index_num,
            ),
            commit_ms=self.tiered_store_group_commit_timeout,
            commit_count=self.tiered_store_group_commit_count,
            commit_bytes=self.tiered_store_group_commit_size,
            reserved_ms=self.tiered_store_file_reserved_time * _HOUR_MS,
            deletes=self.tiered_store_delete_file_enable,
            clean_ms=self.tiered_store_delete_file_interval,
            read_ahead=ReadAhead(
                self.read_ahead_message_count_threshold,
                self.read_ahead_message_size_threshold,
                self.read_ahead_cache_expire_duration / 1000,
                self.read_ahead_cache_enable,
                self.tiered_store_crc_check_enable,
            ),
        )

    def _bucket(self, kind: str) -> Location | None:
        from urllib.parse import quote

        from headrace_protocol.tier.location import Location

        if kind not in _BUCKETS:
            return None
        scheme, *names = _BUCKETS[kind]
        prefix = quote(self.object_store_prefix.strip("/"))
        url = f"{scheme}://{self.object_store_bucket}/{prefix}".rstrip("/")
        keys = self.object_store_access_key, self.object_store_secret_key
        stated = [(name, key.get_secret_value()) for name, key in zip(names, keys, strict=False)]
        config = tuple((name, value) for name, value in stated if value)
        return Location(url, self.object_store_endpoint, self.object_store_region, config)
