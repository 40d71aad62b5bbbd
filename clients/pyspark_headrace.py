"""Registers ``format("headrace")``: Spark searches modules named ``pyspark_*`` for sources."""

from headrace.spark.source import HeadraceSource as DefaultSource

__all__ = ["DefaultSource"]
