"""One row of the table of settings."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from pydantic import Field

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class Effect(Enum):
    """A running broker's work after a setting changed; others are read whenever they are needed."""

    RETENTION = auto()
    REGISTRATION = auto()


def setting(
    default: Any,
    explanation: str,
    *,
    unit: str = "",
    reloadable: bool = False,
    on_change: Effect | None = None,
    key: str | None = None,
    **limits: int,
) -> Any:
    """One row of the table.

    reloadable: UPDATE_BROKER_CONFIG may change it while the broker runs, as one with ``on_change``.
    limits: ge and le, both included.
    """
    is_reloadable = reloadable or on_change is not None
    extra = {"unit": unit, "reloadable": is_reloadable, "on_change": on_change}
    field: Any = Field
    if callable(default):
        return field(
            default_factory=default, description=explanation, alias=key, json_schema_extra=extra
        )
    return field(default, description=explanation, alias=key, json_schema_extra=extra, **limits)


def extra_of(field: FieldInfo) -> dict[str, Any]:
    """The contents of a row besides type, default and limits."""
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def text_of(value: Any) -> str:
    """A value as in a file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
