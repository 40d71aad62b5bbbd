"""Metrics as a scrape finds them, without a loop or an HTTP server."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace_daemon.metrics.exposition import Encoder
from headrace_daemon.metrics.samples import Collect, Samples
from headrace_protocol.waiting import at_once

# By name of the sample, and by label.
Page = dict[str, dict[frozenset[tuple[str, str]], float]]


def collect(*collectors: Collect, may_wait: bool = True) -> Page:
    """The samples of collectors; what must wait for the disk is fetched at once, or left out."""
    samples = Samples()
    samples.may_wait = may_wait
    for collector in collectors:
        at_once(collector(samples))
    return parse(Encoder({}).encode(samples))


def parse(page: bytes) -> Page:
    """As a reader that is not ours has it; samples of the process are left out."""
    found: Page = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if not sample.name.startswith("process_"):
                labels = found.setdefault(sample.name, {})
                assert frozenset(sample.labels.items()) not in labels, sample
                labels[frozenset(sample.labels.items())] = sample.value
    return found


def value(page: Page, name: str, **labels: str) -> float | None:
    """The value of the only sample with these labels; None if there is none."""
    found = [number for names, number in page.get(name, {}).items() if labels.items() <= set(names)]
    assert len(found) <= 1, (name, labels, found)
    return found[0] if found else None


def values(page: Page, name: str, label: str) -> dict[str, float]:
    """By one label."""
    return {dict(labels)[label]: number for labels, number in page.get(name, {}).items()}
