"""The rule for daemons that other machines reach: somebody there must be checked, or permitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace_daemon.access.errors import AccessError
from headrace_daemon.access.settings import check_options
from headrace_protocol.rights.access import is_loopback

if TYPE_CHECKING:
    from headrace_daemon.access.settings import AccessOptions

# The lines that make it safe.
SAFE_LINES: Final = (
    "authenticationEnabled=true",
    "authorizationEnabled=true",
    "initAuthenticationUserFile=super.json",
)


def check_exposure(bind_address: str, options: AccessOptions, tls_config_file: str) -> None:
    """Raise AccessError for settings that fit neither each other nor the address of the daemon."""
    check_options(options)
    if (
        is_loopback(bind_address)
        or options.anonymous_access != "deny"
        or options.authentication_enabled
        or _needs_certificates(tls_config_file)
    ):
        return
    lines = "\n".join(f"    {line}" for line in SAFE_LINES)
    raise AccessError(
        f"bindAddress={bind_address}: other machines reach this address, and nobody there is "
        "checked, so anyone may read, write and administer. These lines start it safely, with a "
        f'file super.json of mode 600 that has {{"username":"root","password":"..."}}:\n{lines}\n'
        "Certificates of clients do, too (tls.server.need.client.auth=require). Without a check: "
        "anonymousAccess=allow permits everything, anonymousAccess=read all but administration. "
        "Without bindAddress only this machine is served"
    )


def _needs_certificates(tls_config_file: str) -> bool:
    """True if only clients with a certificate of the authority are served."""
    if not tls_config_file:
        return False
    from headrace_protocol.tls.settings import ClientAuth, TlsError, TlsMode, read_tls_file

    try:
        server = read_tls_file(Path(tls_config_file)).server
    except TlsError as error:
        raise AccessError(f"tlsConfigFile={tls_config_file}: {error}") from None
    return (
        server is not None
        and server.mode is TlsMode.ENFORCING
        and server.client_auth is ClientAuth.REQUIRE
    )
