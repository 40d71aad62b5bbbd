"""Attacks on running daemons and clients: ``python -m tests.abuse.run --minutes 20``.

First on open daemons, then on daemons with users, rules, TLS, audit logs and quotas, where the
attackers are a user who may do everything. Attackers of all kinds, each a process of its own, send
hostile headers, bodies, routes, pipelines and spoiled frames to a nameserver and a broker, and
answer clients of ours as hostile servers. Beside them an innocent client sends, pulls and looks up
its route. No daemon may end, the innocent client is answered soon, and when the attackers have
left, nothing is left of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from headrace_protocol.command import Command
from tests.abuse.attackers import KINDS, SERVERS
from tests.abuse.doors import Peer
from tests.abuse.labs import LABS, Lab
from tests.soak.holdings import CLIENTS, holding
from tests.support.kinds_at_work import LEAVE_S, KindsAtWork
from tests.support.wires import (
    pull_fields,
    queue_fields,
    request,
    send_fields,
    topic_fields,
)

TOPIC = "Alive"
PAUSE_S = 0.02
LOOK_S = 10.0
# Daemons give freed memory back to the system once a minute.
GIVE_BACK_S = 70.0
# The first attacks fill tables and caches that have a bound.
WARM_UP_PART = 0.25
ANSWER_MS_MAX = 250.0
STALL_CPU_MS_MAX = 50.0
MEMORY_GROWTH_MAX = 0.10


@dataclass(frozen=True)
class Held:
    """Resources of the daemons: their memory, and descriptors that are not files of the store."""

    memory_mb: dict[str, float]
    descriptors: dict[str, int]
    clients: dict[str, int]


@dataclass
class Innocent:
    """A client that sends, pulls and looks up its route, and takes the time of each answer.

    What it or the daemon waited for a core that other processes had does not count.
    """

    broker: Peer
    nameserver: Peer
    pids: dict[Peer, int]
    answers: int = 0
    slowest_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def at(cls, lab: Lab) -> Iterator[Innocent]:
        # Longer than any bound, so that a slow answer is measured and not lost.
        broker = Peer(lab.broker.address, 60, lab.innocent)
        nameserver = Peer(lab.nameserver.address, 60, lab.innocent)
        with broker.socket, nameserver.socket:
            broker.send(request(17, topic_fields(topic=TOPIC)))
            broker.receive()
            pids = {broker: lab.broker.pid, nameserver: lab.nameserver.pid}
            yield cls(broker, nameserver, pids)

    def work(self) -> None:
        """One request of each kind."""
        sent = self._ask("send", self.broker, 310, send_fields(b=TOPIC), b"well?")
        offset = sent.ext()["queueOffset"]
        self._ask("pull", self.broker, 11, pull_fields(topic=TOPIC, queueOffset=offset))
        self._ask("offset", self.broker, 30, queue_fields(topic=TOPIC))
        # POP has tasks from its first request on.
        asked = pull_fields(topic=TOPIC, pollTime=0, bornTime=0)
        self._ask("notification", self.broker, 200054, asked)
        self._ask("route", self.nameserver, 105, {"topic": TOPIC})

    def _ask(
        self, kind: str, peer: Peer, code: int, fields: dict[str, Any], body: bytes = b""
    ) -> Command:
        pid = self.pids[peer]
        began, waited_s = time.monotonic(), waited_for_cores(pid)
        peer.send(request(code, fields, body))
        command, _ = peer.receive()
        took_ms = 1000 * (time.monotonic() - began - waited_for_cores(pid) + waited_s)
        if command.code != 0:
            raise AbuseFailed(f"the innocent client's {kind} got {command.code}: {command.remark}")
        self.answers += 1
        self.slowest_ms[kind] = max(self.slowest_ms.get(kind, 0.0), round(took_ms, 1))
        return command


def waited_for_cores(pid: int) -> float:
    """Seconds for which this process and the loop of another were ready, but not run."""
    tasks = "self/task/" + str(os.getpid()), f"{pid}/task/{pid}"
    return sum(int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) for task in tasks) / 1e9


class AbuseFailed(Exception):
    """A daemon ended, or an innocent client was refused."""


def attacked(
    lab: Lab, innocent: Innocent, seconds: float, seed: int, kinds: Sequence[str]
) -> dict[str, Any]:
    """Attack for so long; what the attackers did. Raises AbuseFailed."""
    words = lab.nameserver.address, lab.broker.address, str(seed)
    words_of = {
        kind: (*words, json.dumps(lab.attackers._replace(source=source)))
        for kind, source in zip(kinds, cycle(lab.sources), strict=False)
    }
    with KindsAtWork("tests.abuse.attackers", words_of) as attackers:
        attackers.wait_begun()
        until, look_at = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < until:
            innocent.work()
            if now > look_at:
                look_at = now + LOOK_S
                check_alive(lab)
                say(f"{until - now:.0f} s to go; slowest answers in ms: {innocent.slowest_ms}")
            time.sleep(PAUSE_S)
        did = attackers.finish()
    check_alive(lab)
    return did


def attacked_until(
    volleys: int, lab: Lab, innocent: Innocent, seconds: float, seed: int, kinds: Sequence[str]
) -> dict[str, Counter[str]]:
    """Attack for so long, and again until there were so many volleys."""
    total: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    while True:
        for kind, did in attacked(lab, innocent, seconds, seed, kinds).items():
            total[kind].update(did)
        sent = sum(did["volleys"] for did in total.values())
        if sent >= volleys:
            return total
        say(f"{sent:,} of {volleys:,} volleys")
        seed += 1


def check_alive(lab: Lab) -> None:
    for name, daemon in lab.daemons.items():
        if daemon.exit_code is not None:
            raise AbuseFailed(f"the {name} ended with {daemon.exit_code}: {daemon.said()[-3000:]}")


def look(lab: Lab) -> Held:
    pids = {name: daemon.pid for name, daemon in lab.daemons.items()}
    info = lab.runtime_info()
    return Held(
        {name: holding(pid).memory_mb for name, pid in pids.items()},
        {name: descriptors(pid) for name, pid in pids.items()},
        {key: int(info[key]) for key in CLIENTS},
    )


def descriptors(pid: int) -> int:
    """Sockets, pipes and the like; how many files a store has open depends on its topics."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += not link.readlink().is_absolute()
    return count


def settled(lab: Lab, before: Held, give_back_s: float) -> Held:
    """Resources left when the attackers' connections are gone, or after LEAVE_S.

    give_back_s: time for the daemons to give back memory.
    """
    began = time.monotonic()
    while True:
        held = look(lab)
        waited_s = time.monotonic() - began
        is_left = bool(left_over(before, held)) and waited_s < LEAVE_S
        if not is_left and waited_s >= give_back_s:
            return held
        time.sleep(0.5)


def left_over(before: Held, after: Held) -> list[str]:
    counts = [
        (f"{key} of the broker", before.clients[key], after.clients[key]) for key in CLIENTS
    ] + [
        (f"descriptors of the {name}", before.descriptors[name], count)
        for name, count in after.descriptors.items()
    ]
    return [f"{what}: {now}, {was} before" for what, was, now in counts if now > was]


def abuse(
    seconds: float,
    seed: int,
    kinds: Sequence[str] = (*KINDS, SERVERS),
    *,
    lab: str = "open",
    volleys: int = 0,
    give_back_s: float = 0.0,
) -> dict[str, Any]:
    """Everything that was seen. Raises AbuseFailed.

    lab: a key of LABS. volleys: that are sent at least.
    give_back_s: how long after each attack memory is measured.
    """
    with (
        tempfile.TemporaryDirectory(prefix="headrace-abuse-") as folder,
        LABS[lab](Path(folder)) as daemons,
        Innocent.at(daemons) as innocent,
    ):
        innocent.work()
        before = look(daemons)
        attacked(daemons, innocent, seconds * WARM_UP_PART, seed, kinds)
        warm = settled(daemons, before, give_back_s)
        rest_s = seconds * (1 - WARM_UP_PART)
        did = attacked_until(volleys, daemons, innocent, rest_s, seed + 1, kinds)
        after = settled(daemons, before, give_back_s)
        info = daemons.runtime_info()
        return {
            "lab": lab,
            "attackers": did,
            "answers": innocent.answers,
            "slowest_ms": innocent.slowest_ms,
            "stall_ms": float(info["longestLoopStallMs"]),
            "stall_cpu_ms": float(info["longestLoopStallCpuMs"]),
            "stall_ran": info["longestLoopStallRan"],
            "faults": {name: daemon.said().count('"unexpected error"')
                       for name, daemon in daemons.daemons.items()},
            "problems": daemons.problems(),
            "before": vars(before),
            "warm": vars(warm),
            "after": vars(after),
            "left_over": left_over(before, after),
        }  # fmt: skip


def wrongs(seen: dict[str, Any]) -> list[str]:
    """Outcomes that no attack may cause, whatever else the machine does."""
    faults = [f"{kind}: {what}" for kind, did in seen["attackers"].items()
              for what in did if what.startswith("fault")]  # fmt: skip
    logged = [f"{count} faults in the log of the {name}"
              for name, count in seen["faults"].items() if count]  # fmt: skip
    return [*faults, *logged, *seen["problems"], *seen["left_over"]]


def excesses(seen: dict[str, Any]) -> list[str]:
    """Times and sizes over their bounds."""
    found = [
        f"the innocent client waited {took} ms for its {kind}, {ANSWER_MS_MAX} is the most"
        for kind, took in seen["slowest_ms"].items()
        if took > ANSWER_MS_MAX
    ]
    if seen["stall_cpu_ms"] > STALL_CPU_MS_MAX:
        found.append(
            f"the broker's loop ran {seen['stall_cpu_ms']} ms without a pause "
            f"({seen['stall_ran']}), {STALL_CPU_MS_MAX} is the most"
        )
    for name, warm_mb in seen["warm"]["memory_mb"].items():
        mb = seen["after"]["memory_mb"][name]
        if mb > warm_mb * (1 + MEMORY_GROWTH_MAX):
            found.append(f"the {name} holds {mb} MB, {warm_mb} MB after the first attackers left")
    return found


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20, help="of each lab")
    parser.add_argument("--volleys", type=int, default=0, help="as many in each lab at least")
    parser.add_argument("--lab", choices=LABS, help="only this one")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    problems = []
    for lab in [chosen.lab] if chosen.lab else LABS:
        try:
            seen = abuse(
                chosen.minutes * 60,
                chosen.seed,
                lab=lab,
                volleys=chosen.volleys,
                give_back_s=GIVE_BACK_S,
            )
        except AbuseFailed as failure:
            sys.exit(f"{failure}\nagain: make abuse LAB={lab} SEED={chosen.seed}")
        say(json.dumps({"minutes": chosen.minutes, "seed": chosen.seed, **seen}))
        problems += [f"{lab}: {problem}" for problem in (*wrongs(seen), *excesses(seen))]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
