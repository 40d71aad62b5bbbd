"""``headrace store`` on the command line."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import headrace
from tests.support.damage import fill_store
from tests.support.stores import open_store


@pytest.fixture
def root(tmp_path: Path) -> str:
    fill_store(tmp_path / "store")
    return str(tmp_path / "store")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "broker.conf"
    path.write_text(
        "mappedFileSizeCommitLog=4096\nmappedFileSizeConsumeQueue=200\n"
        f"maxHashSlotNum=10\nmaxIndexNum=20\nstorePathRootDir={tmp_path / 'store'}\n"
    )
    return str(path)


def spoil(root: str, name: str, position: int) -> None:
    with (Path(root) / name).open("r+b") as file:
        file.seek(position)
        file.write(b"\x55\x55")


def test_fsck_of_a_sound_store(root: str, config: str) -> None:
    done = headrace("store", "fsck", root, "-c", config)
    assert done.exit_code == 0
    assert done.stderr.splitlines()[0] == "no problems found"
    assert "records 60, log_min_offset 0" in done.stderr
    assert headrace("store", "fsck", root, "-c", config, "--json").json()["findings"] == []


def test_fsck_names_place_and_repairs(root: str, config: str) -> None:
    spoil(root, "consumequeue/A/0/00000000000000000000", 46)
    done = headrace("store", "fsck", root, "-c", config)
    assert done.exit_code == 1
    [[state, path, position, problem, can_repair]] = done.rows()
    assert [state, path, position] == ["damage", "consumequeue/A/0/00000000000000000000", "40"]
    assert problem.startswith("unit 2: not the position")
    assert can_repair == "yes"
    done = headrace("store", "fsck", root, "-c", config, "--repair")
    assert done.exit_code == 0
    assert [row[0] for row in done.rows()] == ["repaired"]
    assert "/headrace.fsck/" in done.stderr
    assert headrace("store", "fsck", root, "-c", config).exit_code == 0


def test_what_cannot_be_repaired_stays_damage(root: str, config: str) -> None:
    spoil(root, "commitlog/00000000000000004096", 90)
    done = headrace("store", "fsck", root, "-c", config, "--repair", "--json")
    assert done.exit_code == 1
    assert done.json()["damaged"] == 1
    assert [row["state"] for row in done.json()["findings"]].count("damage") == 1


def test_a_store_in_use_is_refused(root: str, config: str) -> None:
    store = open_store(Path(root))
    for command in (["fsck"], ["stat"], ["dump"], ["copy", "--topic", "A"]):
        target = [f"{root}-copy"] if command[0] == "copy" else []
        done = headrace("store", command[0], root, *target, *command[1:], "-c", config)
        assert done.exit_code == 1
        assert "is in use by another store of this process" in done.stderr
    store.close()


@pytest.mark.parametrize("command", [["dump"], ["copy", "copy"]])
def test_a_topic_that_is_not_there_is_named(
    tmp_path: Path, root: str, config: str, command: list[str]
) -> None:
    target = [str(tmp_path / name) for name in command[1:]]
    done = headrace("store", command[0], root, *target, "--topic", "nosuch", "-c", config)
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == (
        f"headrace: {root} has no queue of topic nosuch: headrace store stat lists its topics\n"
    )
    assert not (tmp_path / "copy").exists()


def test_records_of_a_deleted_topic_are_still_printed(root: str, config: str) -> None:
    lines = headrace("store", "dump", root, "--topic", "A", "-c", config).stdout
    shutil.rmtree(Path(root) / "consumequeue" / "A")
    done = headrace("store", "dump", root, "--topic", "A", "-c", config)
    assert (done.exit_code, done.stdout, done.stderr) == (0, lines, "")
    assert lines


def test_wrong_places_are_named(tmp_path: Path, root: str) -> None:
    done = headrace("store", "stat", str(tmp_path / "nowhere"))
    assert (done.exit_code, "no such directory" in done.stderr) == (3, True)
    done = headrace("store", "stat", str(tmp_path))
    assert (done.exit_code, "is no store" in done.stderr) == (1, True)
    done = headrace("store", "stat", root)
    assert (done.exit_code, "--config" in done.stderr) == (1, True)
    (tmp_path / "bad.conf").write_text("mappedFileSizeCommitLog=many\n")
    done = headrace("store", "stat", root, "-c", str(tmp_path / "bad.conf"))
    assert (done.exit_code, "mappedFileSizeCommitLog" in done.stderr) == (2, True)
    done = headrace("store", "stat", root, "-c", str(tmp_path / "nowhere.conf"))
    assert (done.exit_code, "nowhere.conf: can't read settings" in done.stderr) == (2, True)


def test_stat_lists_topics(root: str, config: str) -> None:
    done = headrace("store", "stat", root, "-c", config, "--json").json()
    assert done["is_clean"] is True
    assert done["log_files"] > 2
    assert [topic["topic"] for topic in done["topics"]] == ["A", "B", "C"]
    assert "log_min_offset\t0" in headrace("store", "stat", root, "-c", config).stdout


def test_dump_prints_records(root: str, config: str) -> None:
    done = headrace("store", "dump", root, "-c", config, "--topic", "B", "--json")
    records = done.json_lines()
    assert {record["topic"] for record in records} == {"B"}
    assert records[0].keys() >= {"physical_offset", "queue_offset", "properties", "store_time"}
    start = str(records[3]["physical_offset"])
    lines = headrace(
        "store", "dump", root, "-c", config, "--topic", "B", "--from", start, "--max", "2"
    ).stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == [
        str(record["physical_offset"]) for record in records[3:5]
    ]


def test_dump_tells_of_damage(root: str, config: str) -> None:
    spoil(root, "commitlog/00000000000000004096", 90)
    done = headrace("store", "dump", root, "-c", config)
    assert "physical offset 4096: " in done.stderr
    assert "body CRC does not match" in done.stderr
    assert len(done.stdout.splitlines()) == 59


def test_copy_makes_a_store(root: str, config: str) -> None:
    target = f"{root}-copy"
    done = headrace("store", "copy", root, target, "--topic", "A", "-c", config, "--json")
    assert (done.exit_code, done.json()["records"]) == (0, 20)
    assert headrace("store", "fsck", target, "-c", config, "--json").json()["records"] == 20
    again = headrace("store", "copy", root, target, "--topic", "A", "-c", config)
    assert (again.exit_code, "is not empty" in again.stderr) == (1, True)


@pytest.mark.slow
def test_a_terminal_shows_a_bar(root: str, config: str) -> None:
    leader, follower = pty.openpty()
    command = [str(Path(sys.executable).with_name("headrace")), "store", "fsck", root, "-c", config]
    done = subprocess.run(command, stderr=follower, stdout=subprocess.PIPE, check=False)
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert done.returncode == 0
    assert "checking" in shown
    assert "records 60" in shown
