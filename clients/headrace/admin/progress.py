"""A progress bar on standard error, where that is a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(
    what: str, total: int | None, *, is_bytes: bool = True
) -> Iterator[Callable[[int], None]]:
    """A function that advances the bar by a number of bytes or things; total: None if unknown."""
    if not total or not sys.stderr.isatty():
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (DownloadColumn(), TransferSpeedColumn()) if is_bytes else (MofNCompleteColumn(),)
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
