"""The signature of requests by Apache RocketMQ's clients.

It has no time and no nonce, and leaves out the request's code: who reads a signed request can send
it again. Source: org.apache.rocketmq.acl.common.AclUtils; docs/security.md "Signatures".
"""

from __future__ import annotations

import base64
import hmac
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_protocol.frame import Buffer

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
# Clients of this version and before leave it out.
_UNIQUE_KEY: Final = "_UNIQUE_KEY_QUERY"
LAST_WITHOUT_UNIQUE_KEY: Final = 0


def signed_text(fields: Mapping[str, str], *, with_unique_key: bool = True) -> str:
    """The values of all fields but the signature, by name as Java orders strings."""
    left_out = {SIGNATURE} if with_unique_key else {SIGNATURE, _UNIQUE_KEY}
    names = sorted(fields.keys() - left_out, key=lambda name: name.encode("utf-16-be"))
    return "".join(fields[name] for name in names)


def sign(secret: str, fields: Mapping[str, str], body: Buffer = b"") -> str:
    """The signature of a request with its other fields, AccessKey among them."""
    made = hmac.new(secret.encode(), signed_text(fields).encode(), "sha1")
    made.update(body)
    return base64.b64encode(made.digest()).decode()
