"""An OpenID provider without a server: its keys as a file, and tokens that they sign."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from headrace_daemon.access.settings import TokenSettings

AUDIENCE, ISSUER = "headrace", "https://provider.example"
NOW_S = 1_800_000_000.0
LIFETIME_S = 300.0
Private = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@cache
def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    """A key; made once, since that takes long."""
    return rsa.generate_private_key(65537, bits)


@cache
def ec_key(number: int = 0) -> ec.EllipticCurvePrivateKey:
    """One of some keys."""
    return ec.generate_private_key(ec.SECP256R1())


@cache
def ed_key() -> ed25519.Ed25519PrivateKey:
    """A key."""
    return ed25519.Ed25519PrivateKey.generate()


def public(key: Private, kid: str | None, **more: object) -> dict[str, Any]:
    """A key of a set."""
    kind: Any = RSAAlgorithm
    if isinstance(key, ec.EllipticCurvePrivateKey):
        kind = ECAlgorithm
    elif isinstance(key, ed25519.Ed25519PrivateKey):
        kind = OKPAlgorithm
    found: dict[str, Any] = json.loads(kind.to_jwk(key.public_key()))
    found.pop("key_ops", None)
    return {**found, **({} if kid is None else {"kid": kid}), **more}


def write_keys(path: Path, *keys: dict[str, Any]) -> None:
    """The file of a provider's keys, as a provider's new one: another inode."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"keys": keys}))
    temporary.replace(path)


def settings(path: Path, **changes: str) -> TokenSettings:
    """The settings of a daemon that takes the provider's tokens."""
    return TokenSettings(str(path), AUDIENCE, ISSUER, "sub")._replace(**changes)


def token(
    key: Any = None, kid: str | None = "k", algorithm: str = "ES256", **claims: object
) -> str:
    """A token of alice, which ends after LIFETIME_S. claims: others; None leaves one out."""
    all_claims = {
        "sub": "alice",
        "aud": AUDIENCE,
        "iss": ISSUER,
        "exp": int(NOW_S + LIFETIME_S),
        **claims,
    }
    payload = {name: value for name, value in all_claims.items() if value is not None}
    headers = None if kid is None else {"kid": kid}
    return jwt.encode(payload, ec_key() if key is None else key, algorithm, headers)
