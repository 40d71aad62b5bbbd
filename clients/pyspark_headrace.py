"""Lets Spark find ``format("headrace")`` by itself: it looks into modules named ``pyspark_...``."""

from headrace.spark.source import HeadraceSource as DefaultSource

__all__ = ["DefaultSource"]
