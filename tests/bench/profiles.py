"""Where each microsecond of the broker goes: py-spy's samples, by stage and by function.

The Java client loads headrace while py-spy samples it. A sample's share of all, times the broker's
CPU per message of the same run, is its cost in microseconds per message.
"""

from __future__ import annotations

import argparse
import linecache
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.bench.compare import DRAINS
from tests.bench.load import SENDS, Load, loaded, say
from tests.bench.results import ROOT, stamp

if TYPE_CHECKING:
    from tests.bench.driver import Report

PROFILES = ROOT / "docs" / "profiles"
CASES: dict[str, dict[str, Any]] = {
    name: {**SENDS, **DRAINS}[name] for name in ("sync-32", "async-1000", "batch-100", "drain-lite")
}
BODY_BYTES = 1024
DRAIN_MESSAGES = 1_000_000
WARM_UP_S = 1
SAMPLES_PER_S = 400
FUNCTIONS = 25


class Frame(NamedTuple):
    """One place on the stack. path: whole; function: as Python names it."""

    function: str
    path: str
    line: int

    @property
    def module(self) -> str:
        inside = re.search(r"/site-packages/(.*)|/(headrace_\w+/.*)|/([^/]+/[^/]+)$", self.path)
        return inside[inside.lastindex or 0] if inside else self.path

    def __str__(self) -> str:
        return f"{self.function} ({self.module})"


class Stage(NamedTuple):
    """A stage is known by file, function and text of the line; each a pattern to search for."""

    name: str
    path: str
    function: str = ""
    text: str = ""


# The first that fits, from the innermost frame outwards.
STAGES = (
    Stage("frame", r"headrace_protocol/frame\.py"),
    Stage("header", r"headrace_protocol/(header_codecs|headers|command|fastjson)\.py"),
    Stage("header", r"processors/", text=r"_decode|\.header\("),
    Stage("properties", r"processors/send\.py", r"propert|tags_code"),
    Stage("properties", r"processors/send\.py", text=r"propert"),
    Stage("index", r"store/index"),
    Stage("write", r"store/(files/filesystem|write/flush)\.py"),
    Stage("write", r"store/log/commit_log\.py", r"write"),
    Stage("write", r"store/write/write_path\.py", r"\bcommit$"),
    Stage("dispatch", r"store/(queues/(dispatch|consume_queue)|log/ring)\.py|long_polling\.py"),
    Stage("dispatch", r"store/write/write_path\.py", r"publish|drain"),
    Stage("read", r"store/(reader|store_source)\.py|processors/pull\.py|consumer/"),
    Stage("append", r"store/"),
    Stage("append", r"processors/send\.py", text=r"append\(queue|[^s]\.append"),
    Stage("reply", r"processors/", r"_repl|answer"),
    Stage("reply", r"processors/|serving\.py", text=r"repl|channel\.write"),
    Stage(
        "checks",
        r"processors/|broker/topics/|protocol/serving\.py|statistics\.py"
        r"|broker/(serving/frame_loop|message_demands|queue_directory)\.py",
    ),
    Stage(
        "send",
        r"daemon/serving/(server|server_channel|socket_loop)\.py",
        r"flush|_drop_sent|\bsent$|written|\bwrite$|send_more",
    ),
    Stage(
        "receive",
        r"daemon/serving/(server|socket_loop)\.py",
        r"_readable|\breceived$|_accept|_count_partial|_handle",
    ),
    Stage(
        "scheduler",
        r"daemon/(serving/(server|socket_loop)|watchdog)\.py|/trio/|/asyncio/|/selectors\.py",
    ),
)
OTHER = "other"
# A thread that waits for work; py-spy takes some of its samples for busy.
WAITING = Stage("", r"/trio/_core/_thread_cache\.py", text=r"acquire")
OURS = re.compile(r"\(headrace_")
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)$")


def fits(stage: Stage, frame: Frame) -> bool:
    """Whether all patterns of a stage are found."""
    text = linecache.getline(frame.path, frame.line)
    places = ((stage.path, frame.path), (stage.function, frame.function), (stage.text, text))
    return all(re.search(pattern, place) for pattern, place in places)


def stage_of(stack: list[Frame]) -> str:
    """stack: innermost last."""
    for frame in reversed(stack):
        for stage in STAGES:
            if fits(stage, frame):
                return stage.name
    return OTHER


class Profile(NamedTuple):
    """Samples by stage and function. inside: with what a function calls."""

    total: int
    stages: Counter[str]
    own: Counter[str]
    inside: Counter[str]


def fold(raw: str) -> Profile:
    """raw: of ``py-spy record --format raw``: frames joined by ";", and how many samples."""
    profile = Profile(0, Counter(), Counter(), Counter())
    total = 0
    for line in raw.splitlines():
        frames, _, count_text = line.rpartition(" ")
        stack = [frame for text in frames.split(";") if (frame := _frame(text))]
        if not stack or fits(WAITING, stack[-1]):
            continue
        count = int(count_text)
        total += count
        profile.stages[stage_of(stack)] += count
        profile.own[str(stack[-1])] += count
        for name in {str(frame) for frame in stack}:
            profile.inside[name] += count
    return profile._replace(total=total)


def _frame(text: str) -> Frame | None:
    """None for what is no place in a file, as the name of a thread."""
    match = _FRAME.match(text)
    return Frame(match[1], match[2], int(match[3])) if match else None


def summary(case: str, report: Report, profile: Profile) -> str:
    """The text that is committed."""
    cpu_us = report["broker_cpu_us"]
    run = stamp()
    ours = Counter({name: n for name, n in profile.inside.items() if OURS.search(name)})
    heading = (
        f"{case}, bodies of {BODY_BYTES} B, official Java client, {report['rate']:,.0f} messages/s "
        f"while sampled\n{cpu_us:.2f} µs of broker CPU per message, from {profile.total:,} samples "
        f"of py-spy\n{run['date']}, {run['machine']}\n"
    )
    return "\n".join(
        [
            heading,
            _stages(profile, cpu_us),
            _functions("function, by its own time", profile.own, profile, cpu_us),
            _functions("function of ours, with what it calls", ours, profile, cpu_us),
        ]
    )


def _stages(profile: Profile, cpu_us: float) -> str:
    lines = [f"{'stage':12}{'µs/message':>12}{'share':>9}"]
    for name, count in profile.stages.most_common():
        share = count / profile.total
        lines.append(f"{name:12}{share * cpu_us:12.3f}{share:9.1%}")
    return "\n".join(lines) + "\n"


def _functions(title: str, counts: Counter[str], profile: Profile, cpu_us: float) -> str:
    lines = [f"{'own µs':>8}{'all µs':>8}  {title}"]
    for name, _ in counts.most_common(FUNCTIONS):
        own, inside = (
            table[name] / profile.total * cpu_us for table in (profile.own, profile.inside)
        )
        lines.append(f"{own:8.3f}{inside:8.3f}  {name}")
    return "\n".join(lines) + "\n"


def sampled(load: Load, work: dict[str, Any], seconds: float, raw: Path) -> Report:
    """Runs a job while py-spy samples the broker into ``raw``."""
    command = [
        *(str(Path(sys.executable).with_name("py-spy")), "record", "--full-filenames"),
        *("--format", "raw", "--rate", str(SAMPLES_PER_S), "--pid", str(load.peer.broker_pid)),
        *("--output", str(raw), "--duration", "unlimited"),
    ]
    spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        return load.job(work, "PROFILE", BODY_BYTES, messages=DRAIN_MESSAGES, seconds=seconds)
    finally:
        # Written on an interrupt.
        spy.send_signal(signal.SIGINT)
        _, errors = spy.communicate()
        if not raw.exists():
            say(errors)


def profile_case(name: str, seconds: float, directory: Path) -> str:
    """The summary of one case, on a fresh broker."""
    with loaded("headrace", directory) as load:
        load.warm_up(WARM_UP_S, BODY_BYTES)
        if name in DRAINS:
            load.job({"work": "fill"}, "PROFILE", BODY_BYTES, messages=DRAIN_MESSAGES)
        raw = directory / f"{name}.raw"
        report = sampled(load, CASES[name], seconds, raw)
        return summary(name, report, fold(raw.read_text()))


def main(options: list[str]) -> None:
    parser = argparse.ArgumentParser("tests.bench profile", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE")
    parser.add_argument("--seconds", type=float, default=6, help="of each sending case")
    parser.add_argument("--keep", action="store_true", help="into docs/profiles")
    chosen = parser.parse_args(options)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        for name in chosen.only or CASES:
            text = profile_case(name, chosen.seconds, Path(directory))
            sys.stdout.write(text + "\n")
            if chosen.keep:
                PROFILES.mkdir(exist_ok=True)
                (PROFILES / f"{name}.txt").write_text(text)
