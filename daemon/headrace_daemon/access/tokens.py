"""Bearer tokens of clients: JWTs that an OpenID provider has signed, verified without asking it.

The provider's public keys are a file, a JWK set; a changed file counts from the next log-in on.
Only signatures with a private key are accepted: a shared secret among the keys would let every
service that verifies tokens make some. The library takes long to import: import this module where
a daemon takes tokens. Source: RFC 7515, 7517, 7519, 8725; docs/security.md "Tokens".
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog
import trio

from headrace_daemon.access.errors import AccessError
from headrace_protocol.bounds import NAME_CHARS_MAX
from headrace_protocol.drivers.files import file_stamp
from headrace_protocol.rights.bearer import BEARER_CHARS_MAX, TokenRejected, token_in
from headrace_protocol.rights.proofs import TokenProof

try:
    import jwt
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
except ImportError as error:
    raise AccessError(
        "authJwksFile: tokens need PyJWT and cryptography: pip install 'pyjwt[crypto]'"
    ) from error

from headrace_protocol.errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace_daemon.access.settings import TokenSettings

log = structlog.get_logger("headrace.tokens")

_FILE_BYTES_MAX: Final = 1024 * 1024
_RSA_BITS_MIN: Final = 2048
# Clocks of provider and daemon differ: for a token's beginning, never for its end.
_SKEW_S: Final = 60.0
# Beyond it a time has no sense, and may have no float.
_LAST_S: Final = 1 << 40
_ALGORITHMS: Final[Mapping[tuple[str, str | None], tuple[str, ...]]] = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
    ("OKP", "Ed448"): ("EdDSA",),
}
# Members of a key that are texts, if it has them.
_TEXTS: Final = ("kty", "kid", "use", "alg", "crv", "n", "e", "x", "y")
_REASONS: Final = (
    (jwt.InvalidAudienceError, "it is for another audience"),
    (jwt.InvalidIssuerError, "another issuer has made it"),
    (jwt.MissingRequiredClaimError, "it lacks one of exp, aud and iss"),
    (jwt.InvalidAlgorithmError, "it is signed by an algorithm that is not its key's"),
    (jwt.InvalidSignatureError, "its signature is wrong"),
)


class _Key(NamedTuple):
    """A public key, and the algorithms of signatures that are accepted of it."""

    key: Any
    algorithms: tuple[str, ...]


class Tokens:
    """Verifies tokens. Raises AccessError without usable keys.

    wall_s, now_s: as of ``TokenProof``.
    """

    def __init__(
        self,
        settings: TokenSettings,
        wall_s: Callable[[], float] = time.time,
        now_s: Callable[[], float] = trio.current_time,
    ) -> None:
        self._settings = settings
        self._wall_s, self._now_s = wall_s, now_s
        self._path = Path(settings.file)
        self._stamp = file_stamp(self._path)
        self._keys = _read(self._path)

    def check(self, token: str) -> tuple[str, TokenProof]:
        """The user of a token. Takes some 200 µs. Raises TokenRejected."""
        self._refresh()
        try:
            key = self._key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key.key,
                algorithms=key.algorithms,
                audience=self._settings.audience,
                issuer=self._settings.issuer or None,
                # Times are checked below, by the clock of the daemon.
                options={
                    "require": ["exp"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise TokenRejected(_reason(error)) from None
        return self._user(claims), self._proof(claims)

    def _user(self, claims: Mapping[str, object]) -> str:
        name = claims.get(self._settings.user_claim)
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
            raise TokenRejected(f"its claim {self._settings.user_claim!r} is no user's name")
        return name

    def _proof(self, claims: Mapping[str, object]) -> TokenProof:
        wall_s = self._wall_s()
        expires_s = _moment_s(claims, "exp")
        if expires_s <= wall_s:
            raise TokenRejected("it has expired")
        if "nbf" in claims and _moment_s(claims, "nbf") > wall_s + _SKEW_S:
            raise TokenRejected("it is not valid yet")
        ends_s = self._now_s() + expires_s - wall_s
        return TokenProof(expires_s, ends_s, self._wall_s, self._now_s)

    # -- keys --------------------------------------------------------------------------------------

    def _key(self, kid: str | None) -> _Key:
        """The key of an id; the only one, for a token without."""
        if kid is None and len(self._keys) == 1:
            (only,) = self._keys.values()
            return only
        if kid not in self._keys:
            raise TokenRejected("its key is not among those of authJwksFile")
        return self._keys[kid]

    def _refresh(self) -> None:
        """Read the file again if it has changed; keep the old keys if the new are unusable."""
        stamp = file_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _read(self._path)
        except AccessError as error:
            log.error("keys of tokens not changed", reason=str(error), remedy="replace the file")
            return
        log.info("keys of tokens changed", file=str(self._path), keys=len(self._keys))


class ServerTokenLogin:
    """The server's side of one log-in, with the methods of ``session.ServerLogin``.

    user: the token's, once it was verified; "" before.
    """

    chars_max: Final = BEARER_CHARS_MAX
    proof: TokenProof

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.user = ""

    def first(self, message: str) -> str:
        """The answer to the first message. Raises TokenRejected."""
        if message:
            raise TokenRejected("the first message must be empty")
        return ""

    def finish(self, message: str) -> str:
        """The answer to the second message. Raises TokenRejected."""
        self.user, self.proof = self._tokens.check(token_in(message))
        return ""


def _reason(error: Exception) -> str:
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    return "it is malformed"


def _moment_s(claims: Mapping[str, object], name: str) -> float:
    moment_s = claims[name]
    is_number = isinstance(moment_s, int | float) and not isinstance(moment_s, bool)
    if not is_number or not 0 <= moment_s < _LAST_S:  # type: ignore[operator]
        raise TokenRejected(f"its {name} is no time")
    return float(moment_s)  # type: ignore[arg-type]


def _read(path: Path) -> dict[str | None, _Key]:
    """The usable keys of a JWK set by their ids. Raises AccessError."""
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        found = json.loads(data)["keys"] if len(data) <= _FILE_BYTES_MAX else None
    except OSError as error:
        raise AccessError(f"authJwksFile={path}: {reason_of(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise AccessError(
            f'authJwksFile={path}: is no JWK set, {{"keys":[...]}} of at most 1 MiB: take it from '
            "the jwks_uri of the provider's /.well-known/openid-configuration"
        )
    keys = {}
    for number, each in enumerate(found, 1):
        if reason := _malformed(each):
            raise AccessError(f"authJwksFile={path}: key {number} of {len(found)} {reason}")
        if (key := _usable(each)) is not None:
            keys[each.get("kid")] = key
    if not keys:
        raise AccessError(
            f"authJwksFile={path}: has no key for RS, PS, ES or EdDSA signatures (RSA: "
            f"{_RSA_BITS_MIN} bits or more)"
        )
    return keys


def _malformed(found: dict[str, Any]) -> str:
    """The reason for refusing the file because of a key; "" for none."""
    if "d" in found:
        return "is a private one, with which tokens can be forged: keep public keys there alone"
    odd = [name for name in _TEXTS if not isinstance(found.get(name), str | None)]
    if odd:
        return f"has no text as its {odd[0]}: take the file from the provider again"
    return ""


def _usable(found: dict[str, Any]) -> _Key | None:
    """A key of a set; None for one that verifies no tokens here."""
    kty, curve, stated = (found.get(name) for name in ("kty", "crv", "alg"))
    algorithms = _ALGORITHMS.get((kty, curve)) if kty else None
    if algorithms is None or found.get("use") == "enc":
        return None
    if stated is not None:
        algorithms = tuple(each for each in algorithms if each == stated)
    try:
        key = jwt.PyJWK(found, algorithms[0]).key if algorithms else None
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
    if isinstance(key, RSAPublicKey) and key.key_size < _RSA_BITS_MIN:
        return None
    return None if key is None else _Key(key, algorithms)
