"""The broker's tables in the tier: how many requests they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.filesystem import Files
from headrace_broker.tiered.access.lives import LIVES_FILE, Lives
from headrace_broker.tiered.access.saved_tables import TableSaver, read_tables
from headrace_protocol.tier.driver import Failure
from tests.support.object_tiers import HOME, Fault, FaultyDriver


def saver_on(root: Path, store: Any) -> TableSaver:
    lives = Lives(ConfigFile(root / LIVES_FILE), lambda _topic: None, lambda _topic: False)
    return TableSaver(lambda: store, HOME, root, Files(), list, lives)


def write(root: Path, text: str) -> None:
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "topics.json").write_text(f'{{"text": "{text}"}}')


def saved_text(store: FaultyDriver) -> str:
    found = read_tables(store.driver, HOME)
    assert not isinstance(found, Failure), found
    return str(json.loads(found.files["topics.json"])["text"])


def test_a_save_is_one_put_and_none_without_a_change(tmp_path: Path) -> None:
    store = FaultyDriver()
    saver = saver_on(tmp_path, store)
    write(tmp_path, "first")
    saver.save(1)
    store.calls.clear()
    for number in range(5):
        write(tmp_path, f"text {number}")
        saver.save(2)
        saver.save(3)
    assert dict(store.calls) == {"put": 5}
    assert saved_text(store) == "text 4"


@pytest.mark.parametrize("fault", [Fault.FAILS, Fault.ANSWER_LOST, Fault.REPEATED])
def test_a_save_without_an_answer_is_repeated(tmp_path: Path, fault: Fault) -> None:
    store = FaultyDriver()
    saver = saver_on(tmp_path, store)
    write(tmp_path, "first")
    saver.save(1)
    write(tmp_path, "second")
    store.fault = lambda call: fault if call == "put" else Fault.NONE
    with pytest.raises(OSError, match="tables"):
        saver.save(2)
    store.fault = lambda _call: Fault.NONE
    saver.save(3)
    assert saved_text(store) == "second"
