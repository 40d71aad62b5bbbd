"""Imported first by the commands that run a daemon: keeps out of it what nothing in it uses.

structlog loads rich, if it is there, to colour tracebacks, which a daemon's log formats by itself:
an eighth of all modules, and 6 MB. Not for programs that embed a broker: they may want it.
"""

from __future__ import annotations

import sys
from typing import Any, cast

if "rich" not in sys.modules:
    _modules = cast("dict[str, Any]", sys.modules)
    _modules["rich"] = None
    try:
        import structlog  # noqa: F401 - loads without rich
    finally:
        del _modules["rich"]
