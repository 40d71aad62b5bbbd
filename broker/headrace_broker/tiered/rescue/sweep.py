"""``headrace tier sweep``: deletes what nothing names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.store.errors import StoreError
from headrace_broker.tiered.access.tier_access import metadata_path
from headrace_broker.tiered.container.metadata import TierMetadata
from headrace_broker.tiered.objects.object_tier import ObjectTier, is_old
from headrace_broker.tiered.rescue.listing import (
    FileListing,
    list_objects,
    open_driver,
    require,
)
from headrace_broker.tiered.rescue.rebuild import locked
from headrace_protocol.tier.driver import Entry

if TYPE_CHECKING:
    from headrace_broker.tiered.access.settings import TierSettings


def sweep(settings: TierSettings, now_ms: int, *, deletes: bool) -> list[Entry]:
    """The files and objects that nothing names, which are deleted if ``deletes``.

    Raises StoreError without metadata or manifest, since all would be leftovers; StoreLocked.
    """
    if settings.keeps_objects:
        return _sweep_objects(settings, now_ms, deletes)
    with locked(settings.root):
        return _sweep_files(settings, deletes)


def _sweep_files(settings: TierSettings, deletes: bool) -> list[Entry]:
    driver, path = open_driver(settings), metadata_path(settings.root)
    listing = FileListing(settings.home, TierMetadata(path), driver)
    if listing.unnamed and not listing.names:
        raise StoreError(
            f"{path} names no queue, so all messages would be leftovers: run headrace tier rebuild"
        )
    if deletes:
        require(driver.delete([entry.path for entry in listing.unnamed]))
    return listing.unnamed


def _sweep_objects(settings: TierSettings, now_ms: int, deletes: bool) -> list[Entry]:
    """A running broker may name what it has put a moment ago, but nothing that is a day old."""
    driver = open_driver(settings)
    tier = ObjectTier(driver, settings.home)
    sizes = list_objects(driver, tier.folder)
    # After the listing: what was named meanwhile stays.
    require(tier.look())
    named = tier.named()
    names = [name for name in sizes if name not in named and is_old(name, now_ms)]
    found = [Entry(tier.reader.path(name), sizes[name]) for name in names]
    if deletes:
        require(driver.delete([entry.path for entry in found]))
    return found
