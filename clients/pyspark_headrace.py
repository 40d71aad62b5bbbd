"""Registers ``format("headrace")`` with Spark, which imports every module named ``pyspark_...``."""

from headrace.spark.source import HeadraceSource as DefaultSource

__all__ = ["DefaultSource"]
