"""The table of settings as rows, for docs, samples and admin requests."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import SecretStr

from headrace_broker.config import BrokerConfig
from headrace_broker.settings.access import AccessFields
from headrace_broker.settings.audit import AuditFields
from headrace_broker.settings.pop import PopFields
from headrace_broker.settings.setting import extra_of, text_of
from headrace_broker.tiered.config import TierConfig


class Setting(NamedTuple):
    """A row of the table, for docs and samples. default: None if it depends on the host."""

    key: str
    type: str
    default: str | None
    unit: str
    reloadable: bool
    explanation: str


def settings() -> list[Setting]:
    """The whole table."""
    rows = []
    fields = BrokerConfig.model_fields
    parts = [
        *AccessFields.model_fields,
        *AuditFields.model_fields,
        *PopFields.model_fields,
        *TierConfig.model_fields,
    ]
    own = [name for name in fields if name not in parts]
    for field in (fields[name] for name in own + parts):
        extra = extra_of(field)
        assert field.alias is not None
        default = None if field.default_factory or field.default is None else text_of(field.default)
        rows.append(
            Setting(
                key=field.alias,
                type=_type_name(field.annotation),
                default=default,
                unit=extra["unit"],
                reloadable=extra["reloadable"],
                explanation=field.description or "",
            )
        )
    return rows


def _type_name(annotation: Any) -> str:
    names = {int: "number", bool: "true or false", str: "text", SecretStr: "text"}
    if annotation in names:
        return names[annotation]
    choices = getattr(annotation, "__args__", ())
    return (
        " or ".join(choices)
        if all(isinstance(choice, str) for choice in choices) and choices
        else "path"
    )


RELOADABLE = frozenset(setting.key for setting in settings() if setting.reloadable)
KEYS = [setting.key for setting in settings()]
