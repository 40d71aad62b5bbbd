"""Users and rules in files of Apache RocketMQ, and what headrace makes of them.

Two forms: ``plain_acl.yml`` of ACL 1.0, and the tables that ``mqadmin listUser`` and ``listAcl``
print. Parts that have no counterpart are notes, never silently left out.
Source: org.apache.rocketmq.acl.plain.PlainPermissionManager;
org.apache.rocketmq.auth.migration.AuthMigrator; tests/clients/test_acl_files.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.errors import ConfigurationError
from headrace.rights import CUSTOM, DEFAULT, ClusterUser, Rule
from headrace_protocol.rights.users import UserKind, UserStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_PUB: Final = "Pub"
_SUB: Final = "Sub"
_ALL: Final = "All"
# Words of ACL 1.0. ANY is what an administrator has.
_PERMS: Final = {
    "DENY": (),
    "PUB": (_PUB,),
    "SUB": (_SUB,),
    "PUB|SUB": (_PUB, _SUB),
    "SUB|PUB": (_PUB, _SUB),
    "ANY": (_ALL,),
}
_ACCOUNT_KEYS: Final = {
    "accessKey",
    "secretKey",
    "whiteRemoteAddress",
    "admin",
    "defaultTopicPerm",
    "defaultGroupPerm",
    "topicPerms",
    "groupPerms",
}
_HEADINGS: Final = ("#UserName ", "#Subject ")
# Columns have a least width, which longer values exceed; two blanks are between them.
_USER_ROW: Final = re.compile(r"(.{16,}?)  (.{22,}?)  (.{22,}?)  (.*)")
_RULE_ROW: Final = re.compile(r"(.{16,}?)  (.{10,}?)  (.{22,}?)  (.{20,}?)  (.{24,}?)  (.*)")
_ROW_CHARS: Final = 120
_REPORT: Final = re.compile(r"(get|list) \w+ from \S+ success\.|there is no \w+ found\.|.* WARN .*")


class Imported(NamedTuple):
    """A user of a file. password: None if the file has none. notes: what is not carried over."""

    user: ClusterUser
    password: str | None
    rules: tuple[Rule, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Imported({self.user}, {len(self.rules)} rules)"


class AclFile(NamedTuple):
    """The users of a file, and notes on its other parts."""

    users: tuple[Imported, ...]
    notes: tuple[str, ...] = ()


def parse(text: str, source: str) -> AclFile:
    """Read either form. source: the file's name, for errors. Raises ConfigurationError."""
    lines = text.splitlines()
    if any(line.startswith(_HEADINGS) for line in lines):
        return AclFile(tuple(_of_tables(lines, source)))
    return _of_plain_acl(_yaml(text, source), source)


# -- plain_acl.yml ---------------------------------------------------------------------------------


def _yaml(text: str, source: str) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(f"{source}: YAML needs a library: pip install pyyaml") from error
    try:
        # As text: a secret of digits is no number.
        found = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - makes text, lists and maps
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{source}: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or not isinstance(found.get("accounts"), list):
        raise ConfigurationError(
            f"{source} is neither a plain_acl.yml, which has accounts, nor what `mqadmin listUser` "
            "or `mqadmin listAcl` prints"
        )
    return found


def _of_plain_acl(found: Mapping[str, Any], source: str) -> AclFile:
    notes = []
    if addresses := found.get("globalWhiteRemoteAddresses"):
        notes.append(
            f"globalWhiteRemoteAddresses {_words(addresses)}: clients there needed no password; "
            "every client needs one now"
        )
    notes += [f"{key}: not known" for key in found if key not in {"accounts", _ADDRESSES_KEY}]
    users = [
        _account(each, f"{source}: account {number}")
        for number, each in enumerate(found["accounts"], 1)
    ]
    names = [each.user.name for each in users]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigurationError(f"{source}: {min(twice)} has two accounts: keep one")
    return AclFile(tuple(users), tuple(notes))


_ADDRESSES_KEY: Final = "globalWhiteRemoteAddresses"


def _account(found: Any, source: str) -> Imported:
    if not isinstance(found, dict) or not _text(found, "accessKey"):
        raise ConfigurationError(f"{source} has no accessKey")
    name, is_super = _text(found, "accessKey"), _text(found, "admin").lower() == "true"
    notes = [f"{key}: not known" for key in found if key not in _ACCOUNT_KEYS]
    if addresses := _text(found, "whiteRemoteAddress"):
        notes.append(
            f"whiteRemoteAddress {addresses}: clients there needed no password; every client needs "
            "one now"
        )
    if is_super:
        notes.append("admin: becomes a Super user, who may do everything")
        ignored = [key for key in sorted(_RULE_KEYS) if found.get(key)]
        notes += [f"{key}: a Super user has no rules" for key in ignored]
        rules: list[Rule] = []
    else:
        rules = [
            *_rules("Topic", found, "topicPerms", "defaultTopicPerm", source),
            *_rules("Group", found, "groupPerms", "defaultGroupPerm", source),
        ]
    password = _text(found, "secretKey") or None
    return Imported(ClusterUser(name, is_super=is_super), password, tuple(rules), tuple(notes))


_RULE_KEYS: Final = _ACCOUNT_KEYS - {"accessKey", "secretKey", "whiteRemoteAddress", "admin"}


def _rules(
    kind: str, found: Mapping[str, Any], named: str, default: str, source: str
) -> Iterator[Rule]:
    """The rules for one kind of resource."""
    word = _text(found, default)
    for_others = _perm(word, f"{source}: {default}") if word else ()
    lines = found.get(named) or []
    if not isinstance(lines, list):
        raise ConfigurationError(f"{source}: {named} is no list of {kind.upper()}=PERM")
    for line in lines:
        name, equals, perm = (part.strip() for part in str(line).partition("="))
        if not name or not equals:
            raise ConfigurationError(f"{source}: {named}: {line!r}: expected NAME=PERM")
        granted = _perm(perm, f"{source}: {named}: {name}")
        yield from _of_one(f"{kind}:{name}", granted, for_others)
    if word:
        actions = for_others or (_ALL,)
        yield Rule(f"{kind}:*", actions, (), "Allow" if for_others else "Deny", DEFAULT)


def _of_one(resource: str, granted: tuple[str, ...], for_others: tuple[str, ...]) -> Iterator[Rule]:
    """Rules of a resource that has a line of its own.

    In ACL 1.0 that line alone counts. Here the default counts for each action that no rule of the
    resource speaks of, so what the line does not grant is denied.
    """
    if not granted:
        yield Rule(resource, (_ALL,), (), "Deny")
        return
    yield Rule(resource, granted)
    if _ALL not in granted and (missing := tuple(set(for_others) - set(granted))):
        yield Rule(resource, missing, (), "Deny")


def _perm(word: str, source: str) -> tuple[str, ...]:
    perm = _PERMS.get("".join(word.upper().split()))
    if perm is None:
        raise ConfigurationError(f"{source}: {word!r} is not one of {', '.join(_PERMS)}")
    return perm


def _text(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    return value.strip() if isinstance(value, str) else _words(value)


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


# -- tables of mqadmin -----------------------------------------------------------------------------


def _of_tables(lines: Iterable[str], source: str) -> Iterator[Imported]:
    users: dict[str, Imported] = {}
    rules: dict[str, dict[Rule, None]] = {}
    row = _USER_ROW
    for number, line in enumerate(lines, 1):
        if line.startswith(_HEADINGS):
            row = _USER_ROW if line.startswith(_HEADINGS[0]) else _RULE_ROW
        elif line.strip() and not _REPORT.fullmatch(line):
            match = row.fullmatch(line.ljust(_ROW_CHARS))
            cells = [cell.strip() for cell in match.groups()] if match else []
            where = f"{source}: line {number}"
            if row is _USER_ROW:
                _add_user(users, cells, where)
            else:
                _add_rule(rules, cells, where)
    for name in dict.fromkeys([*users, *rules]):
        found = users.get(name, Imported(ClusterUser(name), None, ()))
        yield found._replace(rules=tuple(rules.get(name, ())))


def _add_user(users: dict[str, Imported], cells: list[str], where: str) -> None:
    if len(cells) != 4 or cells[2] not in {kind.value for kind in UserKind}:
        raise ConfigurationError(f"{where} is no row of a user, as `mqadmin listUser` prints it")
    name, password, kind, status = cells
    user = ClusterUser(
        name,
        is_super=kind == UserKind.SUPER.value,
        is_enabled=status != UserStatus.DISABLE.value,
    )
    found = Imported(user, password if password not in {"", "null"} else None, ())
    if users.setdefault(name, found) != found:
        raise ConfigurationError(f"{where}: {name} is another one than in a line before: keep one")


def _add_rule(rules: dict[str, dict[Rule, None]], cells: list[str], where: str) -> None:
    kind, _, name = (cells or [""])[0].partition(":")
    if kind != "User" or not name or "  " in name:
        raise ConfigurationError(f"{where} is no row of a rule, as `mqadmin listAcl` prints it")
    _, policy, resource, actions, addresses, decision = cells
    found = rules.setdefault(name, {})
    if not any(cells[1:]):
        return  # a user without rules
    rule = Rule(resource, _listed(actions), _listed(addresses), decision, policy or CUSTOM)
    try:
        found[rule.checked()] = None
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _listed(text: str) -> tuple[str, ...]:
    """The items of a list as Java prints it; none for null."""
    items = "" if text == "null" else text.removeprefix("[").removesuffix("]")
    return tuple(item.strip() for item in items.split(",") if item.strip())
