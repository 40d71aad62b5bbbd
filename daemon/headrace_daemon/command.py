"""What a command line says about failures, and the command line of a daemon.

Exit codes: 0: done. 1: failed. 2: wrong usage. 3: not found, or not reachable. 130: interrupted.
143: terminated.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

FAILED: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
INTERRUPTED: Final = 130
TERMINATED: Final = 143

LOG_LEVELS: Final = ("debug", "info", "warning", "error")


def escaped(character: str) -> str:
    """A character, or its Python escape if it is unprintable."""
    return character if character.isprintable() else ascii(character)[1:-1]


def clean(text: str) -> str:
    """Escape what is unprintable in a line, line ends and tabs included."""
    return text if text.isprintable() else "".join(map(escaped, text))


def warn(text: str) -> None:
    """Print one line on standard error."""
    sys.stderr.write(f"headrace: {clean(text)}\n")


def report(
    error: BaseException,
    expected: tuple[type[Exception], ...],
    exit_code: Callable[[BaseException], int],
) -> int:
    """Say on standard error what went wrong, a line for each cause; returns the exit code.

    Raises ``error`` itself when it, or a part of it, is not ``expected``.
    """
    causes = list(_leaves(error))
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return INTERRUPTED
    if all(isinstance(cause, BrokenPipeError) for cause in causes):
        # Whoever read the output has enough, which is no news.
        return FAILED
    if not all(isinstance(cause, expected) for cause in causes):
        raise error
    for text in dict.fromkeys(map(_text, causes)):
        warn(text)
    return max(map(exit_code, causes))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


# -- daemons ---------------------------------------------------------------------------------------


def daemon_parser(module: str, description: str, *, needs_config: bool) -> argparse.ArgumentParser:
    """The options that both daemons take. module: what follows ``python -m``."""
    import argparse

    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument(
        "--config", "-c", type=Path, required=needs_config, help="file of lines key=value"
    )
    parser.add_argument(
        "--check-config", action="store_true", help="read the file, say what is wrong, and end"
    )
    parser.add_argument(
        "--log-level",
        type=str.lower,
        choices=LOG_LEVELS,
        default="info",
        help="log from this level on",
    )
    return parser


def run_daemon(
    serve: Callable[[], None],
    config_error: type[Exception],
    expected: tuple[type[Exception], ...],
) -> int:
    """Serve, and report a failure; returns the exit code.

    config_error: raised for settings that can't be used. expected: other errors of a failed start.
    """
    _open_closed_streams()
    try:
        serve()
    except (Exception, BaseExceptionGroup, KeyboardInterrupt) as error:  # noqa: BLE001 - reported or raised again
        return report(
            error,
            (config_error, OSError, *expected),
            lambda cause: USAGE if isinstance(cause, config_error) else _code_of(cause),
        )
    return 0


def _code_of(error: BaseException) -> int:
    return NOT_FOUND if isinstance(error, FileNotFoundError) else FAILED


def _open_closed_streams() -> None:
    """Take the numbers of closed standard streams; sockets or store files would get them else."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
