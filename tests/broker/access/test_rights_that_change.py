"""Rules that change while messages flow: nobody without Sub ever gets a message, nor sends one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.rights.users import Users, UserStatus
from tests.support.broker import BrokerUnderTest
from tests.support.memory import HOST
from tests.support.rights import client_of, rights_of, rules_of, user_of, users_of
from tests.support.wire import bulk_pull_header, pull_header

NAMES = ("ann", "bob", "cyd")
TOPICS = ("Alpha", "Alpine", "Beta")
RULES = [
    "Topic:Alpha Pub",
    "Topic:Alpha Sub",
    "Topic:Al* Pub,Sub",
    "Topic:Alpine Sub Deny",
    "Topic:Beta All",
    "Topic:* Sub Allow 10.0.0.0/8",
    "* Pub",
    "Topic:* Sub",
    "Group:g All Deny",
]
STEPS = 300


class Flow:
    """Three users with clients that stay, whose pulls are held, and rules of every kind."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.random = random
        self.users: Users = users_of(**{name: [] for name in NAMES})
        rights = rights_of(self.users)
        self.access = rights.access
        sizes = {"ring_rows": 1 << 14, "commit_log_file_bytes": 1 << 20}
        self.broker = BrokerUnderTest(folder, rights=rights, **sizes)  # type: ignore[arg-type]
        for topic in TOPICS:
            self.broker.create_topic(topic, 1)
        self.broker.groups.get_or_create("g", HOST)
        self.channels = {name: client_of(name) for name in NAMES}
        self.stored = dict.fromkeys(TOPICS, 0)
        self.sent = self.got = 0

    def may(self, name: str, kind: Kind, resource: str, action: Action) -> bool:
        user = self.users.users.get(name)
        if user is None or not user.is_enabled:
            return False
        rules = self.users.rules(name)
        return rules.decide(kind, resource, frozenset({action}), "127.0.0.1").is_allowed

    def change(self) -> None:
        name = self.random.choice(NAMES)
        what = self.random.random()
        if what < 0.8:
            some = ["Group:* Sub", *self.random.sample(RULES, self.random.randrange(6))]
            self.users.put(user_of(name))
            self.users.put_rules(name, rules_of(*some))
        elif what < 0.9:
            self.users.put(user_of(name, status=UserStatus.DISABLE))
        else:
            self.users.remove(name)

    def send(self) -> None:
        name, topic = self.random.choice(NAMES), self.random.choice(TOPICS)
        may = self.may(name, Kind.TOPIC, topic, Action.PUB)
        fields = {"a": "p", "b": topic, "c": "", "d": 1, "e": 0, "f": 0, "g": 1, "h": 0, "i": ""}
        count = self.random.randrange(1, 4)
        frame = encode_frame(
            SerializeType.JSON, RequestCode.SEND_MESSAGE_V2, 1, fields=fields, body_bytes=1
        )
        self.take(name, (frame + b"x") * count)
        if may:
            self.stored[topic] += count
            self.sent += count
        assert self.broker.store.queue(topic, 0).next_offset == self.stored[topic]

    def pull(self) -> None:
        name, topic = self.random.choice(NAMES), self.random.choice(TOPICS)
        is_bulk = self.random.random() < 0.5
        make = bulk_pull_header if is_bulk else pull_header
        code = RequestCode.BULK_PULL if is_bulk else RequestCode.PULL_MESSAGE
        first = self.random.randrange(self.stored[topic] + 1)
        header = make(first, topic=topic, sys_flag=self.random.choice((0, 2)) | 4)
        self.broker.send(code, header, channel=self.channels[name])
        self.look()

    def take(self, name: str, frames: bytes) -> None:
        self.broker.take(frames, self.channels[name])
        queues = [self.broker.store.queue(topic, 0) for topic in TOPICS]
        self.broker.long_polling.arrived(queues)
        self.look()

    def look(self) -> None:
        """What clients have got now, they may get now."""
        for name, channel in self.channels.items():
            for answer, body in channel.replies():
                if answer.code == ResponseCode.SUCCESS and body:
                    self.check(name, body)

    def check(self, name: str, body: bytes) -> None:
        assert self.may(name, Kind.GROUP, "g", Action.SUB)
        for topic in TOPICS:
            if topic.encode() in body:
                assert self.may(name, Kind.TOPIC, topic, Action.SUB), (name, topic)
                self.got += 1


@pytest.mark.parametrize("seed", range(20))
async def test_nobody_without_sub_gets_a_message(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    flow = Flow(tmp_path, random)
    steps = [flow.change, *[flow.send] * 3, *[flow.pull] * 4]
    for _ in range(STEPS):
        random.choice(steps)()
    # Somebody may in the end, so that no seed proves nothing.
    flow.users.put(user_of("ann"))
    flow.users.put_rules("ann", rules_of("* All"))
    for _ in range(20):
        flow.send()
        flow.pull()
    assert flow.sent, f"seed {seed}"
    assert flow.got, f"seed {seed}"
