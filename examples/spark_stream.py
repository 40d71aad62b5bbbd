"""A stream from topic to topic: windows, a checkpoint, and how far it is."""

# %% Clicks of an hour, one each second.
import datetime as dt
import json
import os
import tempfile

from pyspark.sql import functions

from headrace import blocking
from headrace.spark import session

NAMESERVER = os.environ.get("HEADRACE_NAMESERVER", "127.0.0.1:9876")
START = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)


def click(second):
    """A click on one of three pages."""
    time = START + dt.timedelta(seconds=second)
    return json.dumps({"page": f"page-{second % 3}", "time": time.isoformat()}).encode()


def send(seconds):
    """The clicks of these seconds."""
    with blocking.Producer(nameserver=NAMESERVER) as producer:
        producer.send_many([click(second) for second in seconds], topic="clicks")


with blocking.Admin(nameserver=NAMESERVER) as admin:
    admin.create_topic("clicks", queues=4, if_not_exists=True)
    admin.create_topic("clicks-by-page", queues=4, if_not_exists=True)
send(range(1800))

# %% Clicks by page and five minutes, each window written once it is over.
spark = session("clicks")
checkpoint = tempfile.mkdtemp(prefix="clicks-")


def run():
    """Process what there is, and stop."""
    clicks = (
        spark.readStream.format("headrace")
        .option("nameserver", NAMESERVER)
        .option("topic", "clicks")
        .option("group", "click-counter")
        .option("starting", "earliest")
        .option("schema", "page STRING, time TIMESTAMP")
        .load()
    )
    counts = (
        clicks.withWatermark("time", "1 minute")
        .groupBy("page", functions.window("time", "5 minutes"))
        .count()
    )
    query = (
        counts.selectExpr("page AS key", "to_json(struct(page, window.start, count)) AS value")
        .writeStream.format("headrace")
        .option("nameserver", NAMESERVER)
        .option("topic", "clicks-by-page")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


# %% The first half hour.
query = run()
print(sum(batch["numInputRows"] for batch in query.recentProgress), "clicks read")

# %% The second resumes at the checkpoint. Rows are written exactly once, also when Spark or
# a broker dies on the way.
send(range(1800, 3600))
query = run()
print(sum(batch["numInputRows"] for batch in query.recentProgress), "more clicks read")

# %% What came out. The last window is still open, as something later could belong to it.
results = (
    spark.read.format("headrace")
    .option("nameserver", NAMESERVER)
    .option("topic", "clicks-by-page")
    .load()
)
body = functions.from_json(results.value.cast("string"), "page STRING, start STRING, count INT")
results.select(body.alias("r")).select("r.*").orderBy("start", "page").show(40, truncate=False)

# %% The same as lag of the group, which `headrace group lag click-counter` shows too.
with blocking.Admin(nameserver=NAMESERVER) as admin:
    print("lag:", sum(queue.lag for queue in admin.lag("click-counter")))
