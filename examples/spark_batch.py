"""A topic as a table in Spark, and a table into a topic."""

# %% Some orders to look at.
import json
import os

from headrace import blocking
from headrace.spark import session

NAMESERVER = os.environ.get("HEADRACE_NAMESERVER", "127.0.0.1:9876")

with blocking.Admin(nameserver=NAMESERVER) as admin:
    admin.create_topic("shop-orders", queues=4)
    admin.create_topic("shop-revenue", queues=4)
with blocking.Producer(nameserver=NAMESERVER) as producer:
    producer.send_many(
        [json.dumps({"id": n, "euros": n % 50 + 0.5}).encode() for n in range(1000)],
        topic="shop-orders",
        keys=[f"customer-{n % 20}" for n in range(1000)],
        tags=["paid" if n % 4 else "open" for n in range(1000)],
    )

# %% A session: finds a Java, tells the workers their Python, lets filters go to the broker.
spark = session("orders")

# %% The topic, with its bodies decoded.
orders = (
    spark.read.format("headrace")
    .option("nameserver", NAMESERVER)
    .option("topic", "shop-orders")
    .option("schema", "id BIGINT, euros DOUBLE")
    .load()
)
orders.select("queue", "queue_offset", "keys", "tags", "id", "euros").show(5, truncate=False)

# %% Conditions on queue, offset, time, tags and keys are the broker's work; explain() names them.
paid = orders.where("tags = 'paid'")
paid.explain()
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
result = (
    spark.read.format("headrace")
    .option("nameserver", NAMESERVER)
    .option("topic", "shop-revenue")
    .load()
)
print(result.count(), "customers;", result.selectExpr("cast(value AS STRING)").first()[0])
