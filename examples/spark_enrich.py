"""A stream that looks up names in a compacted topic, which may change while the stream runs."""

# %% Clicks, and a table of users.
import json
import os
import tempfile

from headrace import blocking
from headrace.spark import session

NAMESERVER = os.environ.get("HEADRACE_NAMESERVER", "127.0.0.1:9876")

with blocking.Admin(nameserver=NAMESERVER) as admin:
    admin.create_topic("raw-clicks", if_not_exists=True)
    admin.create_topic("named-clicks", if_not_exists=True)
    admin.create_topic(
        "users", queues=4, attributes={"cleanup.policy": "COMPACTION"}, if_not_exists=True
    )


def put(**names):
    """Name users."""
    with blocking.Table("users", model=dict, nameserver=NAMESERVER) as users:
        for user, name in names.items():
            users.put(user, {"name": name})


def click(*users):
    """A click by each of these users."""
    with blocking.Producer(nameserver=NAMESERVER) as producer:
        bodies = [json.dumps({"user": user}).encode() for user in users]
        producer.send_many(bodies, topic="raw-clicks")


# %% The clicks with names. Each micro-batch reads the table anew.
spark = session("enrich")
clicks = (
    spark.readStream.format("headrace")
    .options(nameserver=NAMESERVER, topic="raw-clicks", starting="earliest", schema="user STRING")
    .load()
)
users = (
    spark.read.format("headrace")
    .options(nameserver=NAMESERVER, topic="users", table="true", schema="name STRING")
    .load()
    .selectExpr("keys AS user", "name")
)
named = clicks.join(users, "user", "left")
query = (
    named.selectExpr("user AS key", "to_json(struct(user, name)) AS value")
    .writeStream.format("headrace")
    .options(nameserver=NAMESERVER, topic="named-clicks")
    .option("checkpointLocation", tempfile.mkdtemp(prefix="enrich-"))
    .start()
)

put(u1="Ann")
click("u1")
query.processAllAvailable()

# %% Ann has another name now, and Bob is new.
put(u1="Anna", u2="Bob")
click("u1", "u2")
query.processAllAvailable()
query.stop()

results = spark.read.format("headrace").options(nameserver=NAMESERVER, topic="named-clicks").load()
for row in results.orderBy("store_timestamp", "keys").collect():
    print(row.value.decode())
