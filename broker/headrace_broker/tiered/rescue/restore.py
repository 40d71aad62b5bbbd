"""``headrace tier restore``: a broker that lost its disk continues on its tier.

Queues continue at their end in the tier: their ConsumeQueues have blank units up to there, and the
log begins past the physical offset that these name. All is made in a folder inside the store and
then moved, tables last, so a command that was cut short is run again.
"""

from __future__ import annotations

from dataclasses import replace
from shutil import rmtree
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from headrace_broker.store.errors import StoreError
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.queues.consume_queue import BLANK_SIZE, ConsumeQueue
from headrace_broker.tiered.access.drivers import mark_file
from headrace_broker.tiered.access.lives import LIVES_FILE, Lives
from headrace_broker.tiered.access.saved_tables import (
    INCARNATIONS_FILE,
    Owner,
    SavedTables,
    ids_in,
    owner_file,
    read_tables,
)
from headrace_broker.tiered.container.location_mark import read_mark
from headrace_broker.tiered.objects.object_tier import ObjectTier
from headrace_broker.tiered.rescue.listing import open_driver, require
from headrace_broker.tiered.rescue.rebuild import locked, rebuild_files
from headrace_protocol.bodies import (
    ConsumerOffsetSerializeWrapper,
    TopicConfig,
    TopicConfigSerializeWrapper,
)
from headrace_protocol.message import BLANK_RECORD, MAGIC_BLANK
from headrace_protocol.tier.driver import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace_broker.store.settings import StoreSettings
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.container.stored_tier import Name, StoredTier

_BUILT: Final = "restore.unfinished"
_DONE: Final = "built"
# What a start must not see without the rest is last.
_MOVED: Final = ("commitlog", "consumequeue", "tiered_index_file", "config")
# Saved as they fit the tier's queues.
_ADAPTED: Final = {"topics.json", "consumerOffset.json"}


class Restored(NamedTuple):
    """The contents that a store was given. problems: what is missing in it."""

    tier: StoredTier
    topic_count: int
    problems: list[str]


def restore(settings: TierSettings, sizes: StoreSettings, now_ms: int) -> Restored | None:
    """Fill an empty store; None if an earlier call had done so, but for moving it in place.

    Raises StoreError for a store that isn't empty and for a tier without messages; StoreLocked;
    OSError.
    """
    root = settings.root
    built, fs = root / _BUILT, Files()
    with locked(root):
        restored = None
        if not (built / _DONE).exists():
            _check_empty(settings)
            if built.exists():
                rmtree(built)
            built.mkdir()
            restored = _build(replace(settings, root=built), replace(sizes, root=built), now_ms)
            fs.fsync_directory(built)
            (built / _DONE).touch()
        for name in _MOVED:
            if (built / name).exists():
                fs.rename(built / name, root / name)
        fs.sync_names()
        rmtree(built)
    return restored


def _check_empty(settings: TierSettings) -> None:
    root = settings.root
    spared = {root / "lock", root / _BUILT, settings.folder}
    found = sorted(path.name for path in root.iterdir() if path not in spared)
    if found:
        raise StoreError(
            f"{root} is not empty, it has {', '.join(found[:3])}: move it away, or set "
            "storePathRootDir to a new directory"
        )


def _build(settings: TierSettings, sizes: StoreSettings, now_ms: int) -> Restored:
    tier, tables, problems = _read_tier(settings, now_ms)
    config = sizes.root / "config"
    texts = dict(tables.files) if tables is not None else {}
    for name in texts.keys() - _ADAPTED:
        ConfigFile(config / name).save(texts[name].encode())
    over = _over(config, texts)
    ends = {name: queue.commit_offset for name, queue in tier.queues.items() if name[0] not in over}
    fs = Files()
    for (topic, queue_id), end in ends.items():
        if end:
            folder = sizes.root / "consumequeue" / topic / str(queue_id)
            queue = ConsumeQueue(folder, sizes.consume_queue_file_bytes, fs)
            queue.put(end - 1, 0, BLANK_SIZE, 0)
            queue.start_flush()()
            queue.unmap()
    fs.sync_names()
    _write_log(sizes)
    topics = _topics(texts.get("topics.json", ""), ends)
    ConfigFile(config / "topics.json").save(topics.encode())
    offsets = _offsets(texts.get("consumerOffset.json", ""), ends)
    ConfigFile(config / "consumerOffset.json").save(offsets.encode())
    mark = read_mark(open_driver(settings), settings.home)
    if not isinstance(mark, Failure):
        mark_file(sizes.root).save(mark)
    if tables is not None:
        owner_file(sizes.root).save(msgspec.json.encode(Owner(tables.store)))
    return Restored(tier, len(topics.topic_config_table), problems)


def _read_tier(
    settings: TierSettings, now_ms: int
) -> tuple[StoredTier, SavedTables | None, list[str]]:
    """All queues, and the tables if there are any."""
    problems: list[str] = []
    driver = open_driver(settings)
    if settings.keeps_objects:
        require(ObjectTier(driver, settings.home).look())
        tier: StoredTier = ObjectTier(driver, settings.home)
        # From here on a broker that still runs uploads nothing more.
        require(tier.start(now_ms))
    else:
        rebuilt = rebuild_files(driver, settings, now_ms)
        tier, problems = rebuilt.tier, rebuilt.problems
    tables = read_tables(driver, settings.home)
    if isinstance(tables, SavedTables):
        return tier, tables, problems
    if tables.kind is FailureKind.UNREACHABLE:
        require(tables)
    if not tier.queues:
        raise StoreError(f"the tier has no messages of {settings.home.broker}: nothing to restore")
    problem = f"no groups, settings of topics and consumer offsets: {tables}"
    return tier, None, [*problems, problem]


def _over(config: Path, texts: Mapping[str, str]) -> set[str]:
    """Topics of which the tier has an earlier life; the broker's start deletes it."""
    ids = ids_in(texts, INCARNATIONS_FILE)
    return Lives(ConfigFile(config / LIVES_FILE), ids.get, lambda _topic: False).over()


def _write_log(sizes: StoreSettings) -> None:
    """A log without records past physical offset 0, which the blank units name.

    Its file is blank to the end: a start deletes files that begin at the end of the log.
    """
    folder = sizes.root / "commitlog"
    folder.mkdir()
    with (folder / f"{sizes.commit_log_file_bytes:020}").open("wb") as file:
        file.write(BLANK_RECORD.pack(sizes.commit_log_file_bytes, MAGIC_BLANK))
        file.truncate(sizes.commit_log_file_bytes)
    Files().fsync_directory(folder)


def _topics(text: str, ends: Mapping[Name, int]) -> TopicConfigSerializeWrapper:
    """The topics that were saved, with as many queues as the tier has."""
    saved = (
        TopicConfigSerializeWrapper.decode(text.encode()) if text else TopicConfigSerializeWrapper()
    )
    table = dict(saved.topic_config_table)
    for topic, queue_id in ends:
        known = table.get(topic)
        count = queue_id + 1
        if known is None:
            known = TopicConfig(topic_name=topic, read_queue_nums=count, write_queue_nums=count)
        if known.read_queue_nums < count:
            known = msgspec.structs.replace(known, read_queue_nums=count)
        table[topic] = known
    return msgspec.structs.replace(saved, topic_config_table=table)


def _offsets(text: str, ends: Mapping[Name, int]) -> ConsumerOffsetSerializeWrapper:
    """Progress of groups, none past the end of its queue: new messages get these offsets again."""
    if not text:
        return ConsumerOffsetSerializeWrapper()
    saved = ConsumerOffsetSerializeWrapper.decode(text.encode())

    def within(table: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
        return {
            key: {
                queue_id: min(offset, ends.get((key.partition("@")[0], queue_id), 0))
                for queue_id, offset in offsets.items()
            }
            for key, offsets in table.items()
        }

    return msgspec.structs.replace(
        saved,
        offset_table=within(saved.offset_table),
        pull_offset_table=within(saved.pull_offset_table),
    )
