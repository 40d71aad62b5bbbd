"""Sends messages until it has consumed ten of them, with the Python binding of Apache's C++ client.

Arguments: nameserver, topic, "clustering" or "broadcasting".
"""

from __future__ import annotations

import os
import sys
import threading

from rocketmq.client import Message, Producer, PushConsumer
from rocketmq.ffi import MessageModel

COUNT = 10
ATTEMPTS_MAX = 600
PAUSE_S = 0.2


def main(nameserver: str, topic: str, model: str) -> None:
    bodies: set[bytes] = set()
    done = threading.Event()

    def consume(message: Message) -> None:
        bodies.add(bytes(message.body))
        if len(bodies) >= COUNT:
            done.set()

    producer = Producer(f"{topic}-producers")
    producer.set_namesrv_addr(nameserver)
    producer.start()
    consumer = PushConsumer(f"{topic}-group")
    consumer.set_namesrv_addr(nameserver)
    consumer.set_message_model(MessageModel[model.upper()])
    consumer.subscribe(topic, consume)
    consumer.start()
    # A new broadcasting consumer starts at the end of its queues, whenever it gets them.
    for number in range(ATTEMPTS_MAX):
        message = Message(topic)
        message.set_keys(f"key-{number}")
        message.set_tags("tag")
        message.set_body(f"body {number}")
        producer.send_sync(message)
        if done.wait(PAUSE_S):
            break
    sys.stdout.write("consumed\n" if done.is_set() else f"consumed only {len(bodies)}\n")
    sys.stdout.flush()
    # Its shutdown crashes now and then.
    os._exit(0 if done.is_set() else 1)


main(*sys.argv[1:])
