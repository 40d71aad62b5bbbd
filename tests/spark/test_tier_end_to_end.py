"""Spark reads the tier itself: as a batch, as a stream, and without a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from headrace.blocking import Admin
from headrace.embedded import Embedded
from tests.spark.brokers import broker
from tests.spark.test_tier import COUNT, TOPIC, Tiered
from tests.support.object_server import ACCESS_KEY, BUCKET, SECRET_KEY, serving

pytestmark = pytest.mark.slow


def values(rows: DataFrame) -> list[int]:
    return sorted(int(bytes(row.value).split()[0]) for row in rows.select("value").collect())


def test_a_bucket(spark: SparkSession, mq: Embedded, tmp_path: Path) -> None:
    """Broker and tasks have different credentials of one server, which no plan names."""
    (tmp_path / "s3").mkdir()
    with serving(tmp_path / "s3") as place:
        settings: dict[str, Any] = {
            "message_store_plug_in": "tieredstore",
            "tiered_backend_service_provider": "s3",
            "object_store_endpoint": place.endpoint,
            "object_store_bucket": BUCKET,
            "object_store_access_key": ACCESS_KEY,
            "object_store_secret_key": SECRET_KEY,
            "object_store_prefix": "a/b",
            "tiered_store_group_commit_timeout": 10,
        }
        keys = {
            "tier.access_key_id": ACCESS_KEY,
            "tier.secret_access_key": SECRET_KEY,
        }
        with (
            broker(mq, tmp_path / "store", "tiered", **settings),
            Admin(nameserver=mq.nameserver) as admin,
        ):
            admin.create_topic(TOPIC, queues=1, broker="tiered")
            tiered = Tiered(mq, tmp_path / "s3")
            tiered.fill()
            # Of these only the broker may know.
            tiered.send(range(COUNT, COUNT + 20))
            options = {"nameserver": mq.nameserver, "topic": TOPIC, "tier": "direct", **keys}
            rows = spark.read.format("headrace").options(**options).load()
            assert values(rows) == [*range(COUNT + 20)]
            query = (
                spark.readStream.format("headrace")
                .options(**options, starting="earliest")
                .load()
                .writeStream.format("memory")
                .queryName("tiered")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination(60)
            assert values(spark.table("tiered")) == [*range(COUNT + 20)]
            tiered.wait_for_upload()
            tiered.cluster.close()
        path = next(path for path in tmp_path.rglob("a/b/*/*/manifest.json") if path.is_file())
        url = f"s3://{BUCKET}/a/b/{path.parts[-3]}/{path.parts[-2]}/manifest.json"
        stored = (
            spark.read.format("headrace")
            .options(topic=TOPIC, manifest=url, **keys)
            .option("tier.endpoint", place.endpoint)
        )
        assert values(stored.load()) == [*range(COUNT + 20)]
        few = stored.option("filter", "few").option("starting", '{"T": {"tiered": {"0": 100}}}')
        assert values(few.load()) == [*range(100, COUNT + 20, 50)]
