"""The user that a client's certificate names. Source: docs/security.md "Users"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Mapping

_URI: Final = "headrace:user/"


def user_of(certificate: Mapping[str, Any]) -> str | None:
    """The user's name: of a URI ``headrace:user/NAME``, else the common name.

    certificate: verified, as ``getpeercert`` returns it. None for one that names nobody, or more
    than one.
    """
    alternatives = certificate.get("subjectAltName", ())
    names = [
        unquote(value[len(_URI) :])
        for kind, value in alternatives
        if kind == "URI" and value.startswith(_URI)
    ]
    if not names:
        fields = [field for group in certificate.get("subject", ()) for field in group]
        names = [value for kind, value in fields if kind == "commonName"]
    return names[0] if len(names) == 1 else None
