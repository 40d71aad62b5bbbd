"""Passwords that an operator gives to a command: from a prompt, a file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from headrace.errors import ConfigurationError
from headrace_protocol.drivers.files import NotPrivate, read_private

password_file = click.option(
    "--password-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with the password, of mode 0600. Default: a prompt, or the line on standard input.",
)


def read_password(user: str, file: Path | None) -> str:
    """The password of a user. Raises ConfigurationError, or OSError for the file."""
    if file is None and sys.stdin.isatty():
        return _ask(user)
    source = "standard input" if file is None else str(file)
    text = (sys.stdin.read() if file is None else _read(file)).removesuffix("\n")
    if not text.strip():
        raise ConfigurationError(f"{source} has no password for user {user}")
    if "\n" in text:
        raise ConfigurationError(f"{source} has several lines: a password is one line")
    return text


def _read(file: Path) -> str:
    try:
        return read_private(file).decode()
    except (NotPrivate, ValueError) as error:
        raise ConfigurationError(f"{error}") from error


def _ask(user: str) -> str:
    from getpass import getpass

    password = getpass(f"Password of {user}: ")
    if not password.strip():
        raise ConfigurationError("no password was given; nothing was changed")
    if getpass("Again: ") != password:
        raise ConfigurationError("the two passwords differ; nothing was changed")
    return password
