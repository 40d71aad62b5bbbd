"""``headrace store fsck``: every invariant of a store directory, and what can be mended safely."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from headrace_broker.store.index.index_file import IndexFiles
from headrace_broker.store.log.log_blocks import LogBlock
from headrace_broker.store_tools.config_check import (
    checkpoint_findings,
    config_findings,
    mark_findings,
)
from headrace_broker.store_tools.directory import is_numbered
from headrace_broker.store_tools.findings import ClearFrom, Finding, IndexAnew, SavedCopies
from headrace_broker.store_tools.follower_check import follower_findings
from headrace_broker.store_tools.index_check import IndexCheck
from headrace_broker.store_tools.log_reader import LogDamage, LogReader
from headrace_broker.store_tools.queue_check import QueueChecks
from headrace_broker.store_tools.records import Places
from headrace_broker.store_tools.seal_check import seal_findings
from headrace_broker.store_tools.staged_check import staged_findings

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store_tools.directory import Advance, StoreDirectory

SAVED_FOLDER = "headrace.fsck"
# What only Apache's broker reads and writes.
UNCHECKED = ("batchconsumequeue", "consumequeue_ext", "compaction", "timerwheel", "timerlog")


@dataclass(slots=True)
class Report:
    """What a check saw. log_end: just after the last whole record, by physical offset."""

    findings: list[Finding] = field(default_factory=list)
    record_count: int = 0
    unit_bytes: int = 0
    log_min: int = 0
    log_end: int = 0
    newest: tuple[int, int] | None = None

    @property
    def damage(self) -> list[Finding]:
        """Findings that are no mere notes."""
        return [finding for finding in self.findings if finding.is_damage]


def check(directory: StoreDirectory, advance: Advance) -> Report:
    """Read everything once and compare it. Changes nothing. Raises OSError."""
    report = Report()
    report.findings += _file_findings(directory)
    places = Places(directory.settings.delay_levels_ms)
    queues, index = QueueChecks(directory, places), IndexCheck(directory, places)
    paths = directory.log_paths
    reader = LogReader(paths, directory.settings.commit_log_file_bytes, advance)
    report.log_min = reader.end_offset
    for found in reader:
        if isinstance(found, LogDamage):
            report.findings.append(_log_finding(directory, found))
        else:
            _see(found, report, places, queues, index)
    report.log_end = reader.end_offset
    report.findings += queues.finish(report.log_min, report.log_end, advance)
    report.findings += index.finish()
    report.findings += checkpoint_findings(directory.root, report.newest)
    report.findings += mark_findings(directory.root)
    report.findings += seal_findings(directory)
    report.findings += config_findings(directory.root / "config")
    report.findings += staged_findings(directory.root)
    report.findings += follower_findings(directory)
    return report


def _see(
    block: LogBlock, report: Report, places: Places, queues: QueueChecks, index: IndexCheck
) -> None:
    records = places.records(block)
    queues.see(records)
    end_offset = int(records.physical_offset[-1]) + int(records.size[-1])
    index.see(records, end_offset)
    report.record_count += len(records.size)
    newest = int(np.argmax(records.store_timestamp))
    time_ms = max(int(records.store_timestamp[newest]), report.newest[1] if report.newest else 0)
    report.newest = int(records.physical_offset[-1]), time_ms


def _file_findings(directory: StoreDirectory) -> list[Finding]:
    """Files that are out of place, of another length, or missing between others."""
    findings = []
    if not directory.is_clean:
        path = directory.root / "abort"
        problem = "there: the last broker did not stop cleanly, the next start recovers"
        findings.append(Finding(path, problem, is_damage=False))
    for path in (directory.root / name for name in UNCHECKED):
        if path.is_file() or any(path.glob("*")):
            problem = "not checked: only Apache's broker reads it"
            findings.append(Finding(path, problem, is_damage=False))
    file_bytes = directory.settings.commit_log_file_bytes
    before: Path | None = None
    for path in sorted((directory.root / "commitlog").glob("*")):
        if not is_numbered(path):
            findings.append(Finding(path, "is no file of a log"))
            continue
        length = path.stat().st_size
        if length != file_bytes:
            findings.append(Finding(path, f"has {length} bytes, but the others {file_bytes}"))
        if before and int(before.name) + file_bytes != int(path.name):
            findings.append(Finding(path, f"follows {before.name} with a gap"))
        before = path
    return findings


def _log_finding(directory: StoreDirectory, damage: LogDamage) -> Finding:
    file_bytes = directory.settings.commit_log_file_bytes
    path = [p for p in directory.log_paths if int(p.name) <= damage.start][-1]
    position = damage.start - int(path.name)
    what = f"{damage.end - damage.start} bytes that are no whole record: {damage.reason}"
    if not damage.is_tail:
        return Finding(path, f"{what}; whole records follow", position)
    if damage.end > int(path.name) + file_bytes:
        return Finding(path, f"{what}; nothing whole follows, in later files too", position)
    fix = ClearFrom(path, position, damage.end - int(path.name))
    return Finding(path, f"{what}; nothing whole follows", position, fix)


# --- repair --------------------------------------------------------------------------------


def repair(directory: StoreDirectory, findings: list[Finding], advance: Advance) -> Path | None:
    """Apply what fixes there are; returns the folder that keeps what was cut. Raises OSError."""
    fixes = [finding.fix for finding in findings if finding.fix]
    if not fixes:
        return None
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    saved = SavedCopies(directory.root, directory.root / SAVED_FOLDER / name)
    for fix in fixes:
        fix.apply(saved)
    if any(isinstance(fix, IndexAnew) for fix in fixes):
        _build_index(directory, saved, advance)
    return saved.folder


def _build_index(directory: StoreDirectory, saved: SavedCopies, advance: Advance) -> None:
    """All index files anew from the log."""
    for path in directory.index_paths:
        saved.put_away(path)
    files = IndexFiles(directory.settings, directory.fs)
    places = Places(directory.settings.delay_levels_ms)
    now_ms = int(time.time() * 1000)
    file_bytes = directory.settings.commit_log_file_bytes
    for block in LogReader(directory.log_paths, file_bytes, advance):
        if isinstance(block, LogBlock):
            records = places.records(block)
            numbers, hashes = places.index_keys(records)
            files.put(
                hashes, records.physical_offset[numbers], records.store_timestamp[numbers], now_ms
            )
    for file in files.files:
        file.file.sync()
