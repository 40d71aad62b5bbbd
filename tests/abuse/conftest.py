"""Brokers for the tests of this folder."""

from __future__ import annotations

from tests.broker.conftest import broker

__all__ = ["broker"]
