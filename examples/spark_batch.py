"""A topic as a table in Spark, and a table into a topic."""

# %% Some orders to look at.
import json
import os

from headrace import blocking
from headrace.spark import session

NAMESERVER = os.environ.get("HEADRACE_NAMESERVER", "127.0.0.1:9876")

with blocking.Admin(nameserver=NAMESERVER) as admin:
    admin.create_topic("shop-orders", queues=4, if_not_exists=True)
    admin.create_topic("shop-revenue", queues=4, if_not_exists=True)
with blocking.Producer(nameserver=NAMESERVER) as producer:
    producer.send_many(
        [json.dumps({"id": n, "euros": n % 50 + 0.5}).encode() for n in range(1000)],
        topic="shop-orders",
        keys=[f"customer-{n % 20}" for n in range(1000)],
        tags=["paid" if n % 4 else "open" for n in range(1000)],
    )

# %% A session: finds a Java, tells the workers their Python.
spark = session("orders")


def read(topic, **options):
    """A topic as a table."""
    reader = spark.read.format("headrace").option("nameserver", NAMESERVER)
    return reader.option("topic", topic).options(**options).load()


# %% The topic, with its bodies decoded.
SCHEMA = "id BIGINT, euros DOUBLE"
orders = read("shop-orders", schema=SCHEMA)
orders.select("queue", "queue_offset", "keys", "tags", "id", "euros").show(5, truncate=False)

# %% Those that are paid. The broker looks at the tags, and what is open never comes here.
paid = read("shop-orders", schema=SCHEMA, filter="paid")
print(paid.count(), "orders are paid")

# %% Revenue by customer, as messages: a column key chooses the queue, value is the body.
revenue = paid.groupBy("keys").sum("euros").withColumnRenamed("sum(euros)", "euros")
messages = revenue.selectExpr("keys AS key", "to_json(struct(*)) AS value")
(
    messages.write.format("headrace")
    .option("nameserver", NAMESERVER)
    .option("topic", "shop-revenue")
    .mode("append")
    .save()
)

# %% All rows became readable together, at the end of the job.
result = read("shop-revenue")
print(result.count(), "customers;", result.selectExpr("cast(value AS STRING)").first()[0])
