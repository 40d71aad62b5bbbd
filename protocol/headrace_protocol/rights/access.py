"""The one place where a daemon decides who makes a request, and what a user may do.

The subject of a request is the user of its session, the user of its signature, or anonymous, whose
rights are those of a policy.
Source: docs/security.md "Users" and "Rules".
"""

from __future__ import annotations

from ipaddress import ip_address
from itertools import groupby
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from headrace_protocol.bounds import check_size
from headrace_protocol.codes import RequestCode, ResponseCode, code_name
from headrace_protocol.errors import Lane, NotReady, RequestError
from headrace_protocol.quick_frames import UNREADABLE, decode_signed
from headrace_protocol.rights.proofs import REJECTED
from headrace_protocol.rights.rules import Action, Entry, Kind, Rules
from headrace_protocol.rights.signature import ACCESS_KEY, is_signature, is_signed
from headrace_protocol.rights.wanted import (
    OWN_CLUSTER,
    TABLE,
    Wanted,
    is_administrative,
    wanted,
    wanted_of,
)
from headrace_protocol.serving import LARGE_BODY_BYTES
from headrace_protocol.subject import Subject
from headrace_protocol.system_topics import READER_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace_protocol.channel import Channel
    from headrace_protocol.frame import Frame
    from headrace_protocol.rights.rules import Verdict
    from headrace_protocol.rights.users import User, Users
    from headrace_protocol.serving import Request

# deny: nobody without a name is served. read: they may do everything except administration.
# allow: they may do everything.
AnonymousAccess = Literal["deny", "read", "allow"]

_EVERYTHING: Final = Rules([Entry.parse("*", ["All"], [], "Allow")])
_POLICIES: Final[Mapping[AnonymousAccess, Rules]] = {
    "deny": Rules(),
    "read": Rules(
        [
            Entry.parse("Topic:*", ["Pub", "Sub", "Get"], [], "Allow"),
            Entry.parse("Group:*", ["Sub", "Get"], [], "Allow"),
            Entry.parse("Cluster:*", ["Get"], [], "Allow"),
        ]
    ),
    "allow": _EVERYTHING,
}
# Where no broker can prove its name, a nameserver is useless without them.
_REGISTRATION: Final = frozenset(
    {RequestCode.REGISTER_BROKER, RequestCode.UNREGISTER_BROKER, RequestCode.BROKER_HEARTBEAT}
)
_USE: Final = frozenset((Action.SUB, Action.CREATE))
_DIGESTS: Final = Lane("the digest of a body", 2)
# A wrong name costs as much as a wrong signature.
_NO_SECRET: Final = "0" * 32


class AccessSettings(NamedTuple):
    """Settings of a daemon's access control.

    authentication: whether requests need a user. authorization: whether users need rules.
    authentication_whitelist, authorization_whitelist: codes for which each is left out.
    needs_tls: whether signed requests of Super users, and signed administration, need TLS.
    anonymous: the policy for requests without a user.
    """

    authentication: bool = False
    authorization: bool = False
    authentication_whitelist: frozenset[int] = frozenset()
    authorization_whitelist: frozenset[int] = frozenset()
    needs_tls: bool = True
    anonymous: AnonymousAccess = "deny"


class Access:
    """Decides on the requests of one daemon. cluster: its cluster, as rules name it.

    is_open: whether nobody is checked, so that a daemon needs no guard. Without authentication, a
    daemon that denies anonymous access serves its own machine only.
    """

    def __init__(self, settings: AccessSettings, users: Users, cluster: str) -> None:
        self.is_open = not settings.authentication and settings.anonymous != "read"
        self._settings = settings
        self._users = users
        self._cluster = cluster
        self._anonymous = _POLICIES[settings.anonymous]
        self._open_codes = settings.authorization_whitelist
        if not settings.authentication:
            self._open_codes |= _REGISTRATION
        elif not settings.authorization and settings.anonymous == "deny":
            # Nobody gets here without a name but for a code of the whitelist.
            self._anonymous = _EVERYTHING

    @property
    def version(self) -> int:
        """Grows when users or rules change; what was decided before is to be decided again."""
        return self._users.version

    # -- requests ----------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """The guard: note the subject of a request, and check its rights; again for a held one.

        Raises RequestError(NO_PERMISSION), as ``wanted``, and NotReady for the digest of a large
        body.
        """
        code = request.command.code
        row = TABLE.get(code)
        if row is not None and row.is_for_anybody:
            return
        request.subject = subject = self.identify(request)
        if subject.is_super or code in self._open_codes:
            return
        rules = self._rules(subject)
        if rules is not _EVERYTHING:
            request.rights = self
            for want in wanted(request):
                self._check(subject, rules, want)

    def _check(self, subject: Subject, rules: Rules, want: Wanted) -> None:
        name = want.name or self._cluster if want.kind is Kind.CLUSTER else want.name
        verdict = rules.decide(want.kind, name, want.actions, subject.address)
        if not (verdict.is_allowed or is_of_readers(want)):
            raise RequestError(
                ResponseCode.NO_PERMISSION, _refusal(subject, want.kind, name, verdict)
            )

    def identify(self, request: Request) -> Subject:
        """The subject of a request. Raises RequestError(NO_PERMISSION)."""
        channel = request.channel
        if not self._settings.authentication:
            return Subject(None, channel.ip)
        # A request that has waited was identified before, by the body that it had then.
        name = request.subject.user if request.subject is not None else channel.user
        if name is not None:
            return self._of_user(name, channel)
        fields, code = request.command.ext(), request.command.code
        check_size(code, len(request.body))  # a digest would take 0.6 ms per MiB
        user = self._signer(request, fields)
        if user is not None:
            if self._can_be_replayed(channel, user, code):
                raise _replayable(user, code)
            channel.signer = user.name
            return Subject(user.name, channel.ip, user.is_super)
        is_admitted = code in self._settings.authentication_whitelist
        if is_admitted or (ACCESS_KEY not in fields and self._settings.anonymous != "deny"):
            return Subject(None, channel.ip)
        raise _rejected()

    def _of_user(self, name: str, channel: Channel) -> Subject:
        user = self._users.users.get(name)
        if user is None or not user.is_enabled:
            raise _rejected()
        if channel.proof is not None and (refusal := channel.proof.refusal(user)):
            raise RequestError(ResponseCode.NO_PERMISSION, refusal)
        return Subject(name, channel.ip, user.is_super)

    def _signer(self, request: Request, fields: Mapping[str, str]) -> User | None:
        """The signer of a request; None without a valid signature. Raises NotReady."""
        name = fields.get(ACCESS_KEY)
        if not name:
            return None
        user, secret = self._secret(name)
        body, version = request.body, request.command.version
        if request.is_signed is None and len(body) > LARGE_BODY_BYTES:

            def digest() -> None:
                request.is_signed = is_signed(secret, fields, body, version)

            raise NotReady(digest, _DIGESTS)
        if request.is_signed is None:
            return user if is_signed(secret, fields, body, version) else None
        return user if request.is_signed else None

    def _secret(self, name: str) -> tuple[User | None, str]:
        """A user who may sign, with its secret; for others None, and one that nobody knows."""
        user = self._users.users.get(name)
        if user is None or not user.secret:
            return None, _NO_SECRET
        return user if user.is_enabled else None, user.secret

    def _can_be_replayed(self, channel: Channel, user: User, code: int) -> bool:
        """True if somebody between could send a signed request again, to harm."""
        is_dear = user.is_super or is_administrative(code)
        return is_dear and self._settings.needs_tls and not channel.is_encrypted

    def subject(self, channel: Channel) -> Subject | None:
        """The subject of all requests of a channel; None if each must be identified.

        Raises RequestError(NO_PERMISSION) for a session whose user may no longer log in.
        """
        if not self._settings.authentication:
            return Subject(None, channel.ip)
        return None if channel.user is None else self._of_user(channel.user, channel)

    def senders(
        self, channel: Channel, frames: list[Frame]
    ) -> Iterable[tuple[Subject | None, Iterable[Frame]]]:
        """Sends with JSON headers in runs of one subject; None where ``identify`` must decide.

        Cost: without a session 5 µs each for 1 KiB.
        """
        try:
            subject = self.subject(channel)
        except RequestError:
            return [(None, frames)]
        if subject is not None:
            return [(subject, frames)]
        runs = groupby(frames, self._sender)
        return ((self._of_signer(user, channel), run) for user, run in runs)

    def _sender(self, frame: Frame) -> User | None:
        _, header, body = frame
        try:
            fields = decode_signed(header).fields
        except UNREADABLE:
            return None
        user, secret = self._secret(fields.access_key)
        return user if is_signature(fields.signature, secret, fields.text(), body) else None

    def _of_signer(self, user: User | None, channel: Channel) -> Subject | None:
        if user is None or self._can_be_replayed(channel, user, RequestCode.SEND_MESSAGE_V2):
            return None
        channel.signer = user.name
        return Subject(user.name, channel.ip, user.is_super)

    # -- rights ------------------------------------------------------------------------------------

    def may(self, subject: Subject, kind: Kind, name: str, *actions: Action) -> bool:
        """True if a subject has one of the ``actions`` on a resource.

        A retry or dead-letter topic counts as its group, a topic of the broker as the cluster.
        """
        return self.has(subject, wanted_of(kind, name, frozenset(actions)))

    def require(self, subject: Subject, kind: Kind, name: str, *actions: Action) -> None:
        """Raise RequestError unless ``may``."""
        if not subject.is_super:
            self._check(subject, self._rules(subject), wanted_of(kind, name, frozenset(actions)))

    def may_create(self, subject: Subject, kind: Kind, name: str) -> bool:
        """True if a topic or group may be made for a subject that uses it.

        The policy ``read`` permits that, although it permits no administration.
        """
        is_reader = subject.user is None and self._anonymous is _POLICIES["read"]
        return is_reader or self.may(subject, kind, name, Action.CREATE)

    def has(self, subject: Subject, want: Wanted) -> bool:
        """True if a subject has a right."""
        if subject.is_super or is_of_readers(want):
            return True
        is_own = want.kind is Kind.CLUSTER and want.name == OWN_CLUSTER
        name = self._cluster if is_own else want.name
        rules = self._rules(subject)
        return rules.decide(want.kind, name, want.actions, subject.address).is_allowed

    def _rules(self, subject: Subject) -> Rules:
        if subject.user is None:
            return self._anonymous
        return self._users.rules(subject.user) if self._settings.authorization else _EVERYTHING


def is_of_readers(want: Wanted) -> bool:
    """True for the use of the group in whose name clients read without one."""
    is_use = not want.actions.isdisjoint(_USE)
    return want.kind is Kind.GROUP and want.name == READER_GROUP and is_use


def _rejected() -> RequestError:
    return RequestError(ResponseCode.NO_PERMISSION, REJECTED)


def _replayable(user: User, code: int) -> RequestError:
    whose = "of a Super user" if user.is_super else f"to administer ({code_name(code)})"
    return RequestError(
        ResponseCode.NO_PERMISSION,
        f"a signed request {whose} needs TLS, because whoever reads it can send it again: connect "
        "with TLS, or set authRequiresTls=none at this daemon",
    )


def _refusal(subject: Subject, kind: Kind, name: str, verdict: Verdict) -> str:
    reason = "no matched policies." if verdict.entry is None else "the decision is deny."
    return (
        f"{subject} has no permission to access {kind.value}:{name} "
        f"from {subject.address}, {reason}"
    )


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server that listens on ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
