"""config/*.json: always one whole file, and never a damaged one taken for an empty one."""

from __future__ import annotations

import json
from contextlib import suppress
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
from tests.support.faulty_files import FaultyFiles, PowerCut

OLD, NEW = b'{"a":1}', b'{\n\t"table":{0:1}\n}'


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


@pytest.mark.parametrize("after", range(9))
def test_a_kill_after_a_damage_leaves_what_the_backup_held(after: int, tmp_path: Path) -> None:
    path, newest = tmp_path / "topics.json", b'{"a":3}'
    for data in (OLD, NEW):
        ConfigFile(path).save(data)
    path.write_bytes(NEW[:9])
    files = FaultyFiles(tmp_path, Random(after))
    config = ConfigFile(path, files)
    assert config.load() == OLD
    files.end_in(after, is_cut=False)
    with suppress(PowerCut):
        config.save(newest)
    found = ConfigFile(path).load()
    assert found in (OLD, newest)
    assert found == newest or after < 8
    is_moved = config.damaged_path.exists()
    assert is_moved or found == OLD
    assert (config.damaged_path if is_moved else path).read_bytes() == NEW[:9]


@pytest.mark.parametrize("size", [1, 100_000, 300_000])
def test_a_file_may_be_saved_in_parts(tmp_path: Path, size: int) -> None:
    parts = [bytes([number]) * size for number in range(7)]
    Files().replace(tmp_path / "t", parts)
    assert (tmp_path / "t").read_bytes() == b"".join(parts)


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
