"""One row of the table of settings."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def setting(
    default: Any,
    explanation: str,
    *,
    unit: str = "",
    reloadable: bool = False,
    key: str | None = None,
    **limits: int,
) -> Any:
    """One row of the table.

    reloadable: UPDATE_BROKER_CONFIG may change it while the broker runs.
    limits: ge and le, both included.
    """
    extra = {"unit": unit, "reloadable": reloadable}
    field: Any = Field
    if callable(default):
        return field(
            default_factory=default, description=explanation, alias=key, json_schema_extra=extra
        )
    return field(default, description=explanation, alias=key, json_schema_extra=extra, **limits)
