"""Filters of consumers: by tag, or by SQL92 on properties.

Of tags the broker compares only hashes; consumers compare the tags. Source: docs/protocol.md
"Pull" and "SQL92 filters".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from headrace_protocol.bounds import SUBSCRIPTION_BYTES_MAX, check_text
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.java_hash import tags_code

if TYPE_CHECKING:
    from headrace_protocol.filters.expression import Expression

TAG = "TAG"
SQL92 = "SQL92"
_TAG_BYTES: Final = 128
_FEW_TAGS: Final = 8
# What a FilteredReader keeps of the records that it has judged.
_JUDGED_BYTES: Final = 4096
_OPERAND_BYTES: Final = 1024
# Bytes per character of a filter's text: a list of short texts has an object for each.
_TEXT_FACTOR: Final = 32


class FilterPolicy(Protocol):
    """Settings of the broker about filters."""

    enable_property_filter: bool
    filter_support_retry: bool
    max_filter_message_size: int


class Filter(NamedTuple):
    """The messages that a consumer wants. tags: wanted tags codes; None for all."""

    tags: frozenset[int] | None
    expression: Expression | None = None


def wanted_tags(subscription: str | None) -> frozenset[int] | None:
    """Tags codes that a list of tags accepts; None accepts every message.

    Raises RequestError for a list that is too long.
    """
    check_text("subscription", subscription or "", SUBSCRIPTION_BYTES_MAX)
    tags = [tag.strip() for tag in (subscription or "").split("||")]
    wanted = frozenset(tags_code(tag) for tag in tags if tag)
    return None if "*" in tags or not wanted else wanted


def is_by_tag(expression_type: str | None) -> bool:
    """True for a subscription that lists tags."""
    return not expression_type or expression_type == TAG


def filter_of(
    subscription: str | None, expression_type: str | None, policy: FilterPolicy
) -> Filter:
    """The filter of a subscription. Raises RequestError for one that can't be evaluated."""
    if is_by_tag(expression_type):
        return Filter(wanted_tags(subscription))
    if expression_type != SQL92 or not policy.enable_property_filter:
        shown = expression_type if expression_type == SQL92 else repr(expression_type)[:100]
        remedy = "set enablePropertyFilter=true" if expression_type == SQL92 else f"use {SQL92}"
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The broker does not support consumer to filter message by {shown}: "
            f"{remedy}, or subscribe by tag",
        )
    return Filter(None, sql_expression(subscription))


def filter_bytes(wanted: Filter) -> int:
    """Memory of a filter beyond the few tags that most have."""
    tags_bytes = _TAG_BYTES * max(0, len(wanted.tags or ()) - _FEW_TAGS)
    expression = wanted.expression
    if expression is None:
        return tags_bytes
    text_bytes = _TEXT_FACTOR * len(expression.text)
    return _JUDGED_BYTES + _OPERAND_BYTES * expression.operand_count + text_bytes


def sql_expression(text: str | None) -> Expression:
    """A SQL92 filter. Raises RequestError with the place of what is wrong in it."""
    from headrace_protocol.filters.expression import compiled
    from headrace_protocol.filters.tokens import FilterError

    try:
        return compiled(text or "")
    except FilterError as error:
        raise RequestError(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"parse the consumer's subscription failed: {error}",
        ) from None
