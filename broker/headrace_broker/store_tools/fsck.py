"""``headrace store fsck``: checks every invariant of a store, and repairs what is safe to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from headrace_broker.store.files.positions import FOLDER
from headrace_broker.store.index.index_file import IndexFiles
from headrace_broker.store.log.log_blocks import LogBlock
from headrace_broker.store_tools.compaction_check import compaction_findings
from headrace_broker.store_tools.config_check import (
    checkpoint_findings,
    config_findings,
    users_findings,
)
from headrace_broker.store_tools.directory import is_numbered
from headrace_broker.store_tools.findings import ClearFrom, Finding, RebuildIndex, SavedCopies
from headrace_broker.store_tools.follower_check import follower_findings
from headrace_broker.store_tools.index_check import IndexCheck
from headrace_broker.store_tools.log_reader import LogDamage, LogReader
from headrace_broker.store_tools.queue_check import QueueChecks
from headrace_broker.store_tools.records import QueueNumbers
from headrace_broker.store_tools.seal_check import seal_findings
from headrace_broker.store_tools.staged_check import staged_findings
from headrace_broker.store_tools.waiting_check import waiting_findings

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store_tools.directory import Advance, StoreDirectory

SAVED_FOLDER = "headrace.fsck"
# Files that only Apache's broker reads and writes.
UNCHECKED = ("consumequeue_ext",)


@dataclass(slots=True)
class Report:
    """The result of a check. log_end: physical offset just past the last whole record."""

    findings: list[Finding] = field(default_factory=list)
    record_count: int = 0
    log_min: int = 0
    log_end: int = 0
    newest: tuple[int, int] | None = None

    @property
    def damage(self) -> list[Finding]:
        """The findings that are not mere notes."""
        return [finding for finding in self.findings if finding.is_damage]


def check(directory: StoreDirectory, advance: Advance) -> Report:
    """Read and compare everything once. Changes nothing. Raises OSError."""
    report = Report()
    report.findings += _file_findings(directory)
    queue_numbers = QueueNumbers(directory.settings.delay_levels_ms)
    queues, index = QueueChecks(directory, queue_numbers), IndexCheck(directory, queue_numbers)
    paths = directory.log_paths
    reader = LogReader(paths, directory.settings.commit_log_file_bytes, advance)
    report.log_min = reader.end_offset
    for found in reader:
        if isinstance(found, LogDamage):
            report.findings.append(_log_finding(directory, found))
        else:
            _compare(found, report, queue_numbers, queues, index)
    report.log_end = reader.end_offset
    report.findings += queues.finish(report.log_min, report.log_end, advance)
    report.findings += index.finish()
    report.findings += checkpoint_findings(directory.root, report.newest)
    report.findings += seal_findings(directory)
    report.findings += config_findings(directory.root / "config")
    report.findings += users_findings(directory.root / "config")
    report.findings += config_findings(directory.root / FOLDER)
    report.findings += staged_findings(directory.root, directory.fs)
    report.findings += follower_findings(directory)
    report.findings += compaction_findings(directory)
    report.findings += waiting_findings(directory, report.log_end)
    return report


def _compare(
    block: LogBlock,
    report: Report,
    queue_numbers: QueueNumbers,
    queues: QueueChecks,
    index: IndexCheck,
) -> None:
    records = queue_numbers.records(block)
    queues.compare(records)
    end_offset = int(records.physical_offset[-1]) + int(records.size[-1])
    index.compare(records, end_offset)
    report.record_count += len(records.size)
    newest = int(np.argmax(records.store_timestamp))
    time_ms = max(int(records.store_timestamp[newest]), report.newest[1] if report.newest else 0)
    report.newest = int(records.physical_offset[-1]), time_ms


def _file_findings(directory: StoreDirectory) -> list[Finding]:
    """Log files that are misnamed, of the wrong length or missing; notes on the whole store."""
    findings = []
    if not directory.is_clean:
        path = directory.root / "abort"
        problem = "exists: the last broker did not stop cleanly, the next start recovers"
        findings.append(Finding(path, problem, is_damage=False))
    for path in (directory.root / name for name in UNCHECKED):
        if path.is_file() or any(path.glob("*")):
            problem = "not checked: only Apache's broker reads it"
            findings.append(Finding(path, problem, is_damage=False))
    file_bytes = directory.settings.commit_log_file_bytes
    before: Path | None = None
    for path in sorted((directory.root / "commitlog").glob("*")):
        if not is_numbered(path):
            findings.append(Finding(path, "is not a log file"))
            continue
        length = path.stat().st_size
        if length != file_bytes:
            findings.append(Finding(path, f"has {length} bytes instead of {file_bytes}"))
        if before and int(before.name) + file_bytes != int(path.name):
            findings.append(Finding(path, f"follows {before.name} with a gap"))
        before = path
    return findings


def _log_finding(directory: StoreDirectory, damage: LogDamage) -> Finding:
    file_bytes = directory.settings.commit_log_file_bytes
    path = [p for p in directory.log_paths if int(p.name) <= damage.start][-1]
    position = damage.start - int(path.name)
    what = f"{damage.end - damage.start} bytes without a whole record: {damage.reason}"
    if not damage.is_tail:
        return Finding(path, f"{what}; whole records follow", position)
    if damage.end > int(path.name) + file_bytes:
        return Finding(path, f"{what}; no whole record follows, not even in later files", position)
    fix = ClearFrom(path, position, damage.end - int(path.name))
    return Finding(path, f"{what}; no whole record follows", position, fix)


# --- repair --------------------------------------------------------------------------------


def repair(directory: StoreDirectory, findings: list[Finding], advance: Advance) -> Path | None:
    """Apply all fixes; returns the folder with the replaced bytes, if any. Raises OSError."""
    fixes = [finding.fix for finding in findings if finding.fix]
    if not fixes:
        return None
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    saved = SavedCopies(directory.root, directory.root / SAVED_FOLDER / name)
    for fix in fixes:
        fix.apply(saved)
    if any(isinstance(fix, RebuildIndex) for fix in fixes):
        _build_index(directory, saved, advance)
    return saved.folder


def _build_index(directory: StoreDirectory, saved: SavedCopies, advance: Advance) -> None:
    """Rebuild all index files from the log."""
    for path in directory.index_paths:
        saved.move_aside(path)
    files = IndexFiles(directory.settings, directory.fs)
    queue_numbers = QueueNumbers(directory.settings.delay_levels_ms)
    now_ms = int(time.time() * 1000)
    file_bytes = directory.settings.commit_log_file_bytes
    for block in LogReader(directory.log_paths, file_bytes, advance):
        if isinstance(block, LogBlock):
            records = queue_numbers.records(block)
            numbers, hashes = queue_numbers.index_keys(records)
            files.put(
                hashes, records.physical_offset[numbers], records.store_timestamp[numbers], now_ms
            )
    for file in files.files:
        file.file.sync()
