"""Errors of access control."""

from __future__ import annotations

from headrace_protocol.errors import PortableError


class AccessError(PortableError, ValueError):
    """Unusable settings or files of access control; the text begins with the setting or file."""
