"""``headrace topic filter-check``: parses a SQL92 filter, and tries it on the last messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, options
from headrace.admin.output import print_record
from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.received import ReceivedMessage
    from headrace_protocol.filters.expression import Expression


@options.command(
    "filter-check",
    'headrace topic filter-check "price > 5 AND region IS NOT NULL"',
    'headrace topic filter-check "price > 5" --topic orders --tail 1000',
)
@click.argument("condition", metavar="CONDITION")
@click.option(
    "--topic", metavar="TOPIC", shell_complete=completion.topics, help="Try it on this topic."
)
@click.option(
    "--tail",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="MESSAGES",
    help="How many of the topic's last messages.",
)
@options.allow_partial
@options.answer
@click.pass_obj
def filter_check(
    patience: options.Patience,
    condition: str,
    topic: str | None,
    tail: int,
    nameserver: str | None,
    *,
    allow_partial: bool,
    as_json: bool,
) -> None:
    """Check a SQL92 filter, and how many of a topic's last messages pass.

    A property that is missing, or no number where one is needed, keeps a message from passing.
    """
    expression = _compiled(condition)
    found: dict[str, Any] = {"filter": condition, "properties": sorted(expression.names)}
    if topic is not None:
        from headrace.admin.commands.consume import last_messages

        messages = last_messages(topic, tail, nameserver, patience, allow_partial=allow_partial)
        found |= _tried(expression, topic, messages)
    print_record(found, as_json=as_json)


def _compiled(condition: str) -> Expression:
    """Raises ConfigurationError with the place of what is wrong."""
    from headrace_protocol.filters.expression import compiled
    from headrace_protocol.filters.tokens import FilterError

    try:
        return compiled(condition)
    except FilterError as error:
        raise ConfigurationError(str(error)) from None


def _tried(expression: Expression, topic: str, messages: list[ReceivedMessage]) -> dict[str, Any]:
    rows = [message.stored.properties for message in messages]
    missing = {name: sum(name not in row for row in rows) for name in sorted(expression.names)}
    return {
        "topic": topic,
        "messages": len(rows),
        "passing": sum(map(expression.matches, rows)),
        "missing": {name: count for name, count in missing.items() if count},
    }
