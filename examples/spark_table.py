"""A compacted topic as a table in Spark: one row per customer, changed and deleted by Spark."""

# %% A compacted topic keeps the newest message of each key.
import os

from headrace import blocking
from headrace.spark import session

NAMESERVER = os.environ.get("HEADRACE_NAMESERVER", "127.0.0.1:9876")

with blocking.Admin(nameserver=NAMESERVER) as admin:
    admin.create_topic(
        "customers",
        queues=4,
        attributes={"cleanup.policy": "COMPACTION"},
        if_not_exists=True,
    )

# %% Each customer spends a little more with each message.
with blocking.Table("customers", model=dict, nameserver=NAMESERVER) as customers:
    for euros in range(10, 13):
        for number in range(20):
            customers.put(f"customer-{number}", {"euros": euros * number})

# %% The table: the newest value of each customer.
spark = session("customers")


def read():
    """The table as it is now."""
    reader = spark.read.format("headrace").option("nameserver", NAMESERVER)
    return reader.options(topic="customers", table="true", schema="euros BIGINT").load()


table = read()
print(table.count(), "customers spent", table.agg({"euros": "sum"}).first()[0], "euros")

# %% Delete those who spent little: a null value deletes the key.
(
    table.where("euros < 60")
    .selectExpr("keys AS key", "CAST(NULL AS BINARY) AS value")
    .write.format("headrace")
    .options(nameserver=NAMESERVER, topic="customers")
    .mode("append")
    .save()
)
print(read().count(), "customers are left")
