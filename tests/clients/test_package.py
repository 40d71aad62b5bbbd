"""The package's face: what it exports, and what importing it costs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import headrace


@pytest.mark.parametrize("name", headrace.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(headrace, name) is not None
    assert name in dir(headrace)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = headrace.nonsense


def test_embedded_is_the_function_even_after_an_import_of_its_module() -> None:
    importlib.import_module("headrace.embedded")
    assert callable(headrace.embedded)


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_next_to_nothing() -> None:
    heavy = {"trio", "anyio", "msgspec", "numpy", "pydantic", "click", "rich", "asyncio"}
    assert not heavy & loaded_by("import headrace")


def test_clients_load_no_broker_and_no_command_line() -> None:
    loaded = loaded_by("from headrace import Admin, Consumer, Producer, PullConsumer, blocking")
    heavy = {"headrace_broker", "headrace_nameserver", "numpy", "pyarrow", "click", "rich"}
    assert not heavy & loaded
