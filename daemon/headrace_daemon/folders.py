"""Checks of a daemon's folders before it starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def folder_problem(folder: Path) -> str | None:
    """The reason for which a daemon can't keep files in ``folder``; None if it can.

    A daemon creates a missing folder, but not its parent. This function creates nothing.
    """
    existing = folder if folder.exists() else folder.parent
    if not existing.is_dir():
        problem = "is not a directory" if existing.exists() else "does not exist"
        return f"{existing} {problem}: create it first"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"this user may not write to {existing}"
    return None
