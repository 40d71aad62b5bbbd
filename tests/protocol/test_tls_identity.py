"""The user that a certificate names: one, or none."""

from __future__ import annotations

import pytest

from headrace_protocol.tls.identity import user_of


def certificate(*common_names: str, uris: tuple[str, ...] = ()) -> dict[str, object]:
    """As the standard library shows one."""
    return {
        "subject": (
            (("organizationName", "example"),),
            *((("commonName", name),) for name in common_names),
        ),
        "subjectAltName": (
            ("DNS", "alice.example.org"),
            *(("URI", uri) for uri in uris),
        ),
    }


@pytest.mark.parametrize(
    ("names", "uris", "user"),
    [
        (["alice"], [], "alice"),
        ([], [], None),
        (["alice", "root"], [], None),
        (["alice"], ["headrace:user/bob"], "bob"),
        ([], ["headrace:user/b%20o%2Fb"], "b o/b"),
        (["alice"], ["spiffe://example.org/bob"], "alice"),
        (["alice"], ["headrace:user/bob", "headrace:user/root"], None),
        (["alice"], ["headrace:group/bob"], "alice"),
        (["alice"], ["HEADRACE:user/bob"], "alice"),
    ],
)
def test_a_certificate_names_one_user_or_none(
    names: list[str], uris: list[str], user: str | None
) -> None:
    assert user_of(certificate(*names, uris=tuple(uris))) == user


def test_a_certificate_without_names_names_nobody() -> None:
    assert user_of({}) is None
