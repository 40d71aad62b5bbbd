"""The option ``schema`` runs no code that the environment of Spark's driver does not allow."""

from __future__ import annotations

import base64
import pickle
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

pytest.importorskip("pyspark")

from headrace.spark import model_schema
from headrace.spark.body.format import body_format
from headrace.spark.body.models import MODULES_VARIABLE, PICKLED_VARIABLE
from headrace.spark.errors import SchemaError
from headrace.spark.source import HeadraceSource


class Order(pydantic.BaseModel):
    number: int


class _Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PICKLED_VARIABLE, raising=False)
    monkeypatch.delenv(MODULES_VARIABLE, raising=False)


def read_with(schema: str) -> None:
    HeadraceSource({"topic": "T", "schema": schema}).schema()


@pytest.mark.parametrize("value", [None, "0", "", "true"])
def test_a_pickle_in_an_option_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is not None:
        monkeypatch.setenv(PICKLED_VARIABLE, value)
    trace = tmp_path / "trace"
    schema = "pydantic:" + base64.b64encode(pickle.dumps(_Touch(trace))).decode()
    with pytest.raises(SchemaError, match=rf"{PICKLED_VARIABLE}=1 in the environment"):
        read_with(schema)
    assert not trace.exists()
    monkeypatch.setenv(PICKLED_VARIABLE, "1")
    with pytest.raises(SchemaError, match="is not a pydantic model"):
        read_with(schema)
    assert trace.exists(), "the pickle does what it is said to do"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that can be imported, with a model in one of its modules."""
    folder = tmp_path / "abuse_shop"
    folder.mkdir()
    (folder / "__init__.py").touch()
    text = "import pydantic\nclass Order(pydantic.BaseModel):\n    number: int\n"
    (folder / "models.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "abuse_shop", None)
    monkeypatch.delitem(sys.modules, "abuse_shop")
    return "abuse_shop.models"


@pytest.mark.parametrize("listed", ["", "abuse", "abuse_shop.model", "abuse_shop.models.more", "*"])
def test_a_module_that_is_not_listed_is_not_imported(
    package: str, listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODULES_VARIABLE, listed)
    with pytest.raises(SchemaError, match=f"{MODULES_VARIABLE}={package} "):
        read_with(f"{package}:Order")
    assert package not in sys.modules
    assert "abuse_shop" not in sys.modules


@pytest.mark.parametrize("listed", ["abuse_shop.models", "abuse_shop", "json, abuse_shop ,"])
def test_a_listed_module_is(package: str, listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODULES_VARIABLE, listed)
    try:
        assert body_format(f" {package}:Order ", "json").names == ["number"]
    finally:
        sys.modules.pop(package, None)


def test_ddl_that_looks_like_a_path_needs_no_list() -> None:
    assert body_format("a:int", "json").names == ["a"]


def test_tasks_get_the_format_and_need_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PICKLED_VARIABLE, "1")
    made_on_the_driver = pickle.dumps(body_format(model_schema(Order), "json"))
    monkeypatch.delenv(PICKLED_VARIABLE)
    assert pickle.loads(made_on_the_driver).names == ["number"]
