"""Headers and bodies of the requests about users and rules, 3001 to 3010, as mqadmin sends them.

A body's list or answer without anything in it is an empty body.
Source: docs/protocol.md "Users and rules"; tests/protocol/test_auth_requests.py.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headrace_protocol.bodies import Body
from headrace_protocol.bounds import NAME_CHARS_MAX, OutOfBounds, check_text
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import RequestHeader

PASSWORD_CHARS_MAX: Final = 1024

# -- headers ---------------------------------------------------------------------------------------


class UserHeader(RequestHeader, kw_only=True, gc=False):
    """AUTH_CREATE_USER (3001), _UPDATE_USER (3002), _DELETE_USER (3003), _GET_USER (3004)."""

    username: str = ""


class ListUserHeader(RequestHeader, kw_only=True, gc=False):
    """AUTH_LIST_USER (3005). filter: a part of the names."""

    filter: str = ""


class AclHeader(RequestHeader, kw_only=True, gc=False):
    """AUTH_CREATE_ACL (3006), AUTH_UPDATE_ACL (3007), AUTH_GET_ACL (3009). subject: User:NAME."""

    subject: str = ""


class DeleteAclHeader(AclHeader, kw_only=True, gc=False):
    """AUTH_DELETE_ACL (3008). Without a resource, all rules of the subject are deleted.

    policy_type: Custom or Default; if empty, Custom.
    """

    policy_type: str = ""
    resource: str = ""


class ListAclHeader(RequestHeader, kw_only=True, gc=False):
    """AUTH_LIST_ACL (3010): parts of the subjects, and of the resources that are shown."""

    subject_filter: str = ""
    resource_filter: str = ""


# -- bodies ----------------------------------------------------------------------------------------


class UserInfo(Body, omit_defaults=True):
    """A user: the body of 3001 and 3002, of which only what is there counts, and of answers.

    password: in answers only for the copy of a user; see docs/security.md "Users".
    no_password: headrace's; True for a user whom only a token or a certificate proves.
    signatures: headrace's; False keeps no password, so that the user can't sign, only log in.
    user_status: enable or disable. user_type: Super or Normal.
    """

    no_password: bool | None = None
    password: str | None = None
    signatures: bool | None = None
    user_status: str | None = None
    user_type: str | None = None
    username: str | None = None

    def __repr__(self) -> str:
        return f"UserInfo({self.username!r}, {self.user_type}, {self.user_status})"


class PolicyEntryInfo(Body, omit_defaults=True):
    """A rule. source_ips: the clients that it speaks of; None for all."""

    actions: list[str] = msgspec.field(default_factory=list)
    decision: str | None = None
    resource: str | None = None
    source_ips: list[str] | None = None


class PolicyInfo(Body, omit_defaults=True):
    """The rules of one type, Custom or Default; None for Custom."""

    entries: list[PolicyEntryInfo] = msgspec.field(default_factory=list)
    policy_type: str | None = None


class AclInfo(Body, omit_defaults=True):
    """All rules of a subject, or those that a request changes. subject: User:NAME."""

    policies: list[PolicyInfo] = msgspec.field(default_factory=list)
    subject: str | None = None


# -- checks ----------------------------------------------------------------------------------------


def check_user_name(name: str) -> None:
    """Check the name of a user. Raises OutOfBounds."""
    if not name.strip():
        raise OutOfBounds("The username is blank")
    check_text("username", name, NAME_CHARS_MAX)
    if name != name.strip() or not name.isprintable():
        raise OutOfBounds(
            f"username {name!r}: use printable characters, and no blank at the beginning or end"
        )


def check_password(password: str) -> None:
    """Check a password. Raises RequestError with Apache's code, OutOfBounds."""
    if not password.strip():
        raise RequestError(ResponseCode.NO_PERMISSION, "password can not be blank")
    check_text("password", password, PASSWORD_CHARS_MAX)
    if "\0" in password or any("\ud800" <= each <= "\udfff" for each in password):
        raise OutOfBounds("the password has characters that no text has")
