"""Imported first by the commands that run a daemon: keeps out of it what nothing in it uses.

structlog loads rich, if it is there, to colour tracebacks, which a daemon's log formats by itself,
and asyncio for calls of coroutines that no daemon makes: an eighth of all modules, and 8 MB. Not
for programs that embed a broker: they may want both.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final, cast

# What structlog finds; None: the package is not there.
_FOUND: Final = {"rich": None, "asyncio": ModuleType("asyncio")}

_modules = cast("dict[str, Any]", sys.modules)
_replaced = [name for name in _FOUND if name not in _modules]
_modules.update({name: _FOUND[name] for name in _replaced})
try:
    import structlog  # noqa: F401
finally:
    for _name in _replaced:
        del _modules[_name]
