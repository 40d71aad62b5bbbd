"""Brokers for the tests of this folder."""

from __future__ import annotations

from tests.broker.conftest import broker, brokers_end

__all__ = ["broker", "brokers_end"]
