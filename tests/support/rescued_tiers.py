"""Config files of brokers that don't run, and tiers with messages for them."""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from typing import Literal

import msgspec

from headrace_broker.settings.files import load_config
from headrace_broker.tiered.access.settings import TierSettings
from headrace_broker.tiered.container.flat_queue import SegmentLimits
from headrace_broker.tiered.container.location_mark import Mark, mark_path
from headrace_broker.tiered.container.stored_tier import Name
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_broker.tiered.rescue.restore import Restored, restore
from headrace_protocol.tier.driver import PutDriver
from headrace_protocol.tier.paths import Home
from tests.support.broker import BrokerUnderTest
from tests.support.object_tiers import HOME, append_next, open_objects_tier
from tests.support.stores import crash
from tests.support.tiers import TOPIC, append, open_tier, queue_of

Layout = Literal["posix", "file"]
QUEUES: dict[Name, int] = {(TOPIC, 0): 40, (TOPIC, 1): 25, ("other", 0): 7}
LIMITS = SegmentLimits(log_bytes=2000, units_bytes=200)


def write_config(root: Path, layout: Layout, home: Home = HOME, **more: object) -> Path:
    """The config file of a broker whose store is ``root``, with its tier in ``folder(root)``.

    more: settings by key of the file, which replace the others.
    """
    lines = {
        "brokerName": home.broker,
        "brokerClusterName": home.cluster,
        "storePathRootDir": root,
        "messageStorePlugIn": "tieredstore",
        "tieredBackendServiceProvider": layout,
        "tieredStoreFilePath": folder(root),
        "tieredStoreCommitLogMaxSize": LIMITS.log_bytes,
        "tieredStoreConsumeQueueMaxSize": LIMITS.units_bytes,
        "tieredStoreIndexFileMaxHashSlotNum": 13,
        "tieredStoreIndexFileMaxIndexNum": 50,
        "mappedFileSizeCommitLog": 1 << 20,
        "mappedFileSizeConsumeQueue": 20 * 30,
        **more,
    }
    path = root.with_name(f"{root.name}.conf")
    path.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    return path


def folder(root: Path) -> Path:
    """The location of the tier."""
    return root / "tier"


def settings_of(config: Path) -> TierSettings:
    """The settings of the tier in a config file."""
    read = load_config(config)[0]
    settings = read.tier_settings(read.store_path_root_dir, HOME)
    assert settings is not None
    return settings


def mark(root: Path, home: Home = HOME, id_: str = "0123456789abcdef") -> bytes:
    """Mark a tier as one of a store; returns the mark."""
    text = msgspec.json.encode(Mark(*home, id_))
    path = folder(root) / mark_path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return text


def fill(root: Path, layout: Layout) -> Path:
    """Fill a tier with ``QUEUES``; returns the config file of its broker."""
    if layout == "posix":
        tier = open_tier(root, limits=LIMITS)
        for (topic, queue_id), count in QUEUES.items():
            assert append(queue_of(tier, queue_id, topic), count) is None
        tier.sync()
        tier.close()
    else:
        fill_objects(PosixDriver(folder(root)))
    return write_config(root, layout)


def fill_objects(driver: PutDriver) -> None:
    """Fill a tier of objects with ``QUEUES``, in five uploads."""
    objects = open_objects_tier(driver)
    for number in range(5):
        counts = {name: count // 5 + (count % 5 > number) for name, count in QUEUES.items()}
        assert append_next(objects, counts) is None


def lose_disk(broker: BrokerUnderTest) -> Restored:
    """End a broker as a kill does, lose its store, and restore that from its tier."""
    assert broker.tier is not None
    settings = broker.tier.settings
    crash(broker.store)
    rmtree(settings.root)
    restored = restore(settings, broker.store.settings, broker.clock.now_ms())
    assert restored is not None
    return restored
