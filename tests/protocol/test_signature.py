"""Signatures of Apache RocketMQ's clients, as they were recorded."""

from __future__ import annotations

import base64
import hmac

import pytest

from headrace_protocol.rights.signature import SIGNATURE, is_signed, sign, signed_text

PROPERTIES = "UNIQ_KEY\x017F00000150D54E0E2F2A83D16F170000\x02WAIT\x01true\x02"


@pytest.mark.parametrize(
    ("secret", "fields", "body", "expected"),
    [
        ("rootsecret", {"AccessKey": "root"}, b"", "WbQNCQ0xgsSuMzo1JALyJlrPRIY="),
        ("innersecret", {"AccessKey": "inner"}, b"", "cDmYW9iYFHRcS6iYD/ctLPSJVtA="),
        (
            "rootsecret",
            {"username": "alice", "AccessKey": "root"},
            b'{"password":"alicepw","username":"alice"}',
            "8ro/Otvv1GaAgS5jCshNLUIAlIc=",
        ),
        (
            "rootsecret",
            {
                "topicFilterType": "SINGLE_TAG",
                "order": "false",
                "topicSysFlag": "0",
                "force": "false",
                "AccessKey": "root",
                "attributes": "",
                "writeQueueNums": "2",
                "topic": "T1",
                "perm": "6",
                "defaultTopic": "TBW102",
                "readQueueNums": "2",
            },
            b"",
            "oTKqoTrbUjp1TmVU0dNDTXZThgk=",
        ),
        (
            "acl_4d8y2ya_secret3",
            {
                "AccessKey": "acl_4d8y2ya_u2",
                "a": "acl_4d8y2ya_p4",
                "b": "acl_4d8y2ya_t1",
                "c": "TBW102",
                "d": "4",
                "e": "1",
                "f": "0",
                "g": "1795702740760",
                "h": "0",
                "i": PROPERTIES,
                "j": "0",
                "k": "false",
                "m": "false",
                "n": "broker-a",
            },
            b"sync",
            "r6QV6G6+nyeSJGejTrqhhwRAUwY=",
        ),
    ],
)
def test_requests_are_signed_as_apache_signs_them(
    secret: str, fields: dict[str, str], body: bytes, expected: str
) -> None:
    assert sign(secret, fields, body) == expected
    assert sign(secret, {**fields, "Signature": "what was there"}, body) == expected
    assert sign(secret, fields, body + b"x") != expected


def test_fields_are_ordered_as_java_orders_strings() -> None:
    names = ["é", "a", "_x", "Zz", "AccessKey", "A", "\U0001f600", "\uffff"]
    assert signed_text({name: f"{name} " for name in names}) == (
        "A AccessKey Zz _x a é \U0001f600 \uffff "
    )


def test_old_clients_leave_out_a_field() -> None:
    fields = {"AccessKey": "a", "_UNIQUE_KEY_QUERY": "true"}
    assert signed_text(fields) == "atrue"
    assert signed_text(fields, with_unique_key=False) == "a"


def test_a_stranger_makes_nobody_sort_a_header_full_of_fields() -> None:
    for count, is_valid in ((100, True), (200, False)):
        fields = {f"field {number}": "x" for number in range(count)}
        fields[SIGNATURE] = sign("secret", fields)
        assert is_signed("secret", fields, b"", 513) is is_valid


@pytest.mark.parametrize("body_bytes", [0, 32 * 1024, 32 * 1024 + 1])
def test_a_body_of_any_size_follows_the_fields(body_bytes: int) -> None:
    body = b"x" * body_bytes
    digest = hmac.digest(b"secret", b"alice" + body, "sha1")
    signature = sign("secret", {"AccessKey": "alice"}, memoryview(body))
    assert signature == base64.b64encode(digest).decode()
