"""A deleted topic stays deleted, whatever a start reads again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.queues.deletions import DELETIONS_NAME
from tests.support.stores import crash, open_store, put, read_all


def bodies(store: MessageStore, topic: str) -> list[bytes]:
    return [message.body for message in read_all(store, store.queue(topic, 0))]


def send(store: MessageStore, topic: str, *texts: bytes) -> None:
    for text in texts:
        put(store, store.queue(topic, 0), text)


@pytest.mark.parametrize("ending", ["stop", "kill"])
@pytest.mark.parametrize("has_other", [True, False])
@pytest.mark.parametrize("new", [[], [b"new"]])
def test_old_messages_do_not_come_back(
    tmp_path: Path, ending: str, has_other: bool, new: list[bytes]
) -> None:
    """has_other: whether a queue has older messages, after which a start reads the log again."""
    store = open_store(tmp_path)
    if has_other:
        send(store, "other", b"x")
    send(store, "t", b"0", b"1", b"2")
    store.delete_topic("t")
    send(store, "t", *new)
    for _ in range(2):
        store.close() if ending == "stop" else crash(store)
        store = open_store(tmp_path)
        assert bodies(store, "t") == new
        assert store.queue("t", 0).next_offset == len(new)
        assert bodies(store, "other") == [b"x"] * has_other


def test_queues_that_were_removed_by_hand_come_back_without_deleted_topics(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    send(store, "other", b"x")
    send(store, "t", b"0", b"1")
    store.delete_topic("t")
    send(store, "other", b"y")
    store.close()
    shutil.rmtree(tmp_path / "consumequeue")
    store = open_store(tmp_path)
    assert bodies(store, "other") == [b"x", b"y"]
    assert not bodies(store, "t")


def test_deletions_end_with_the_log(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    send(store, "t", b"0")
    store.delete_topic("t")
    end = store.commit_log.max_offset
    store.close()
    path = tmp_path / "positions" / DELETIONS_NAME
    assert json.loads(path.read_text()) == {"t": end}
    # As if a power cut had taken records that were there at the deletion.
    path.write_text(json.dumps({"t": end + 1000}))
    store = open_store(tmp_path)
    assert json.loads(path.read_text()) == {"t": end}
    send(store, "t", b"new")
    crash(store)
    store = open_store(tmp_path)
    assert bodies(store, "t") == [b"new"]
    store.dispatcher.deletions.settle(end, store.commit_log.max_offset)
    assert json.loads(path.read_text()) == {}


@pytest.mark.parametrize("ending", ["stop", "kill"])
@pytest.mark.parametrize("texts", [[b"0"], [b"0", b"1"]])
def test_a_queue_that_a_power_cut_has_brought_back_is_removed(
    tmp_path: Path, ending: str, texts: list[bytes]
) -> None:
    folder, saved = tmp_path / "store", tmp_path / "saved"
    store = open_store(folder)
    send(store, "t", *texts)
    store.flusher.flush_now()
    shutil.copytree(folder / "consumequeue/t", saved)
    store.delete_topic("t")
    store.close() if ending == "stop" else crash(store)
    shutil.copytree(saved, folder / "consumequeue/t")
    for new in ([], [b"new"]):
        store = open_store(folder)
        assert not bodies(store, "t")
        send(store, "t", *new)
        assert bodies(store, "t") == new
        store.close() if ending == "stop" else crash(store)
    store = open_store(folder)
    assert bodies(store, "t") == [b"new"]
