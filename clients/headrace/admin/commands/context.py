"""``headrace context``: names for clusters, kept in the user's config file."""

from __future__ import annotations

import re

import click

from headrace.accounts import Account
from headrace.admin import completion, options
from headrace.admin.failures import NotFound
from headrace.admin.output import print_rows
from headrace.config import Cluster, Settings, config_file, resolve_nameservers
from headrace.errors import ConfigurationError
from headrace_protocol.tls.settings import ClientTls

_FILE = click.Path(dir_okay=False, resolve_path=True)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@options.group("context", "headrace context use staging")
def command() -> None:
    """Name clusters, and choose the one that commands and clients use.

    A --nameserver or HEADRACE_NAMESERVER has precedence over the context in use.
    """


@command.subcommand(
    "add",
    "headrace context add local 127.0.0.1:9876",
    "headrace context add staging 'ns-1:9876;ns-2:9876'",
    "headrace context add production ns.example.org:9876 --ca-file ca.pem",
    "headrace context add production ns.example.org:9876 --user alice --password-file alice.pw",
    "headrace context add production ns.example.org:9876 --ca-file ca.pem --token-file /run/token",
)
@click.argument("name", metavar="NAME")
@click.argument("nameserver", metavar="HOST:PORT[;...]")
@click.option("--tls", is_flag=True, help="Connect with TLS; the other options mean so, too.")
@click.option(
    "--ca-file",
    type=_FILE,
    metavar="FILE",
    help="Authorities of the servers' certificates, PEM. Default: those of the system.",
)
@click.option("--cert-file", type=_FILE, metavar="FILE", help="Certificate to show, PEM, if any.")
@click.option("--key-file", type=_FILE, metavar="FILE", help="Its key, PEM.")
@click.option(
    "--server-name",
    metavar="NAME",
    help="Name that certificates must have. Default: the host of each address.",
)
@click.option("--user", metavar="NAME", help="User to log in as.")
@click.option(
    "--password-file",
    type=_FILE,
    metavar="FILE",
    help="File with the password, of mode 0600. Default: HEADRACE_PASSWORD_FILE.",
)
@click.option(
    "--token-file",
    type=_FILE,
    metavar="FILE",
    help="File with a token to log in by, of mode 0600, in place of a user; read for each log-in.",
)
def add(
    name: str,
    nameserver: str,
    *,
    tls: bool,
    **texts: str | None,
) -> None:
    """Name a cluster by its nameservers, or change them."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is not a name for a context: use letters, digits, '.', '_' and '-'"
        )
    addresses = ";".join(resolve_nameservers(nameserver))
    account = _account(*map(texts.pop, ("user", "password_file", "token_file")))
    settings = Settings.load()
    given = {key: value for key, value in texts.items() if value is not None}
    settings.contexts[name] = Cluster(
        addresses, ClientTls(**given) if tls or given else None, account
    )
    settings.save()


def _account(user: str | None, password_file: str | None, token_file: str | None) -> Account | None:
    if token_file is not None:
        if user is not None or password_file is not None:
            raise ConfigurationError("--token-file: a token names its user; leave out --user")
        account = Account(token_file=token_file)
        account.find()
        return account
    if user is None:
        if password_file is not None:
            raise ConfigurationError("--password-file needs --user NAME")
        return None
    account = Account(user, password_file=password_file)
    if password_file is not None:
        account.find()
    return account


@command.subcommand("use", "headrace context use staging")
@click.argument("name", metavar="NAME", shell_complete=completion.contexts)
def use(name: str) -> None:
    """Choose the cluster that commands and clients use from now on."""
    settings = Settings.load()
    _check_known(settings, name)
    settings.context = name
    settings.save()


@command.subcommand("remove", "headrace context remove staging")
@click.argument("name", metavar="NAME", shell_complete=completion.contexts)
def remove(name: str) -> None:
    """Forget the name of a cluster."""
    settings = Settings.load()
    _check_known(settings, name)
    del settings.contexts[name]
    if settings.context == name:
        settings.context = None
    settings.save()


def _check_known(settings: Settings, name: str) -> None:
    if name not in settings.contexts:
        raise NotFound(f"{config_file()} has no context {name}; see `headrace context list`")


@command.subcommand("list", "headrace context list", "headrace context list --json")
@options.as_json
def list_contexts(*, as_json: bool) -> None:
    """List the contexts, and the one in use."""
    settings = Settings.load()
    rows = [
        {
            "context": name,
            "in_use": name == settings.context,
            "nameserver": cluster.nameserver,
            "tls": cluster.tls is not None,
            "user": cluster.account.shown if cluster.account else None,
        }
        for name, cluster in sorted(settings.contexts.items())
    ]
    empty = f"no contexts in {config_file()}; add one with `headrace context add NAME HOST:PORT`"
    print_rows(rows, as_json=as_json, empty=empty)
