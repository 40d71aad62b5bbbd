"""One row of the table of settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def setting(
    default: Any,
    explanation: str,
    *,
    unit: str = "",
    reloadable: bool = False,
    is_secret: bool = False,
    key: str | None = None,
    **limits: int,
) -> Any:
    """One row of the table.

    reloadable: UPDATE_BROKER_CONFIG may change it while the broker runs.
    is_secret: nobody is shown the value.
    limits: ge and le, both included.
    """
    extra = {"unit": unit, "reloadable": reloadable, "is_secret": is_secret}
    field: Any = Field
    if callable(default):
        return field(
            default_factory=default, description=explanation, alias=key, json_schema_extra=extra
        )
    return field(default, description=explanation, alias=key, json_schema_extra=extra, **limits)


def is_secret(field: FieldInfo) -> bool:
    """Whether a row's value is a secret."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("is_secret"))
