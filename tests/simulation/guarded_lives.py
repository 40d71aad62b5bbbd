"""The lives of a broker whose users and rules change while their sends arrive.

Users log in or sign. A change is saved in a step of its own, so sends come between its request, its
save and its answer; the save may fail, or the process is killed, or the power goes, at any of its
operations. Whatever happens: a send is stored if and only if the users in force permit it, and the
next life has every change that was answered.
"""

from __future__ import annotations

import errno
import os
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace_broker.core import Pace
from headrace_daemon.access.opening import OpenedAccess
from headrace_daemon.access.settings import AccessConfig
from headrace_daemon.slices import Fetches
from headrace_protocol.channel import Channel
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers import files as driver_files
from headrace_protocol.errors import NotReady
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.rights.auth_requests import AclHeader, DeleteAclHeader, UserHeader, UserInfo
from headrace_protocol.rights.proofs import PasswordProof
from headrace_protocol.serving import Then
from tests.simulation.history import PromiseBroken
from tests.simulation.totals import Outcome
from tests.simulation.world import Kind, World
from tests.support.access import CHECKED, ROOT, acl_of, entry, opened
from tests.support.broker import BrokerUnderTest, WorkAtOnce
from tests.support.channel import MemoryChannel
from tests.support.faulty_files import PowerCut
from tests.support.rights import client_of, signed

LIFE_COUNT = 4
STEP_COUNTS = range(20, 120)
NAMES = ("alice", "bob", "carol", "nobody")
TOPICS = ("T", "U")
RESOURCES = ("Topic:T", "Topic:U", "Topic:*")
OK, DENIED = ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION
SAVE_FAULT_RATE = 0.2
# Operations of a save: create and sync the file, and after the rename open and sync the folder;
# the last one is the answer.
OPERATIONS = range(5)
RENAMED, NAMED = 2, 4


class Person(NamedTuple):
    """A user. password: no other user, and no earlier one, has it."""

    password: str
    is_enabled: bool = True
    rules: tuple[tuple[str, str], ...] = ()

    def may_send(self, topic: str) -> bool:
        rules = dict(self.rules)
        return rules.get(f"Topic:{topic}", rules.get("Topic:*")) == "Allow"


People = dict[str, Person]


class Change(NamedTuple):
    """A request about users. apply: the same people if it changes nothing, None if rejected."""

    code: RequestCode
    header: msgspec.Struct
    body: bytes
    apply: Callable[[People], People | None]


class Asked(NamedTuple):
    """A change whose answer is awaited."""

    change: Change
    channel: MemoryChannel


class FaultyOs:
    """In the place of ``os`` where a file is replaced: one operation fails, or is the last.

    fault: kill, power cut or failed write, or empty. count: of operations that were done.
    has_failed: whether the fault has come. faults: counts them.
    """

    def __init__(self, faults: Counter[str]) -> None:
        self.faults = faults
        self.arm("", 0)

    def arm(self, fault: str, at: int) -> None:
        """Fail before an operation of the next save; it has none without a fault."""
        self.fault, self._at, self.count, self.has_failed = fault, at, 0, False

    def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.fault and self.count == self._at:
            self.has_failed = True
            self.faults[self.fault] += 1
            if self.fault == "failed write":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            raise PowerCut
        self.count += 1
        return call(*arguments)

    def open(self, *arguments: Any) -> Any:
        return self._do(os.open, *arguments)

    def fsync(self, descriptor: int) -> None:
        self._do(os.fsync, descriptor)

    def finish(self) -> bool:
        """End a save; True if it has failed. A fault that has not come is one before the answer."""
        if self.fault in ("kill", "power cut"):
            self.faults[self.fault] += 1
            raise PowerCut
        has_failed = self.has_failed
        self.arm("", 0)
        return has_failed

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class FetchesLater(Fetches):
    """Saves that wait for a step of the simulation."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[tuple[NotReady, Then]] = deque()

    def start(self, _channel: Channel, wait: NotReady, then: Then) -> None:
        self.waiting.append((wait, then))


class GuardedLife:
    """One broker from its start to its end. people: those in force."""

    def __init__(self, lives: GuardedLives, folder: Path, rights: OpenedAccess) -> None:
        self._lives, self.rng, self.rights = lives, lives.rng, rights
        self.counts = lives.outcome.counts
        self.fetches = FetchesLater()
        self.broker = BrokerUnderTest(
            folder, pace=Pace(WorkAtOnce(), self.fetches, inf), rights=rights
        )
        for topic in TOPICS:
            self.broker.create_topic(topic, 1)
        self.people = lives.people
        self.asked: deque[Asked] = deque()
        # Saved, but not answered yet: the answers that they get.
        self.saved: deque[int] = deque()
        # Connections with the passwords of their log-ins, by user.
        self.sessions: dict[str, tuple[MemoryChannel, str]] = {}

    def live(self, step_count: int) -> None:
        steps = [*[self.send] * 6, *[self.change] * 3, *[self.save] * 3, self.log_in]
        for _ in range(step_count):
            self.rng.choice(steps)()

    # -- sends -------------------------------------------------------------------------------------

    def log_in(self) -> None:
        name = self.rng.choice(NAMES)
        user = self.rights.users.users.get(name)
        if user is not None and user.is_enabled and user.verifier is not None:
            channel = client_of(name)
            channel.proof = PasswordProof(user.verifier)
            self.sessions[name] = channel, self.people[name].password
            self.counts["log-ins"] += 1

    def send(self) -> None:
        """Some sends of one read: of a session, or of users who sign."""
        topics = self.rng.choices(TOPICS, k=self.rng.randint(1, 5))
        if self.sessions and self.rng.random() < 0.5:
            name = self.rng.choice(sorted(self.sessions))
            channel, password = self.sessions[name]
            sends = [(name, password, topic) for topic in topics]
            frames = [send_frame(topic) for topic in topics]
        else:
            channel = MemoryChannel()
            channel.is_greeted = True
            sends = [(*self._signer(), topic) for topic in topics]
            frames = [send_frame(topic, name, password) for name, password, topic in sends]
        before = self._stored()
        self.broker.take(b"".join(frames), channel)
        codes = [answer.code for answer, _ in channel.replies()]
        expected = [OK if self._may(*send) else DENIED for send in sends]
        if codes != expected:
            raise PromiseBroken(f"{sends} got {codes} under {self.people}")
        stored = Counter(
            topic for (_, _, topic), code in zip(sends, codes, strict=True) if not code
        )
        if self._stored() - before != stored:
            raise PromiseBroken(f"{sends} stored {self._stored() - before}, and got {codes}")
        self.counts["sends stored"] += codes.count(OK)
        self.counts["sends denied"] += codes.count(DENIED)

    def _signer(self) -> tuple[str, str]:
        """A name, and its password or a former one."""
        name = self.rng.choice(NAMES)
        known = self.people.get(name)
        if known is None or self.rng.random() < 0.1:
            return name, "a former password"
        return name, known.password

    def _may(self, name: str, password: str, topic: str) -> bool:
        known = self.people.get(name)
        is_user = known is not None and known.is_enabled and known.password == password
        return is_user and self.people[name].may_send(topic)

    def _stored(self) -> Counter[str]:
        queues = {topic: self.broker.store.queue(topic, 0) for topic in TOPICS}
        return Counter({topic: queue.next_offset for topic, queue in queues.items()})

    # -- changes -----------------------------------------------------------------------------------

    def change(self) -> None:
        """Send a request about users; its answer comes after a save."""
        change, channel = self._lives.make_change(), client_of("root")
        channel.is_encrypted = True
        self.asked.append(Asked(change, channel))
        self.broker.send(change.code, change.header, change.body, channel)

    def save(self) -> None:
        """Make the changes that wait, if any; then the next one is answered."""
        if not self.fetches.waiting:
            return
        wait, then = self.fetches.waiting.popleft()
        self._save(wait.fetch)
        then(None)
        self._check_answer()

    def _save(self, fetch: Callable[[], object]) -> None:
        """One save for all changes that wait."""
        changes = [asked.change for asked in islice(self.asked, len(self.saved), None)]
        after, accepted = applied(changes, self.people)
        is_written = after is not self.people
        if is_written:
            self._lives.arm(after)
        fetch()
        has_failed = self._lives.os.finish()
        failure = ResponseCode.SERVICE_NOT_AVAILABLE if has_failed else OK
        self.saved += [failure if is_accepted else DENIED for is_accepted in accepted]
        if is_written and not has_failed:
            self.people = self._lives.people = after
            self._lives.candidates = [after]

    def _check_answer(self) -> None:
        asked, expected = self.asked.popleft(), self.saved.popleft()
        ((answer, _),) = asked.channel.replies()
        if answer.code != expected:
            raise PromiseBroken(f"{asked.change} got {answer.code}: {answer.remark}, {self.people}")
        self.counts["changes answered"] += answer.code == OK
        self.counts["changes rejected"] += answer.code == DENIED


def applied(changes: list[Change], people: People) -> tuple[People, list[bool]]:
    """The people after changes in their order, and whether each is accepted."""
    accepted = []
    for change in changes:
        after = change.apply(people)
        accepted.append(after is not None)
        people = people if after is None else after
    return people, accepted


def send_frame(topic: str, name: str = "", password: str = "") -> bytes:
    """A send, signed if it has a name."""
    fields: dict[str, Any] = {"a": "p", "b": topic, "c": "TBW102", "d": 1, "e": 0, "f": 0}
    fields |= {"g": 1, "h": 0, "i": ""}
    if name:
        fields = signed(name, fields, b"body", password)
    code = RequestCode.SEND_MESSAGE_V2
    return encode_frame(SerializeType.JSON, code, 1, fields=fields, body_bytes=4) + b"body"


class GuardedLives(Kind):
    """One file of users, and the brokers that read it one after the other."""

    name = "users and rules"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.folder = world.folder
        self.os = FaultyOs(self.outcome.faults)
        world.patches.put((driver_files, "os", self.os))
        self.people: People = {}
        # The file may be that of any of these, and the bytes that it had before the last save.
        self.candidates: list[People] = [{}]
        self.before = b""
        self._passwords = 0

    def run(self) -> Outcome:
        for number in range(LIFE_COUNT):
            rights = opened(self.folder, AccessConfig(CHECKED, ROOT))
            self.check(rights)
            life = GuardedLife(self, self.folder / str(number), rights)
            try:
                life.live(self.rng.choice(STEP_COUNTS))
                self.outcome.faults["kill"] += 1
            except PowerCut:
                self.end()
            finally:
                life.broker.store.abandon()
                self.os.arm("", 0)
        self.check(opened(self.folder, AccessConfig(CHECKED, ROOT)))
        return self.outcome

    @property
    def path(self) -> Path:
        return self.folder / "users.json"

    def arm(self, after: People) -> None:
        """Begin a save, which may have a fault; one that fails may be on disk all the same."""
        self.before = self.path.read_bytes() if self.path.exists() else b""
        self.candidates = [*self.candidates, after]
        faults = ("kill", "power cut", "failed write")
        fault = self.rng.choice(faults) if self.rng.random() < SAVE_FAULT_RATE else ""
        self.os.arm(fault, self.rng.choice(OPERATIONS))

    def end(self) -> None:
        """The power goes, or the process is killed: a rename may not be on disk yet."""
        is_unsure = self.os.fault == "power cut" and RENAMED <= self.os.count < NAMED
        if is_unsure and self.rng.random() < 0.5:
            self.path.write_bytes(self.before)
            self.outcome.faults["lost name"] += 1

    def check(self, rights: OpenedAccess) -> None:
        """Compare what a start has read with what it may have."""
        found = {
            name: Person(
                user.secret or "",
                user.is_enabled,
                tuple(
                    (str(each.resource), each.decision.value)
                    for each in rights.users.rules(name).custom
                ),
            )
            for name, user in rights.users.users.items()
            if name in NAMES
        }
        if found not in self.candidates:
            raise PromiseBroken(f"{found} is none of {self.candidates}")
        self.people, self.candidates = found, [found]

    # -- changes -----------------------------------------------------------------------------------

    def make_change(self) -> Change:
        """Any change of anybody; most often one that is possible."""
        name = self.rng.choice(NAMES[:-1])
        if name not in self.people and self.rng.random() < 0.8:
            return self._create(name)
        makers = [self._create, self._update, self._disable, self._delete, self._unrule]
        return self.rng.choice([*makers, *[self._rule] * 6])(name)

    def _password(self) -> str:
        self._passwords += 1
        return f"password {self._passwords}"

    def _create(self, name: str) -> Change:
        password = self._password()
        body = UserInfo(username=name, password=password).encode()

        def apply(people: People) -> People | None:
            return None if name in people else {**people, name: Person(password)}

        return Change(RequestCode.AUTH_CREATE_USER, UserHeader(username=name), body, apply)

    def _update(self, name: str) -> Change:
        password = self._password()
        info = UserInfo(username=name, password=password)
        return self._updated(name, info, lambda person: person._replace(password=password))

    def _disable(self, name: str) -> Change:
        is_enabled = self.rng.random() < 0.6
        info = UserInfo(username=name, user_status="enable" if is_enabled else "disable")
        return self._updated(name, info, lambda person: person._replace(is_enabled=is_enabled))

    def _updated(self, name: str, info: UserInfo, update: Callable[[Person], Person]) -> Change:
        def apply(people: People) -> People | None:
            return {**people, name: update(people[name])} if name in people else None

        code, header = RequestCode.AUTH_UPDATE_USER, UserHeader(username=name)
        return Change(code, header, info.encode(), apply)

    def _delete(self, name: str) -> Change:
        def apply(people: People) -> People:
            left = {other: person for other, person in people.items() if other != name}
            return left if name in people else people

        return Change(RequestCode.AUTH_DELETE_USER, UserHeader(username=name), b"", apply)

    def _rule(self, name: str) -> Change:
        resource = self.rng.choice(RESOURCES)
        decision = self.rng.choice(("Allow", "Allow", "Allow", "Deny"))

        def apply(people: People) -> People | None:
            if name not in people:
                return None
            rules = {**dict(people[name].rules), resource: decision}
            return {**people, name: people[name]._replace(rules=tuple(rules.items()))}

        body = acl_of(name, entry(resource, "Pub", decision=decision)).encode()
        return Change(RequestCode.AUTH_CREATE_ACL, AclHeader(subject=f"User:{name}"), body, apply)

    def _unrule(self, name: str) -> Change:
        resource = self.rng.choice((*RESOURCES, ""))

        def apply(people: People) -> People | None:
            if name not in people or not people[name].rules:
                return None
            left = [rule for rule in people[name].rules if resource not in ("", rule[0])]
            if len(left) == len(people[name].rules):
                return people
            return {**people, name: people[name]._replace(rules=tuple(left))}

        header = DeleteAclHeader(subject=f"User:{name}", resource=resource, policy_type="Custom")
        return Change(RequestCode.AUTH_DELETE_ACL, header, b"", apply)
