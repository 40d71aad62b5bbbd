"""Filters of consumers by tag.

The broker compares only hashes; consumers compare the tags. Source: docs/protocol.md "Pull".
"""

from __future__ import annotations

from headrace_protocol.bounds import SUBSCRIPTION_BYTES_MAX, check_text
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.java_hash import tags_code

TAG = "TAG"


def wanted_tags(subscription: str | None, expression_type: str | None) -> frozenset[int] | None:
    """Tags codes that a subscription accepts; None accepts every message.

    Raises RequestError for a type of expression that this broker can't evaluate, and for an
    expression that is too long.
    """
    check_text("subscription", subscription or "", SUBSCRIPTION_BYTES_MAX)
    if expression_type and expression_type != TAG:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The broker does not support consumer to filter message by {expression_type}; "
            "subscribe by tag",
        )
    tags = [tag.strip() for tag in (subscription or "").split("||")]
    wanted = frozenset(tags_code(tag) for tag in tags if tag)
    return None if "*" in tags or not wanted else wanted
