"""The settings of the store, from those of its broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.config import split_list
from headrace_broker.store.settings import BATCH_UNIT_BYTES, UNIT_BYTES, Retention, StoreSettings

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig

_PAGE_BYTES = 4096
_HOUR_MS = 3_600_000
_UNIT_MS = {"s": 1000, "m": 60_000, "h": _HOUR_MS, "d": 24 * _HOUR_MS}


def store_settings(config: BrokerConfig, store_host: bytes) -> StoreSettings:
    """Settings of the store.

    store_host: address and port that records carry; see ``message_ids.encode_host``.
    """
    units = -(-config.mapped_file_size_consume_queue // UNIT_BYTES)
    batch_units = -(-config.mapper_file_size_batch_consume_queue // BATCH_UNIT_BYTES)
    return StoreSettings(
        root=config.store_path_root_dir,
        commit_log_file_bytes=config.mapped_file_size_commit_log,
        consume_queue_file_bytes=units * UNIT_BYTES,
        batch_queue_file_bytes=batch_units * BATCH_UNIT_BYTES,
        index_slot_count=config.max_hash_slot_num,
        index_entry_count=config.max_index_num,
        store_host=store_host,
        body_bytes_max=config.max_message_size,
        delay_levels_ms=tuple(map(_delay_ms, config.message_delay_level.split())),
        appends_checksums=config.append_checksums,
        flush="sync" if config.is_sync_flush else "async",
        flush_interval_ms=config.flush_interval_commit_log,
        flush_least_bytes=config.flush_commit_log_least_pages * _PAGE_BYTES,
        flush_thorough_interval_ms=config.flush_commit_log_thorough_interval,
        queue_flush_interval_ms=config.flush_interval_consume_queue,
        queue_flush_least_bytes=config.flush_consume_queue_least_pages * _PAGE_BYTES,
        queue_flush_thorough_interval_ms=config.flush_consume_queue_thorough_interval,
        retention=retention(config),
        clean_interval_ms=config.clean_resource_interval,
    )


def retention(config: BrokerConfig) -> Retention:
    """Retention settings of the store."""
    return Retention(
        reserved_ms=config.file_reserved_time * _HOUR_MS,
        delete_hours=frozenset(map(int, split_list(config.delete_when))),
        files_max=config.delete_file_batch_max,
        clean_ratio=_ratio(config.disk_max_used_space_ratio, 10, 95),
        force_ratio=_ratio(config.disk_space_clean_forcibly_ratio, 30, 85),
        refuse_ratio=_ratio(config.disk_space_warning_level_ratio, 35, 90),
        removes_young=config.clean_file_forcibly_enable,
        removes_unconsumed=config.delete_unconsumed_enable,
    )


def _delay_ms(delay: str) -> int:
    return int(delay[:-1]) * _UNIT_MS[delay[-1]]


def _ratio(percent: int, least: int, most: int) -> float:
    """A ratio within the peer's limits, which the peer also applies silently."""
    return min(max(percent, least), most) / 100
