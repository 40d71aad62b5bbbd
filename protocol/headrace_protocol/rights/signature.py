"""The signature of requests by Apache RocketMQ's clients.

It has no time and no nonce, and leaves out the request's code: who reads a signed request can send
it again.
Source: org.apache.rocketmq.acl.common.AclUtils; docs/protocol.md "Signatures and denials".
"""

from __future__ import annotations

import binascii
import hmac
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_protocol.frame import Buffer

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
# Clients of this version (4.9.3) and before leave it out.
_UNIQUE_KEY: Final = "_UNIQUE_KEY_QUERY"
_LAST_WITHOUT_UNIQUE_KEY: Final = 399
# Apache RocketMQ's requests have up to 25 fields; more would take long to put in order.
_FIELDS_MAX: Final = 128
# The requests of clients have few sets of fields; names may be as long as a header.
_ORDERS_MAX: Final = 64
# The copy of a larger body would take longer than the digest in two parts.
_JOINED_BYTES_MAX: Final = 32 * 1024


def signed_text(fields: Mapping[str, str], *, with_unique_key: bool = True) -> str:
    """The values of all fields but the signature, by name as Java orders strings."""
    order = _order(tuple(fields), with_unique_key)
    return "".join([fields[name] for name in order])


@lru_cache(_ORDERS_MAX)
def _order(names: tuple[str, ...], with_unique_key: bool) -> list[str]:
    left_out = {SIGNATURE} if with_unique_key else {SIGNATURE, _UNIQUE_KEY}
    return sorted({*names} - left_out, key=lambda name: name.encode("utf-16-be", "surrogatepass"))


def sign(
    secret: str, fields: Mapping[str, str], body: Buffer = b"", *, with_unique_key: bool = True
) -> str:
    """The signature of a request with its other fields, AccessKey among them."""
    text = signed_text(fields, with_unique_key=with_unique_key)
    return _signature(secret, text, body).decode("ascii")


def is_signed(secret: str, fields: Mapping[str, str], body: Buffer, version: int) -> bool:
    """True if a request has the signature of ``secret``. version: of the client."""
    if len(fields) > _FIELDS_MAX:
        return False
    with_unique_key = version > _LAST_WITHOUT_UNIQUE_KEY
    text = signed_text(fields, with_unique_key=with_unique_key)
    return is_signature(fields.get(SIGNATURE, ""), secret, text, body)


def is_signature(signature: str, secret: str, text: str, body: Buffer) -> bool:
    """True if it is that of a text and a body. Takes 3 µs for 1 KiB."""
    expected = _signature(secret, text, body)
    return hmac.compare_digest(expected, signature.encode("utf-8", "replace"))


def _signature(secret: str, text: str, body: Buffer) -> bytes:
    key, data = secret.encode(), text.encode("utf-8", "replace")
    if len(body) <= _JOINED_BYTES_MAX:
        digest = hmac.digest(key, b"".join((data, body)), "sha1")
    else:
        parts = hmac.new(key, data, "sha1")
        parts.update(body)
        digest = parts.digest()
    return binascii.b2a_base64(digest, newline=False)
