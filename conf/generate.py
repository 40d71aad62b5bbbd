"""Generates what documents and samples take from the code's tables of settings and rights.

Run it after a change of a table: ``python -m conf.generate``. A test compares the files.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from conf.rights_table import with_table
from headrace_broker.settings.listing import settings
from headrace_nameserver.config import NameServerConfig

ROOT = Path(__file__).parents[1]

_CONFIGURATION = """\
# Configuration

`headrace broker -c FILE` and `headrace nameserver -c FILE` read files of `key=value` lines. Empty
lines and those that begin with `#` (for brokers also `!`) are skipped; a missing key has its
default. A wrong key, value or path stops the daemon before it touches any other file. The error
names the line and the expected value. Samples: [conf/broker.conf](../conf/broker.conf),
[conf/nameserver.conf](../conf/nameserver.conf).

`python -m conf.generate` generates this page from the tables in the code; a test compares them.

## Broker

Keys are those of Apache RocketMQ, so its `broker.conf` starts a headrace broker too. Keys that only
tune its threads, caches or optional services are accepted with a warning. Keys that require a
missing feature (a slave role, ACL 1.0, RocksDB, ...) are rejected unless they have Apache's
default.
**Live** settings can be changed while the broker runs, with `headrace broker config set` or any
client that sends UPDATE_BROKER_CONFIG; the file stays unchanged.

| key | type | default | live | meaning |
|---|---|---|---|---|
{broker_rows}

A store keeps the file sizes of its first start; the settings for these sizes can't change later.

## Nameserver

| key | default | meaning |
|---|---|---|
{nameserver_rows}
"""


def broker_conf() -> str:
    """conf/broker.conf."""
    parts = [
        "# Settings of a headrace broker, one key=value per line; missing keys have defaults.",
        "# Generated from broker/headrace_broker/config.py by conf/generate.py.",
    ]
    for setting in settings():
        notes = [setting.type, setting.unit, "reloadable" if setting.reloadable else ""]
        parts.append(f"\n# {setting.explanation}\n# ({', '.join(filter(None, notes))})")
        parts.append(f"#{setting.key}={setting.default or ''}")
    return "\n".join(parts) + "\n"


def nameserver_conf() -> str:
    """conf/nameserver.conf."""
    parts = [
        "# Settings of a headrace nameserver, one key=value per line; missing keys have defaults.",
        "# Generated from headrace_nameserver/config.py by conf/generate.py.",
    ]
    for key, default, explanation in _nameserver_settings():
        parts.append(f"\n# {explanation}\n#{key}={default}")
    return "\n".join(parts) + "\n"


def configuration_md() -> str:
    """docs/configuration.md."""
    broker_rows = [
        f"| `{row.key}` | {f'{row.type}, {row.unit}' if row.unit else row.type} | "
        f"{f'`{row.default}`' if row.default else ''} | {'yes' if row.reloadable else ''} | "
        f"{row.explanation} |"
        for row in settings()
    ]
    nameserver_rows = [
        f"| `{key}` | {f'`{default}`' if default else ''} | {explanation} |"
        for key, default, explanation in _nameserver_settings()
    ]
    return _CONFIGURATION.format(
        broker_rows="\n".join(broker_rows), nameserver_rows="\n".join(nameserver_rows)
    )


def security_md() -> str:
    """docs/security.md, of which one table is generated."""
    return with_table((ROOT / "docs/security.md").read_text())


def _nameserver_settings() -> list[tuple[str, str, str]]:
    """Key, default and meaning, from the struct and its docstring."""
    doc = inspect.getdoc(NameServerConfig) or ""
    joined = doc.replace("\n    ", " ")
    meanings = dict(line.split(": ", 1) for line in joined.splitlines() if ": " in line)
    defaults = NameServerConfig()
    return [
        (
            key,
            _text(getattr(defaults, name)),
            meanings[name],
        )
        for key, name in zip(
            NameServerConfig.__struct_encode_fields__,
            NameServerConfig.__struct_fields__,
            strict=True,
        )
    ]


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


FILES = {
    "conf/broker.conf": broker_conf,
    "conf/nameserver.conf": nameserver_conf,
    "docs/configuration.md": configuration_md,
    "docs/security.md": security_md,
}


def main() -> None:
    """Write all files."""
    for path, make in FILES.items():
        (ROOT / path).write_text(make())


if __name__ == "__main__":
    main()
