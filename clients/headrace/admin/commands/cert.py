"""``headrace cert``: an authority and certificates for labs and tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.admin import options
from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = re.compile(r"[A-Za-z0-9_.-]+")

_folder = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("certificates"),
    show_default=True,
    metavar="DIR",
    help="Folder of the authority and its certificates.",
)


def _days(default: int) -> Callable[[options.Decorated], options.Decorated]:
    return click.option(
        "--days",
        type=click.IntRange(1, 36_500),
        metavar="DAYS",
        default=default,
        show_default=True,
        help="Days until the certificate expires.",
    )


@options.group("cert", "headrace cert make-ca", "headrace cert issue broker broker.example.org")
def command() -> None:
    """Make certificates for TLS, for labs and tests.

    The keys are not encrypted: whoever reads ca.key can pretend to be any of your servers.
    """


@command.subcommand("make-ca", "headrace cert make-ca --folder certificates")
@_folder
@_days(3650)
def make_ca(folder: Path, days: int) -> None:
    """Make an authority: ca.pem, which clients trust, and ca.key, which signs certificates."""
    from headrace.certificates import make_ca as make

    path = make(folder, days)
    sys.stderr.write(f"clients trust it with ca_file={path} or HEADRACE_TLS_CA={path}\n")


@command.subcommand(
    "issue",
    "headrace cert issue broker broker.example.org 10.0.0.7",
    "headrace cert issue alice",
)
@click.argument("name", metavar="NAME")
@click.argument("hosts", metavar="HOST...", nargs=-1)
@_folder
@_days(365)
def issue(name: str, hosts: tuple[str, ...], folder: Path, days: int) -> None:
    """Make the certificate of a server at HOSTs, or of a client without any: NAME.pem, NAME.key."""
    from headrace.certificates import issue as make

    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is not a name for files: use letters, digits, '.', '_' and '-'"
        )
    path = make(folder, name, hosts, days)
    if hosts:
        key = path.with_suffix(".key")
        sys.stderr.write(
            "for the file that tlsConfigFile names:\n"
            f"tls.server.certPath={path.absolute()}\ntls.server.keyPath={key.absolute()}\n"
        )
