"""The location of the tier, as --check-config tries it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_broker import main as broker_main
from headrace_broker.tiered.access.probe import probe
from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_broker.tiered.driver.posix import PosixDriver
from tests.support.object_tiers import FaultyDriver


def test_one_object_is_put_read_and_removed(tmp_path: Path) -> None:
    assert probe(PosixDriver(tmp_path)) == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("verb", "said"), [("put", "put"), ("read", "read"), ("delete", "remove")])
def test_what_is_missing_is_named(verb: str, said: str) -> None:
    store = FaultyDriver()
    store.fail(verb)
    assert f"can't {said} an object" in probe(store)
    assert "is away" in probe(store)
    assert bool(store.driver.stored) is (verb == "delete")


class Garbling(MemoryDriver):
    def read(self, path: str, ranges: Any) -> Any:  # noqa: ARG002
        return [b"?" * (end - start) for start, end in ranges]


def test_other_bytes_are_a_problem() -> None:
    driver = Garbling()
    assert "other bytes" in probe(driver)
    assert not driver.stored


@pytest.mark.parametrize("provider", ["posix", "file"])
def test_check_config_tries_the_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], provider: str
) -> None:
    file, folder = tmp_path / "broker.conf", tmp_path / "tier"
    file.write_text(
        f"storePathRootDir={tmp_path}/store\nmessageStorePlugIn=tieredstore\n"
        f"tieredBackendServiceProvider={provider}\ntieredStoreFilePath={folder}\n"
    )
    assert broker_main.main(["-c", str(file), "--check-config"]) == 0
    assert "is valid" in capsys.readouterr().err
    assert not list(folder.iterdir())
    assert not (tmp_path / "store").exists()


def test_check_config_says_what_the_tier_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "broker.conf", "/proc/self/fdinfo"
    file.write_text(
        f"storePathRootDir={tmp_path}/store\nmessageStorePlugIn=tieredstore\n"
        f"tieredBackendServiceProvider=posix\ntieredStoreFilePath={folder}\n"
    )
    assert broker_main.main(["-c", str(file), "--check-config"]) == 2
    said = capsys.readouterr().err
    assert f"tiered storage (posix {folder}): can't put an object: headrace-check-" in said
