"""Errors on the command line, and the command line of a daemon.

Exit codes: 0: done. 1: failed. 2: wrong usage. 3: not found or unreachable. 130: interrupted.
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
    """Escape the unprintable characters of a line, including line ends and tabs."""
    return text if text.isprintable() else "".join(map(escaped, text))


def warn(text: str) -> None:
    """Print one line on standard error."""
    sys.stderr.write(f"headrace: {clean(text)}\n")


def fail(text: str) -> None:
    """Print an error on standard error, as a line that begins in red on a terminal."""
    has_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    name = "\x1b[31mheadrace:\x1b[0m" if has_colour else "headrace:"
    sys.stderr.write(f"{name} {clean(text)}\n")


def report(
    error: BaseException,
    expected: tuple[type[Exception], ...],
    exit_code: Callable[[BaseException], int],
) -> int:
    """Print the causes of an error on standard error, a line each; returns the exit code.

    Raises ``error`` itself if one of its causes is not ``expected``.
    """
    causes = list(_leaves(error))
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return INTERRUPTED
    if all(isinstance(cause, BrokenPipeError) for cause in causes):
        # The reader of the output has closed it, as head does: no error to report.
        return FAILED
    if not all(isinstance(cause, expected) for cause in causes):
        raise error
    for text in dict.fromkeys(line for cause in causes for line in _lines(cause)):
        fail(text)
    return max(map(exit_code, causes))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def _lines(error: BaseException) -> list[str]:
    """The problems that an error lists, or its text."""
    return getattr(error, "problems", None) or [_text(error)]


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


# -- daemons ---------------------------------------------------------------------------------------


def daemon_parser(module: str, description: str, *, needs_config: bool) -> argparse.ArgumentParser:
    """The options of both daemons. module: the name after ``python -m``."""
    import argparse

    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument(
        "--config", "-c", type=Path, required=needs_config, help="file with key=value lines"
    )
    parser.add_argument(
        "--check-config", action="store_true", help="read the file, report its errors, and exit"
    )
    parser.add_argument(
        "--log-level",
        type=str.lower,
        choices=LOG_LEVELS,
        default="info",
        help="lowest level to log",
    )
    return parser


def run_daemon(
    serve: Callable[[], None],
    config_error: type[Exception],
    expected: tuple[type[Exception], ...],
) -> int:
    """Serve, and report a failure; returns the exit code.

    config_error: raised for unusable settings. expected: other errors of a failed start.
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
    """Occupy the descriptors of closed standard streams; a socket or store file would get them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
