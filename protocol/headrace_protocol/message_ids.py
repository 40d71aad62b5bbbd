"""Hosts as records hold them, and ids of messages."""

from __future__ import annotations

import datetime as dt
import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def encode_host(ip: str, port: int) -> bytes:
    """4 or 16 address bytes and the port as a 4-byte integer."""
    return ipaddress.ip_address(ip).packed + port.to_bytes(4, "big")


def decode_host(host: bytes) -> tuple[str, int]:
    """Address text and port. Raises ValueError unless ``host`` has 8 or 20 bytes."""
    return str(ipaddress.ip_address(host[:-4])), int.from_bytes(host[-4:], "big")


def host_text(host: bytes) -> str:
    """Address and port as clients write them. Raises ValueError as ``decode_host``."""
    ip, port = decode_host(host)
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def encode_offset_message_id(store_host: bytes, physical_offset: int) -> str:
    """The 32 or 56 hex digits that identify a record by broker address and log position."""
    return (store_host + physical_offset.to_bytes(8, "big", signed=True)).hex().upper()


def decode_offset_message_id(message_id: str) -> tuple[bytes, int]:
    """Store host and physical offset. Raises ValueError for anything but 32 or 56 hex digits."""
    if len(message_id) not in {32, 56}:
        raise ValueError(f"message id {message_id!r} is not 32 or 56 hex digits")
    raw = bytes.fromhex(message_id)
    return raw[:-8], int.from_bytes(raw[-8:], "big", signed=True)


class UniqKeyGenerator:
    """Generates UNIQ_KEYs: address, process, instance, time in the local month, counter."""

    __slots__ = ("_counter", "_month_end_ms", "_month_start_ms", "_now_ms", "_prefix")

    def __init__(self, now_ms: Callable[[], int], pid: int, ip: bytes, instance: int = 0) -> None:
        """now_ms: wall clock. ip: 4 or 16 bytes. instance: distinguishes two in one process."""
        self._now_ms = now_ms
        raw = ip + (pid & 0xFFFF).to_bytes(2, "big") + (instance & 0xFFFFFFFF).to_bytes(4, "big")
        self._prefix = raw.hex().upper()
        self._counter = 0
        self._month_start_ms = self._month_end_ms = 0

    def next(self) -> str:
        """A new key of 32 (IPv4) or 56 characters."""
        now_ms = self._now_ms()
        if not self._month_start_ms <= now_ms < self._month_end_ms:
            self._month_start_ms, self._month_end_ms = _local_month_ms(now_ms)
        self._counter = (self._counter + 1) & 0xFFFF
        return f"{self._prefix}{now_ms - self._month_start_ms & 0xFFFFFFFF:08X}{self._counter:04X}"


def _local_month_ms(now_ms: int) -> tuple[int, int]:
    today = dt.datetime.fromtimestamp(now_ms / 1000).astimezone()
    start = dt.datetime(today.year, today.month, 1)  # noqa: DTZ001 - local time is meant
    following = (start + dt.timedelta(days=32)).replace(day=1)
    return int(start.timestamp() * 1000), int(following.timestamp() * 1000)
