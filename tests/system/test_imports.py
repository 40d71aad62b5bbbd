"""Modules that ``headrace dev`` does not import; ``make house`` bounds their number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.processes import dev

pytestmark = pytest.mark.slow

NEVER = (
    "asyncio",
    "headrace.consumer",
    "headrace.producer",
    "headrace.spark",
    "headrace_protocol.tier",
    "obstore",
    "prometheus_client",
    "rich",
)
# What is imported of the features that are switched off.
TIER = {"config", "feature", "off"}
METRICS = {"feature"}
AUDIT = {"settings"}
USERS = {"errors", "exposure", "opening", "settings"}
_LINE = re.compile(r"import time: +[0-9]+ \| +[0-9]+ \| +(\S+)\n")


@pytest.fixture(scope="module")
def imported() -> set[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        with dev() as broker:
            broker.process.terminate()
            _, _, err = broker.end()
    return set(_LINE.findall(err))


@pytest.mark.parametrize("name", NEVER)
def test_what_no_daemon_needs_is_not_imported(imported: set[str], name: str) -> None:
    assert not [each for each in imported if each.startswith(f"{name}.")]


def test_a_feature_that_is_switched_off_is_not_imported(imported: set[str]) -> None:
    assert inside(imported, "headrace_broker.tiered") == TIER
    assert inside(imported, "headrace_broker.metrics") == METRICS
    assert inside(imported, "headrace_daemon.audit") == AUDIT
    assert inside(imported, "headrace_daemon.access") == USERS


def test_features_are_imported_where_they_are_switched_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    folder = f"tieredStoreFilePath={tmp_path / 'tier'}"
    tier = ("messageStorePlugIn=tieredstore", "tieredBackendServiceProvider=posix", folder)
    settings = [part for each in ("monitorPort=0", *tier) for part in ("--set", each)]
    with dev("--data", str(tmp_path / "data"), *settings) as broker:
        broker.process.terminate()
        _, _, err = broker.end()
    names = set(_LINE.findall(err))
    assert "broker_metrics" in inside(names, "headrace_broker.metrics")
    assert "access.upload" in inside(names, "headrace_broker.tiered")


def inside(names: set[str], folder: str) -> set[str]:
    prefix = f"{folder}."
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
