"""``headrace topic copy``, ``export`` and ``import``."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.admin import completion, options
from headrace.admin.output import print_record
from headrace.config import Settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_rate = click.option(
    "--rate",
    "per_second",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Maximum number of messages per second. Default: no limit.",
)
_file = click.argument("file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))


@options.command(
    "copy",
    "headrace topic copy orders orders-2026",
    "headrace topic copy orders orders --from old --to new --rate 5000",
)
@click.argument("source", metavar="SOURCE", shell_complete=completion.topics)
@click.argument("target", metavar="TARGET", shell_complete=completion.topics)
@click.option(
    "--from",
    "origin",
    metavar="CLUSTER",
    shell_complete=completion.contexts,
    help="Cluster of the source: a context, or nameserver addresses. Default: the one in use.",
)
@click.option(
    "--to",
    "destination",
    metavar="CLUSTER",
    shell_complete=completion.contexts,
    help="Cluster of the target. Default: the one in use.",
)
@click.option(
    "--group",
    metavar="GROUP",
    help="Group that keeps the progress, at the source. Default: copy_SOURCE_TARGET.",
)
@_rate
@options.as_json
def copy(
    source: str,
    target: str,
    origin: str | None,
    destination: str | None,
    group: str | None,
    per_second: float | None,
    *,
    as_json: bool,
) -> None:
    """Copy the messages that a topic holds now to another topic, which must exist.

    Keys, tags, properties and bodies stay; id and times of the originals become properties. A
    copy that is repeated continues where the last one ended.
    """
    from headrace.admin.copying import copy_topic
    from headrace.consumer.pull import PullConsumer
    from headrace.producer.producer import Producer

    if source == target and _servers(origin) == _servers(destination):
        raise click.UsageError("SOURCE and TARGET are the same topic; name another one, or --to")
    group = group or f"copy_{source}_{target}"
    consumer = PullConsumer(group, start="earliest", **_servers(origin))
    producer = Producer(**_servers(destination))
    work = partial(copy_topic, consumer, producer, source, target, per_second)
    _run(work, {"topic": source, "to": target}, as_json=as_json)
    sys.stderr.write(
        f"group {group} keeps the progress, and the log keeps what it has not copied; "
        f"`headrace group delete {group}` ends that\n"
    )


@options.command("export", "headrace topic export orders orders.jsonl")
@click.argument("topic", metavar="TOPIC", shell_complete=completion.topics)
@_file
@_rate
@options.answer
def export(
    topic: str, file: Path, per_second: float | None, nameserver: str | None, *, as_json: bool
) -> None:
    """Append the messages of a topic to a file, one JSON object a line, as `consume --json`.

    Messages that the file has already are not written again.
    """
    from headrace.admin.copying import export_topic
    from headrace.consumer.pull import PullConsumer

    consumer = PullConsumer(nameserver=nameserver, start="earliest")
    work = partial(export_topic, consumer, topic, file, per_second)
    _run(work, {"topic": topic, "to": str(file)}, as_json=as_json)


@options.command("import", "headrace topic import orders orders.jsonl")
@click.argument("topic", metavar="TOPIC", shell_complete=completion.topics)
@_file
@_rate
@options.answer
def import_(
    topic: str, file: Path, per_second: float | None, nameserver: str | None, *, as_json: bool
) -> None:
    """Send the messages of a file written by `topic export` or `consume --json` to a topic.

    The topic must exist. FILE.TOPIC.imported keeps the progress, so an import that is repeated
    continues where the last one ended.
    """
    from headrace.admin.copying import import_file
    from headrace.producer.producer import Producer

    work = partial(import_file, Producer(nameserver=nameserver), file, topic, per_second)
    _run(work, {"topic": topic, "from": str(file)}, as_json=as_json)


def _run(work: Callable[[], Awaitable[int]], record: dict[str, Any], *, as_json: bool) -> None:
    import trio

    started = time.monotonic()
    count = trio.run(work)
    seconds = round(time.monotonic() - started, 3)
    print_record({**record, "messages": count, "seconds": seconds}, as_json=as_json)


def _servers(cluster: str | None) -> dict[str, Any]:
    """Arguments of clients for a context, or for nameservers."""
    known = Settings.load().contexts.get(cluster) if cluster else None
    return known.arguments() if known else {"nameserver": cluster}
