"""Files with secrets are read only if no other user of the machine can."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_protocol.drivers.files import NotPrivate, read_private, replace_file


def test_a_private_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "password"
    replace_file(path, b"secret")
    assert read_private(path) == b"secret"
    path.chmod(0o400)
    assert read_private(path) == b"secret"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o777])
def test_a_file_that_others_can_use_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes(b"secret")
    path.chmod(mode)
    with pytest.raises(NotPrivate, match=rf"{path}.*{mode:04o}.*chmod 600"):
        read_private(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "password"
    replace_file(path, b"12345")
    assert read_private(path, 5) == b"12345"
    with pytest.raises(NotPrivate, match="over 4 bytes"):
        read_private(path, 4)


def test_a_missing_file_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_private(tmp_path / "password")
