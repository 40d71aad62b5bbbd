"""Keeps unused packages out of a daemon; the commands that run one import this module first.

structlog loads rich to colour tracebacks, and asyncio for calls of coroutines. Daemons format
tracebacks themselves and run on trio, so both are unused: an eighth of all modules, and 8 MB.
Programs that embed a broker may want both, and don't import this module.
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
