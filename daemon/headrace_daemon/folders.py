"""Whether a daemon can keep its files where its settings say, before it starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def why_no_files(folder: Path) -> str | None:
    """Why none can be kept in ``folder``, which a daemon makes, but not what it lies in.

    None if they can. Makes nothing.
    """
    place = folder if folder.exists() else folder.parent
    if not place.is_dir():
        problem = "is no directory" if place.exists() else "does not exist"
        return f"{place} {problem}: make it first"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"this user may not write to {place}"
    return None
