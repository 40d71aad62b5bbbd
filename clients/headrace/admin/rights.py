"""An operator's view of users and their rules, which every daemon keeps for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from headrace.admin.requests import BrokerRequests
from headrace.errors import (
    BrokerError,
    ChangedInPart,
    ConfigurationError,
    HeadraceError,
    NotEverywhere,
    RuleNotFound,
    UserExists,
    UserNotFound,
)
from headrace.missing import departed_part
from headrace.rights import CUSTOM, ClusterUser, Rule
from headrace.tasks import gather
from headrace_protocol import fastjson
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.rights.auth_requests import (
    AclHeader,
    AclInfo,
    DeleteAclHeader,
    ListAclHeader,
    ListUserHeader,
    PolicyEntryInfo,
    PolicyInfo,
    UserHeader,
    UserInfo,
)
from headrace_protocol.rights.auth_rules import subject_of
from headrace_protocol.rights.users import UserKind, UserStatus

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Collection,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from headrace.admin.requests import BrokerNode, BrokerProblem

Result = TypeVar("Result")
# The remark of a daemon that keeps no users.
_OFF: Final = "authenticationEnabled=false"
# Remarks of 16, which stands for what is forbidden and for what can't be done.
_EXISTS: Final = "The user is existed"
_UNKNOWN: Final = "not exist"


class RightsAdmin(BrokerRequests):
    """The methods of Admin for users and rules.

    Each broker, master or slave, and each nameserver has users and rules of its own, so a change
    goes to all of them. Those that keep none are skipped: nameservers of Apache RocketMQ, and
    daemons without authentication, unless none has it. Every daemon is tried before an error is
    raised: that of the daemons if all fail, else ChangedInPart, or NotEverywhere if brokers left.
    Results are by daemon: ``broker-a:0`` for the master of a name, ``nameserver HOST:PORT``.
    """

    async def create_user(
        self,
        name: str,
        password: str | None,
        *,
        is_super: bool = False,
        is_enabled: bool = True,
        signs: bool = True,
    ) -> list[str]:
        """Create a user without rules. Returns the daemons that were skipped.

        password: None for a user whom only a token or a certificate proves.
        signs: keep the password, so that Apache RocketMQ's clients can sign with it. If not, the
        daemons keep a proof of it alone, and the user can only log in, with headrace's clients.
        Raises UserExists.
        """
        info = UserInfo(
            username=name,
            password=password,
            user_type=_kind(is_super).value,
            user_status=_status(is_enabled).value,
            signatures=None if signs else False,
            no_password=True if password is None else None,
        )
        return await self._change_user(RequestCode.AUTH_CREATE_USER, info, "created")

    async def update_user(
        self,
        name: str,
        *,
        password: str | None = None,
        no_password: bool = False,
        is_super: bool | None = None,
        is_enabled: bool | None = None,
    ) -> list[str]:
        """Change what is given of a user. Returns as ``create_user``. Raises UserNotFound.

        no_password: take the password away, so that only a token or a certificate proves the user.
        """
        if not no_password and password is None and is_super is None and is_enabled is None:
            raise ConfigurationError(f"nothing of user {name} to change is given")
        info = UserInfo(
            username=name,
            password=password,
            no_password=True if no_password else None,
            user_type=None if is_super is None else _kind(is_super).value,
            user_status=None if is_enabled is None else _status(is_enabled).value,
        )
        return await self._change_user(RequestCode.AUTH_UPDATE_USER, info, "changed")

    async def delete_user(self, name: str) -> list[str]:
        """Delete a user with its rules. Returns as ``create_user``. Raises UserNotFound."""
        if not any(name in users for users in (await self.users(problems=[])).values()):
            raise UserNotFound(name)
        return await self._change_user(
            RequestCode.AUTH_DELETE_USER, UserInfo(username=name), "deleted"
        )

    async def users(
        self, *, problems: list[BrokerProblem] | None = None
    ) -> dict[str, dict[str, ClusterUser]]:
        """The users of each daemon by name. Passwords are never given out."""
        code = RequestCode.AUTH_LIST_USER
        return await self._gather(
            await self.keepers(), self._listing(code, ListUserHeader(), _decode_users), problems
        )

    async def set_rules(self, user: str, rules: Collection[Rule]) -> list[str]:
        """Add rules of a user; they replace those of the same resource and policy.

        Returns as ``create_user``. Raises UserNotFound, ConfigurationError.
        """
        info = AclInfo(subject=subject_of(user), policies=_policies(rules))
        header = AclHeader(subject=subject_of(user))
        # Rules of an unknown user are an error of both codes; 3007 also adds.
        return await self._change_everywhere(
            RequestCode.AUTH_UPDATE_ACL,
            header,
            info.encode(),
            f"the rules of user {user} are set",
            user,
        )

    async def remove_rules(
        self, user: str, resource: str | None = None, *, policy: str = CUSTOM
    ) -> list[str]:
        """Remove the rules of a user for a resource and policy, or all of them.

        Returns as ``create_user``. Raises RuleNotFound.
        """
        found = [each.get(user, []) for each in (await self.rules(problems=[])).values()]
        if not any(_is_meant(rule, resource, policy) for rules in found for rule in rules):
            raise RuleNotFound(user, resource)
        header = DeleteAclHeader(subject=subject_of(user))
        if resource is not None:
            header = msgspec.structs.replace(header, resource=resource, policy_type=policy)
        return await self._change_everywhere(
            RequestCode.AUTH_DELETE_ACL, header, b"", f"rules of user {user} are removed", user
        )

    async def rules(
        self, *, problems: list[BrokerProblem] | None = None
    ) -> dict[str, dict[str, list[Rule]]]:
        """The rules of each daemon by user, sorted; without users that have none."""
        code = RequestCode.AUTH_LIST_ACL
        return await self._gather(
            await self.keepers(), self._listing(code, ListAclHeader(), _decode_rules), problems
        )

    async def keepers(self) -> dict[str, str]:
        """The addresses of all daemons that may keep users and rules."""
        brokers = {_name(node): node.address for node in await self.cluster()}
        return brokers | {f"nameserver {each}": each for each in self._instance.nameservers}

    async def _change_user(self, code: int, info: UserInfo, what: str) -> list[str]:
        assert info.username is not None
        header = UserHeader(username=info.username)
        body = b"" if code == RequestCode.AUTH_DELETE_USER else info.encode()
        change = f"user {info.username} is {what}"
        return await self._change_everywhere(code, header, body, change, info.username)

    async def _change_everywhere(
        self, code: int, header: msgspec.Struct, body: bytes, change: str, user: str
    ) -> list[str]:
        """Have every daemon carry out a change; returns those that are skipped."""
        keepers = await self.keepers()
        outcomes = dict(
            zip(
                keepers,
                await gather(lambda at: self._ask(at, code, header, body), list(keepers.values())),
                strict=True,
            )
        )
        failed = {name: each for name, each in outcomes.items() if isinstance(each, HeadraceError)}
        skipped = [name for name, error in failed.items() if self._keeps_none(error)]
        failures = {name: error for name, error in failed.items() if name not in skipped}
        done = [name for name in keepers if name not in failed]
        if not done and not failures:
            raise failed[skipped[0]]
        _raise_failures(change, done, failures, user)
        if departed := await self.departed_brokers():
            raise NotEverywhere(
                f"{change} on the daemons that are there, not on brokers that left",
                [departed_part(each) for each in departed],
                "Repeat it once they are back",
            )
        return skipped

    def _listing(
        self, code: int, header: msgspec.Struct, decode: Callable[[memoryview], Result]
    ) -> Callable[[str], Awaitable[Result | None]]:
        """A function that asks the daemon at an address for a list; None if it keeps none."""

        async def ask(address: str) -> Result | None:
            response = await self._instance.request(address, code, header)
            try:
                return response.expect().read(decode)
            except BrokerError as error:
                if not self._keeps_none(error):
                    raise
                return None

        return ask

    def _keeps_none(self, error: HeadraceError) -> bool:
        """True for the answer of a daemon that keeps no users."""
        if not isinstance(error, BrokerError):
            return False
        is_apaches = error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        return (error.remark or "").startswith(_OFF) or (
            is_apaches and error.address in self._instance.nameservers
        )


def _raise_failures(
    change: str, done: Sequence[str], failures: Mapping[str, HeadraceError], user: str
) -> None:
    if not failures:
        return
    if done:
        raise ChangedInPart(change, done, failures)
    error = next(iter(failures.values()))
    remark = (error.remark or "") if isinstance(error, BrokerError) else ""
    if remark.startswith(_EXISTS):
        raise UserExists(user) from error
    if _UNKNOWN in remark and "acl" not in remark:
        raise UserNotFound(user) from error
    raise error


def _name(node: BrokerNode) -> str:
    return f"{node.broker_name}:{node.broker_id}"


def _kind(is_super: bool) -> UserKind:
    return UserKind.SUPER if is_super else UserKind.NORMAL


def _status(is_enabled: bool) -> UserStatus:
    return UserStatus.ENABLE if is_enabled else UserStatus.DISABLE


def _is_meant(rule: Rule, resource: str | None, policy: str) -> bool:
    return resource is None or (rule.resource, rule.policy) == (resource, policy)


def _decode_users(body: memoryview) -> dict[str, ClusterUser]:
    infos = fastjson.decode(body, list[UserInfo]) if body else []
    return {user.name: user for user in sorted(map(_user, infos))}


def _decode_rules(body: memoryview) -> dict[str, list[Rule]]:
    infos = fastjson.decode(body, list[AclInfo]) if body else []
    return {_user_name(info): sorted(_rules(info)) for info in infos}


def _user_name(info: AclInfo) -> str:
    return (info.subject or "").removeprefix(subject_of(""))


def _user(info: UserInfo) -> ClusterUser:
    return ClusterUser(
        info.username or "",
        info.user_type == UserKind.SUPER.value,
        info.user_status != UserStatus.DISABLE.value,
        info.signatures is not False,
        not info.no_password,
    )


def _policies(rules: Iterable[Rule]) -> list[PolicyInfo]:
    entries: dict[str, list[PolicyEntryInfo]] = {}
    for rule in map(Rule.checked, rules):
        entries.setdefault(rule.policy, []).append(
            PolicyEntryInfo(
                actions=list(rule.actions),
                decision=rule.decision,
                resource=rule.resource,
                source_ips=list(rule.addresses) or None,
            )
        )
    return [PolicyInfo(policy_type=policy, entries=found) for policy, found in entries.items()]


def _rules(info: AclInfo) -> Iterator[Rule]:
    for policy in info.policies:
        for each in policy.entries:
            yield Rule(
                each.resource or "",
                tuple(each.actions),
                tuple(each.source_ips or ()),
                each.decision or "",
                policy.policy_type or CUSTOM,
            )
