"""Files that follow tables: at once, or from a thread, many changes in one write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from headrace_broker.persistence import SavedFile, TableText, field_text, file_text
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.filesystem import Files
from headrace_protocol import fastjson
from headrace_protocol.bodies import TopicConfig
from tests.support.running import in_background


class SlowFiles(Files):
    """Counts writes, and makes them wait or fail when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[int] = []
        self.may_write = threading.Event()
        self.may_write.set()
        self.problem: OSError | None = None

    def write(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        self.may_write.wait()
        if self.problem is not None:
            raise self.problem
        self.writers.append(threading.get_ident())
        super().write(descriptor, data, position)


class Table:
    """A number, which is all that the file holds."""

    def __init__(self, folder: Path) -> None:
        self.files = SlowFiles()
        self.file = ConfigFile(folder / "table.json", self.files)
        self.value = 0
        self.saved = SavedFile(self.file, self._snapshot)

    def _snapshot(self) -> Callable[[], bytes]:
        value = self.value
        return lambda: b'{"value":%d}' % value

    def change(self) -> None:
        self.value += 1
        self.saved.changed()

    def on_disk(self) -> int:
        return int(fastjson.loads(self.file.path.read_bytes())["value"])


@pytest.fixture
def a_table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_without_a_loop_a_change_is_written_at_once(a_table: Table) -> None:
    a_table.change()
    assert a_table.on_disk() == 1
    told: list[Exception | None] = []
    a_table.saved.when_saved(told.append)
    assert told == [None]


async def test_a_burst_of_changes_is_few_writes_in_a_thread(a_table: Table) -> None:
    told: list[tuple[int, Exception | None]] = []
    async with in_background(a_table.saved.run):
        await trio.testing.wait_all_tasks_blocked()
        a_table.files.may_write.clear()
        for _ in range(1000):
            a_table.change()
            await trio.lowlevel.checkpoint()
        a_table.saved.when_saved(lambda error: told.append((a_table.on_disk(), error)))
        assert not told
        a_table.files.may_write.set()
        await a_table.saved.wait_saved()
    assert told == [(1000, None)]
    assert len(a_table.files.writers) == 2
    assert threading.get_ident() not in a_table.files.writers


async def test_a_failure_is_told_and_tried_again(
    a_table: Table,
) -> None:
    a_table.saved.retry_s = 0.001
    told: list[Exception | None] = []
    a_table.files.problem = full = OSError(28, "No space left on device")
    async with in_background(a_table.saved.run):
        await trio.testing.wait_all_tasks_blocked()
        a_table.change()
        a_table.saved.when_saved(told.append)
        await a_table.saved.wait_saved()
        assert told == [full]
        a_table.files.problem = None
        with trio.fail_after(5):
            while not a_table.files.writers:  # noqa: ASYNC110 - the file tells nobody
                await trio.sleep(0.001)
        await a_table.saved.wait_saved()
        assert a_table.on_disk() == 1


async def test_what_was_not_written_is_written_at_the_end(a_table: Table) -> None:
    async with in_background(a_table.saved.run):
        await trio.testing.wait_all_tasks_blocked()
        a_table.change()
    a_table.saved.finish()
    assert a_table.on_disk() == 1
    writes = len(a_table.files.writers)
    a_table.saved.finish()
    assert len(a_table.files.writers) == writes


names = st.sampled_from(["a", "b", "%RETRY%c", 'd"e', "ü"])
tables = st.dictionaries(
    names,
    st.builds(
        TopicConfig,
        topic_name=names,
        perm=st.integers(0, 7),
        attributes=st.dictionaries(names, names, max_size=2),
    ),
)


@given(st.lists(tables, max_size=4))
def test_a_table_is_written_as_if_it_were_written_anew(
    changes: list[dict[str, TopicConfig]],
) -> None:
    text = TableText()
    table: dict[str, TopicConfig] = {}
    for change in changes:
        table = {name: topic for name, topic in table.items() if name not in change} | change
        written = fastjson.loads(file_text({"topics": text.text(table)}))
        assert written == fastjson.loads(fastjson.dumps({"topics": table}))


def test_a_file_looks_as_the_peer_writes_it() -> None:
    table = {"t": TopicConfig(topic_name="t", attributes={"a": "b"}), "u": TopicConfig()}
    expected = fastjson.dumps({"numbers": [1, 2], "topics": table}, pretty=True)
    assert file_text({"numbers": field_text([1, 2]), "topics": TableText().text(table)}) == expected
    assert file_text({"topics": TableText().text({})}) == b'{\n\t"topics":{}\n}'
