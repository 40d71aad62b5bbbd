"""Encryption of passwords on disk, by a key from a file of its own: AES-256-GCM."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from headrace_daemon.access.errors import AccessError

_KEY_BYTES_MIN: Final = 32
_NONCE_BYTES: Final = 12


class WrongKey(Exception):
    """A password that another key has encrypted, or for another user."""


class Cipher:
    """Encrypts the passwords of users. place: the setting, for errors. Raises AccessError."""

    def __init__(self, key: bytes, place: str) -> None:
        if len(key.strip()) < _KEY_BYTES_MIN:
            raise AccessError(
                f"{place}: a key has at least {_KEY_BYTES_MIN} random characters, such as those of "
                "`openssl rand -base64 32`"
            )
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise AccessError(
                f"{place}: needs cryptography, which is not installed: pip install cryptography"
            ) from None
        self._aead = AESGCM(hashlib.sha256(key.strip()).digest())

    def encrypt(self, user: str, password: str) -> bytes:
        """The password, which can be read for this user only."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, password.encode(), user.encode())

    def decrypt(self, user: str, data: bytes) -> str:
        """The password of a user. Raises WrongKey."""
        from cryptography.exceptions import InvalidTag

        try:
            nonce, rest = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
            return self._aead.decrypt(nonce, rest, user.encode()).decode()
        except (InvalidTag, ValueError):
            raise WrongKey(user) from None
