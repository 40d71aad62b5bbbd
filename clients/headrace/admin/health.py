"""The problems of a broker that answers, or that has left: the rows of ``headrace doctor``.

Each check reads a broker's runtime information (GET_BROKER_RUNTIME_INFO), and has a row in
``CHECKS``. docs/operations.md "What doctor finds" lists them; tests/clients/test_cli_doctor_rows.py
makes each wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.admin.merged import merged
from headrace.admin.output import counted, time_text
from headrace_protocol.departed import Departure
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from headrace.rights import ClusterUser, Rule
    from headrace_protocol.departed import DepartedBroker

# As brokers log it.
_FULL_SOON_HOURS: Final = 24.0
_BEHIND_S: Final = 120
_CLOCK_MS: Final = 5_000
_NAMED_MAX: Final = 8
# Before a certificate expires.
CERTIFICATE_DAYS: Final = 14
_DAY_MS: Final = 86_400_000

Info = Mapping[str, str]
# The problems that a broker's information shows. now_ms: this machine's clock when it was given.
Find = Callable[[Info, int], Iterator[str]]


class Check(NamedTuple):
    """A row of the diagnosis: of what, its name, and the problem with its remedy, if any."""

    role: str
    name: str
    address: str
    problem: str | None


def _store(info: Info, _now_ms: int) -> Iterator[str]:
    reason = info.get("refusesWrites", "no")
    if reason != "no":
        since = time_text(int(_number(info, "refusesWritesSince")))
        yield f"it refuses every send{f' since {since}' if since else ''}: {reason}"


def _disk(info: Info, _now_ms: int) -> Iterator[str]:
    hours = _number(info, "diskFullInHours", -1)
    if 0 <= hours < _FULL_SOON_HOURS:
        yield (
            f"at this rate the disk is full in {hours:.1f} h, and sends are refused: make room, or "
            f"let groups consume; oldest unconsumed: {info.get('oldestUnconsumed') or 'none'}"
        )


def _followers(info: Info, _now_ms: int) -> Iterator[str]:
    for key in info:
        name = key.removeprefix("follower.").removesuffix(".behindMessages")
        if key != f"follower.{name}.behindMessages":
            continue
        problem = info.get(f"follower.{name}.problem")
        behind_s = _number(info, f"follower.{name}.behindSeconds")
        if problem:
            yield f"{name}: {problem}; the log is kept until it succeeds"
        elif behind_s >= _BEHIND_S:
            yield (
                f"{name}: {info[key]} messages behind for {behind_s / 60:.0f} minutes, and the log "
                "is kept for it"
            )


def _tier(info: Info, _now_ms: int) -> Iterator[str]:
    if info.get("tierOpen") == "false":
        yield "it has not been reached since the start; `headrace tier status` shows why"
    if problem := info.get("tierPlaceProblem"):
        yield problem
    if problem := info.get("tierProblem"):
        yield f"reads fail: {problem}"
    if count := int(_number(info, "tierStuckQueues")):
        yield (
            f"uploads of {counted(count, 'queue')} are given up, and the log is kept for them: "
            f"{info.get('tierStuckReason') or 'no reason given'}; see `headrace tier status`, then "
            "`headrace tier resume`"
        )
    if count := int(_number(info, "tierForeignQueues")):
        yield (
            f"in {counted(count, 'queue')} the tier has other messages than the log: decide by "
            "`headrace tier status` and `headrace tier forget`"
        )


def _compaction(info: Info, _now_ms: int) -> Iterator[str]:
    if count := int(_number(info, "compactionLostQueues")):
        many = f"{count} compaction logs are lost, such as this one: " if count > 1 else ""
        yield f"{many}{info.get('compactionLostReason')}"


def _audit(info: Info, _now_ms: int) -> Iterator[str]:
    if problem := info.get("auditProblem"):
        yield f"the audit log is not written: {problem}"


def _clock(info: Info, now_ms: int) -> Iterator[str]:
    their_ms = _number(info, "currentTimestamp", now_ms)
    ahead_s = (their_ms - now_ms) / 1000
    if abs(ahead_s) * 1000 > _CLOCK_MS:
        yield (
            f"its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this "
            "machine's: timers, retention and searches by time go by it; correct one of them"
        )


def _static(info: Info, _now_ms: int) -> Iterator[str]:
    if count := int(_number(info, "staticQueuesUndecidedCount")):
        yield (
            f"in {counted(count, 'queue')} of static topics are messages that nobody can read yet "
            f"({info.get('staticQueuesUndecided')}): run `headrace topic repair`"
        )


def _groups(info: Info, _now_ms: int) -> Iterator[str]:
    if count := int(_number(info, "queuesWithoutPulls")):
        groups = info.get("groupsWithoutPulls", "")
        yield (
            f"nobody has pulled {counted(count, 'queue')} for 30 s although their groups have "
            f"members: {groups}; `headrace group describe {groups.partition(',')[0]}` shows them"
        )


CHECKS: Final[Mapping[str, Find]] = {
    "store": _store,
    "disk": _disk,
    "follower": _followers,
    "tier": _tier,
    "compaction": _compaction,
    "audit": _audit,
    "clock": _clock,
    "static": _static,
    "group": _groups,
}


def broker_checks(broker: str, address: str, info: Info, now_ms: int) -> list[Check]:
    """The problems of a broker that answers."""
    return [
        Check(role, broker, address, problem)
        for role, find in CHECKS.items()
        for problem in find(info, now_ms)
    ]


def certificate_checks(
    name: str, address: str, expires_s: float | None, now_ms: int
) -> list[Check]:
    """A row for a certificate that expires soon. expires_s: its Unix time; None without TLS."""
    if expires_s is None or expires_s * 1000 - now_ms > CERTIFICATE_DAYS * _DAY_MS:
        return []
    problem = (
        f"it expires at {time_text(int(expires_s * 1000))}: replace the files of certificate and "
        "key, which the daemon reads again within seconds"
    )
    return [Check("certificate", name, address, problem)]


def rights_checks(
    users: Mapping[str, Mapping[str, ClusterUser]], rules: Mapping[str, Mapping[str, list[Rule]]]
) -> list[Check]:
    """The users that daemons know differently. users, rules: of each daemon, by user."""
    known = {keeper: set(found.values()) for keeper, found in users.items()}
    ruled = {
        keeper: {(name, rule) for name, found in by_user.items() for rule in found}
        for keeper, by_user in rules.items()
    }
    problems: dict[str, list[str]] = {}
    for user, holders in merged(known):
        if holders is not None:
            kind = "Super" if user.is_super else "Normal"
            form = f"{kind}, {'enabled' if user.is_enabled else 'disabled'}"
            problems.setdefault(user.name, []).append(f"{form} at {_some(holders)} alone")
    for (name, rule), holders in merged(ruled):
        if holders is not None:
            problems.setdefault(name, []).append(f"{rule!s} at {_some(holders)} alone")
    return [
        Check("rights", name, "-", f"daemons differ: {'; '.join(found)}: repeat the change")
        for name, found in problems.items()
    ]


def departed_checks(broker: DepartedBroker) -> list[Check]:
    """The broker that left, and the topics and groups that miss it."""
    name, address = broker.broker_name, broker.broker_addr
    how = Departure[broker.how].value if broker.how in Departure.__members__ else "left"
    left = (
        f"it {how} at {time_text(broker.since)}: start it, or run `headrace broker forget {name}` "
        "if it won't come back"
    )
    names = broker.topics or []
    groups = [each.removeprefix(RETRY_PREFIX) for each in names if each.startswith(RETRY_PREFIX)]
    topics = [each for each in names if not each.startswith(RETRY_PREFIX)]
    found = [Check("departed", name, address, left)]
    if topics:
        problem = f"broker {name} is missing with its queues"
        found.append(Check("topic", _some(topics), address, problem))
    if groups:
        problem = f"broker {name} is missing with their progress"
        found.append(Check("group", _some(groups), address, problem))
    return found


def _some(names: list[str]) -> str:
    more = [f"and {len(names) - _NAMED_MAX} more"] if len(names) > _NAMED_MAX else []
    return ", ".join([*sorted(names)[:_NAMED_MAX], *more])


def _number(info: Info, key: str, default: float = 0) -> float:
    """A value of untrusted information."""
    try:
        value = float(info[key])
    except (KeyError, ValueError):
        return default
    return value if abs(value) < 2**62 else default
