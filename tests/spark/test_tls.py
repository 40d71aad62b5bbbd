"""Spark over TLS: options of a source and a sink, and brokers that require it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.blocking import Admin
from headrace.spark.errors import OptionError
from headrace.spark.options import read_options
from headrace.spark.write.sink import write_options
from headrace_protocol.tls.settings import ClientTls
from tests.support.secured import Secured

FILES = {"caFile": "ca.pem", "certFile": "c.pem", "keyFile": "k.pem", "serverName": "broker"}
FOUND = ClientTls("ca.pem", "c.pem", "k.pem", None, "broker")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with Secured(tmp_path_factory.mktemp("tls")) as cluster:
        yield cluster


@pytest.mark.slow
def test_rows_are_written_and_read_over_tls(
    spark: SparkSession, secured: Secured, tmp_path: Path
) -> None:
    at = {"nameserver": secured.nameserver, "caFile": secured.ca_file}
    with Admin(**secured.at) as admin:
        admin.create_topic("Rows")
    rows = spark.createDataFrame([(bytes([number]),) for number in range(20)], "value binary")
    rows.write.format("headrace").options(**at, topic="Rows").mode("append").save()
    read = spark.readStream.format("headrace").options(**at, topic="Rows", starting="earliest")
    query = (
        read.load()
        .select("value")
        .writeStream.format("headrace")
        .options(**at, topic="Rows2")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
    )
    with Admin(**secured.at) as admin:
        admin.create_topic("Rows2")
    query.start().awaitTermination()
    copied = spark.read.format("headrace").options(**at, topic="Rows2").load()
    assert sorted(bytes(row.value) for row in copied.select("value").collect()) == [
        bytes([number]) for number in range(20)
    ]


def test_options_are_those_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = {"topic": "a"}
    assert read_options(topic).dial.tls is None
    assert write_options(topic).dial.tls is None
    assert read_options(topic | {"tls": "true"}).dial.tls == ClientTls()
    assert read_options(topic | FILES).dial.tls == write_options(topic | FILES).dial.tls == FOUND
    with pytest.raises(OptionError, match="tls=False, but ca_file is given"):
        read_options(topic | FILES | {"tls": "false"})
    monkeypatch.setenv("HEADRACE_TLS_CA", "environment.pem")
    assert read_options(topic).dial.tls == ClientTls("environment.pem")
    assert read_options(topic | {"tls": "false"}).dial.tls is None


def test_no_password_is_in_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TLS_CERT", "c.pem")
    monkeypatch.setenv("HEADRACE_TLS_KEY_PASSWORD", "secret")
    options = read_options({"topic": "a"})
    assert options.dial.tls == ClientTls(cert_file="c.pem")
    assert "secret" not in repr(ClientTls(key_password="secret"))
