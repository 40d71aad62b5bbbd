"""config/*.json: always one whole file, and never a damaged one taken for an empty one."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import (
    ConfigFile,
    ConfigSource,
    is_whole,
    sealed,
    unsealed,
)
from headrace_broker.store.files.filesystem import Files
from headrace_protocol.frame import Buffer
from tests.support.faulty_files import FaultyFiles, next_life

OLD, NEW = b'{"a":1}', b'{\n\t"table":{0:1}\n}'


class CrashingFiles(Files):
    """Stops before the n-th step that changes what is on disk."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def _step(self) -> None:
        if not self.steps:
            raise InterruptedError
        self.steps -= 1

    def open(self, path: Path, flags: int = 0) -> int:
        self._step()
        return super().open(path, flags)

    def write(self, descriptor: int, data: Buffer, position: int) -> None:
        self._step()
        super().write(descriptor, data[: len(data) // 2], position)
        self._step()
        super().write(descriptor, data, position)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    config = ConfigFile(tmp_path / "config" / "topics.json")
    assert (config.load(), config.source) == (None, ConfigSource.MISSING)
    for data in (OLD, NEW):
        config.save(data)
        assert (config.load(), config.source) == (data, ConfigSource.FILE)
    assert unsealed(config.backup_path.read_bytes()) == OLD
    assert sorted(path.name for path in config.path.parent.iterdir()) == [
        "topics.json",
        "topics.json.bak",
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_power_cut_leaves_what_was_saved_and_its_folder(seed: int, tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path / "store", Random(seed))
    path = files.root / "config" / "topics.json"
    ConfigFile(path, files).save(NEW)
    files.cut_power()
    assert ConfigFile(path, next_life(files.root, files.rng, before=files)).load() == NEW


@pytest.mark.parametrize("steps", range(6))
def test_a_crash_at_any_step_leaves_the_old_or_the_new(steps: int, tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    ConfigFile(path).save(OLD)
    try:
        ConfigFile(path, CrashingFiles(steps)).save(NEW)
    except InterruptedError:
        assert steps < 5
    assert ConfigFile(path).load() == (NEW if steps == 5 else OLD)


@pytest.mark.parametrize("damage", [b"", NEW[:-1], NEW[:9], b"\0" * 20])
def test_the_backup_stands_in_for_a_damaged_file(damage: bytes, tmp_path: Path) -> None:
    config = ConfigFile(tmp_path / "topics.json")
    config.save(OLD)
    config.save(NEW)
    config.path.write_bytes(damage)
    assert (config.load(), config.source) == (OLD, ConfigSource.BACKUP)
    config.path.unlink()
    assert (config.load(), config.source) == (OLD, ConfigSource.BACKUP)
    config.backup_path.write_bytes(damage)
    with pytest.raises(StoreFormatError, match=r"topics\.json: can't be read.*put a good copy"):
        config.load()


@pytest.mark.parametrize("steps", range(6))
def test_a_crash_after_a_damage_leaves_what_the_backup_held(steps: int, tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    for data in (OLD, NEW):
        ConfigFile(path).save(data)
    path.write_bytes(NEW[:9])
    config = ConfigFile(path, CrashingFiles(steps))
    assert config.load() == OLD
    try:
        config.save(b'{"a":3}')
    except InterruptedError:
        assert steps < 5
    assert ConfigFile(path).load() == (b'{"a":3}' if steps == 5 else OLD)
    damaged = path if steps < 4 else config.damaged_path
    assert damaged.read_bytes() == NEW[:9]


def test_no_changed_byte_passes(tmp_path: Path) -> None:
    config = ConfigFile(tmp_path / "topics.json")
    config.save(OLD)
    config.save(NEW)
    good = config.path.read_bytes()
    for at in range(len(good)):
        for change in (1, 0x20, 0x80, good[at]):
            config.path.write_bytes(good[:at] + bytes((good[at] ^ change,)) + good[at + 1 :])
            text = config.load()
            # What spoils the line of blanks as such leaves the text without a checksum.
            assert text is not None
            assert (text.strip(), config.source) in {
                (NEW, ConfigSource.FILE),
                (OLD, ConfigSource.BACKUP),
            }


def test_what_another_wrote_needs_no_checksum(tmp_path: Path) -> None:
    config = ConfigFile(tmp_path / "topics.json")
    config.save(OLD)
    config.path.write_bytes(NEW)
    assert (config.load(), config.source) == (NEW, ConfigSource.FILE)


def test_who_edits_a_file_by_hand_is_told_about_its_end(tmp_path: Path) -> None:
    config = ConfigFile(tmp_path / "topics.json")
    config.path.write_bytes(sealed(OLD).replace(b"1", b"2"))
    with pytest.raises(StoreFormatError, match="remove the blanks at its end"):
        config.load()


def test_the_backup_stands_in_for_a_text_that_cannot_be_read(tmp_path: Path) -> None:
    config = ConfigFile(tmp_path / "topics.json")
    config.save(b'{"number":1}')
    config.save(b'{"number":x}')
    assert config.read(json.loads) == {"number": 1}
    assert config.source is ConfigSource.BACKUP
    assert "topics.json" in config.problem


TREES = st.recursive(
    st.text() | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.dictionaries(st.text(), TREES, max_size=4), st.data())
def test_no_beginning_of_a_text_is_whole(tree: dict[str, object], data: st.DataObject) -> None:
    text = json.dumps(tree, ensure_ascii=data.draw(st.booleans())).encode()
    assert is_whole(text)
    assert not is_whole(text[: data.draw(st.integers(0, len(text) - 1))])
