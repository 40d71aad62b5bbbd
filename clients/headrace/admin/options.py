"""Options and help texts shared by many commands."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import click

from headrace_daemon.command import LOG_LEVELS, clean

# A function that becomes a command, as click.option takes and returns it.
Decorated = TypeVar("Decorated", bound=Callable[..., Any] | click.Command)


class Patience(NamedTuple):
    """The time that a command gives brokers which do not answer.

    give_up_s: until their messages are reported as unreadable. pause_s: between two questions.
    """

    give_up_s: float = 10.0
    pause_s: float = 1.0


PATIENCE = Patience()


class _Common:
    """What commands and groups share."""

    def get_short_help_str(self, limit: int = 0) -> str:  # noqa: ARG002
        """The first sentence of the help, which click would cut off at ``limit``."""
        text: str = super().get_short_help_str(sys.maxsize)  # type: ignore[misc]
        return text

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reject an option that is given twice; click would drop the first value."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))  # type: ignore[attr-defined]
        values = Counter(each for each in given if _takes_one_value(each))
        for option, count in values.items():
            if count > 1:
                ctx.fail(f"{option.opts[0]} is given {count} times; it takes one value")
        return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]


def _takes_one_value(parameter: click.Parameter) -> bool:
    if not isinstance(parameter, click.Option):
        return False
    return not (parameter.multiple or parameter.is_flag or parameter.count)


class Command(_Common, click.Command):
    """A command of ``headrace``."""


class Group(_Common, click.Group):
    """A command with subcommands."""

    command_class = Command

    def subcommand(
        self, name: str, *examples: str
    ) -> Callable[[Callable[..., Any]], click.Command]:
        """As ``command``, and adds it to the group."""
        return self.command(name, epilog=_epilog(examples))


def command(name: str, *examples: str) -> Callable[[Callable[..., Any]], Command]:
    """As click.command. examples: lines of a shell, for its help."""
    return click.command(name, cls=Command, epilog=_epilog(examples))


def group(
    name: str, *examples: str, invoke_without_command: bool = False
) -> Callable[[Callable[..., Any]], Group]:
    """As click.group. examples: as those of ``command``."""
    return click.group(
        name,
        cls=Group,
        epilog=_epilog(examples),
        invoke_without_command=invoke_without_command,
    )


def _epilog(examples: Sequence[str]) -> str:
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in examples)))


class _Text(click.types.StringParamType):
    """Text, not the bytes of another encoding, which Python passes on as lone surrogates."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text: str = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!a} is not valid UTF-8", param, ctx)
        return text


class _Bytes(click.ParamType[bytes]):
    """Any bytes; text is in UTF-8."""

    name = "text"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,  # noqa: ARG002
        ctx: click.Context | None,  # noqa: ARG002
    ) -> bytes:
        return value if isinstance(value, bytes) else str(value).encode(errors="surrogateescape")


BYTES = _Bytes()


def check_texts(command: click.Command) -> None:
    """Let a command and its subcommands refuse texts in another encoding than UTF-8."""
    for param in command.params:
        if param.type is click.STRING:
            param.type = _Text()
    if isinstance(command, click.Group):
        for each in command.commands.values():
            check_texts(each)


nameserver = click.option(
    "--nameserver",
    "-n",
    metavar="HOST:PORT[;...]",
    help="Nameserver addresses. Default: HEADRACE_NAMESERVER, then the context in use (see "
    "`headrace context`), then 127.0.0.1:9876.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def answer(function: Decorated) -> Decorated:
    """The options of a command that asks a cluster: where, and the form of the answer."""
    return as_json(nameserver(function))


system = click.option("--system", is_flag=True, help="Include the brokers' own ones.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
check_config = click.option(
    "--check-config", is_flag=True, help="Check the file, report errors and exit."
)
port = click.IntRange(0, 65535)


allow_partial = click.option(
    "--allow-partial",
    is_flag=True,
    help="Accept a part, with a warning, while a broker that has the rest is away.",
)


def max_count(what: str) -> Callable[[Decorated], Decorated]:
    """The option ``--max``: the number of things to list."""
    return click.option(
        "--max",
        "count",
        type=click.IntRange(1, 10_000),
        default=32,
        show_default=True,
        metavar="N",
        help=f"Maximum number of {what}.",
    )


def log_level(default: str) -> Callable[[Decorated], Decorated]:
    """The option ``--log-level`` of a daemon."""
    return click.option(
        "--log-level",
        type=click.Choice(LOG_LEVELS, case_sensitive=False),
        default=default,
        show_default=True,
        metavar="LEVEL",
        help=f"Minimum level of log lines: {', '.join(LOG_LEVELS)}.",
    )


def pairs(texts: Sequence[str], what: str) -> dict[str, str]:
    """``NAME=VALUE`` arguments as a dictionary. Raises ConfigurationError.

    what: the kind of pair in an error.
    """
    from headrace.errors import ConfigurationError

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigurationError(f"{what} {text!r}: write NAME=VALUE")
        found[name] = value
    return found


def confirm(deletion: str, *, yes: bool) -> None:
    """Ask before something is deleted, unless ``yes``. Raises CommandFailed if the answer is no.

    Raises ConfigurationError if standard input is not a terminal.
    """
    if yes:
        return
    from headrace.admin.failures import CommandFailed
    from headrace.errors import ConfigurationError

    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"{deletion}: standard input is not a terminal to confirm this on; add --yes"
        )
    sys.stderr.write(f"{clean(deletion)}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise CommandFailed("not confirmed, nothing was deleted")
