"""A daemon's certificate, which is read again when one of its files changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio

from headrace_protocol.drivers.files import file_stamp
from headrace_protocol.tls.contexts import server_context
from headrace_protocol.tls.expiry import expires_s, first_certificate
from headrace_protocol.tls.settings import TlsError, TlsMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.drivers.files import FileStamp
    from headrace_protocol.tls.settings import ServerTls

log = structlog.get_logger("headrace.tls")

_LOOK_S: Final = 5.0
_DAY_S: Final = 86_400.0
_SOON_S: Final = 14 * _DAY_S


class Certificates:
    """The certificate of new connections; open ones keep theirs.

    context: of the next connection. certificate: its own, DER.
    expires_s: Unix time of the certificate's end.
    on_read: called after changed files were read, with the certificate's file, and the reason if
        they are unusable.

    Raises TlsError.
    """

    def __init__(self, settings: ServerTls) -> None:
        self.settings = settings
        self.context = server_context(settings)
        self.certificate = first_certificate(settings.cert_file)
        self.expires_s = expires_s(settings.cert_file)
        self._stamps = self._stamp()
        self._warned_s = 0.0
        self.on_read: Callable[[str, str], None] = lambda _file, _reason: None

    @property
    def is_enforced(self) -> bool:
        """True if connections without TLS are closed."""
        return self.settings.mode is TlsMode.ENFORCING

    async def run(self) -> None:
        """Look at the files, until cancelled."""
        while True:
            self._warn(time.time())
            await trio.sleep(_LOOK_S)
            self.refresh()

    def refresh(self) -> None:
        """Read the files again if one has changed; keep the old ones if the new are unusable."""
        stamps = self._stamp()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            context, end_s = server_context(self.settings), expires_s(self.settings.cert_file)
            certificate = first_certificate(self.settings.cert_file)
        except TlsError as error:
            log.error("certificate not changed", reason=str(error), remedy="replace the files")
            self.on_read(self.settings.cert_file, str(error))
            return
        self.context, self.expires_s, self._warned_s = context, end_s, 0.0
        self.certificate = certificate
        log.info("certificate changed", file=self.settings.cert_file, expires=_shown(end_s))
        self.on_read(self.settings.cert_file, "")

    def _warn(self, now_s: float) -> None:
        """Log the end of the certificate once a day, from two weeks before on."""
        if self.expires_s - now_s > _SOON_S or now_s - self._warned_s < _DAY_S:
            return
        self._warned_s = now_s
        log.warning(
            "certificate expired" if self.expires_s <= now_s else "certificate expires soon",
            file=self.settings.cert_file,
            expires=_shown(self.expires_s),
            remedy="replace certificate and key; the daemon reads them within seconds",
        )

    def _stamp(self) -> list[FileStamp]:
        settings = self.settings
        files = (settings.cert_file, settings.key_file, settings.trust_file)
        return [file_stamp(Path(file)) for file in files if file]


def _shown(moment_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment_s))
