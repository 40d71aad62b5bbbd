"""The few requests that show whether a peer is ready, written apart from the code under test."""

from __future__ import annotations

import base64
import hmac
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

GET_ROUTEINFO_BY_TOPIC = 105
UPDATE_BROKER_CONFIG = 25
SEND_MESSAGE_V2 = 310
AUTH_CREATE_USER, AUTH_CREATE_ACL = 3001, 3006
SUCCESS = 0
# Every broker registers this template topic; a route for it means that clients can start.
TEMPLATE_TOPIC = "TBW102"
ATTEMPT_TIMEOUT_S = 3
ANSWER_TIMEOUT_S = 60
PAUSE_S = 0.005
REGISTRATION_PAUSE_S = 0.2
# Access key and secret.
Signer = tuple[str, str]


class Answer(NamedTuple):
    """fields: those of the header."""

    code: int
    remark: str
    fields: dict[str, str]
    body: bytes


NO_ANSWER = Answer(-1, "", {}, b"")


def answer(address: str, code: int, fields: Mapping[str, str], body: bytes = b"") -> Answer:
    """The answer to one request, on a connection of its own."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), ANSWER_TIMEOUT_S) as connection:
        connection.sendall(_frame(code, dict(fields), body))
        return _read(connection)


def wait_for_route(
    nameserver: str,
    timeout_s: float,
    topic: str = TEMPLATE_TOPIC,
    signer: Signer | None = None,
) -> None:
    """Returns once the nameserver knows a broker with it; TimeoutError after ``timeout_s``."""
    _retry(nameserver, _frame(GET_ROUTEINFO_BY_TOPIC, {"topic": topic}, b"", signer), timeout_s)


def register(nameserver: str, broker: str, timeout_s: float, signer: Signer | None = None) -> None:
    """Make an Apache broker register now; TimeoutError after ``timeout_s``.

    At its start it registers only with nameservers that it has connected to by then, and otherwise
    10 s later. A change of its permission makes it register at once.
    """
    route = _frame(GET_ROUTEINFO_BY_TOPIC, {"topic": TEMPLATE_TOPIC}, b"", signer)
    permission = _frame(UPDATE_BROKER_CONFIG, {}, b"brokerPermission=6", signer)
    deadline = time.monotonic() + timeout_s
    # Others may have registered before.
    while broker.encode() not in _answer_to(nameserver, route).body:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{broker} did not register with {nameserver} in {timeout_s} s")
        _answer_to(broker, permission)
        time.sleep(REGISTRATION_PAUSE_S)


def wait_for_send(broker: str, timeout_s: float, signer: Signer | None = None) -> None:
    """Returns once the broker has stored a message; TimeoutError after ``timeout_s``."""
    header = {
        "a": "FIRST_SEND",
        "b": "FIRST_SEND",
        "c": TEMPLATE_TOPIC,
        "d": "4",
        "e": "0",
        "f": "0",
        "g": str(time.time_ns() // 1_000_000),
        "h": "0",
        "i": "",
        "j": "0",
        "m": "false",
    }
    _retry(broker, _frame(SEND_MESSAGE_V2, header, b"first", signer), timeout_s)


def create_user(broker: str, user: Signer, rules: dict[str, list[str]], by: Signer) -> None:
    """A Normal user with these actions on resources; TimeoutError if the broker refuses."""
    name, password = user
    made = json.dumps({"username": name, "password": password, "userType": "Normal"})
    create = _frame(AUTH_CREATE_USER, {"username": name}, made.encode(), by)
    _retry(broker, create, ATTEMPT_TIMEOUT_S)
    entries = [
        {"resource": resource, "actions": actions, "decision": "Allow"}
        for resource, actions in rules.items()
    ]
    subject = f"User:{name}"
    acl = json.dumps({"subject": subject, "policies": [{"entries": entries}]})
    permit = _frame(AUTH_CREATE_ACL, {"subject": subject}, acl.encode(), by)
    _retry(broker, permit, ATTEMPT_TIMEOUT_S)


def _retry(address: str, frame: bytes, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while _answer_to(address, frame).code != SUCCESS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{address} did not answer with success within {timeout_s} s")
        time.sleep(PAUSE_S)


def _answer_to(address: str, frame: bytes) -> Answer:
    """The answer, or NO_ANSWER."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), ATTEMPT_TIMEOUT_S) as connection:
            connection.sendall(frame)
            return _read(connection)
    except OSError:
        return NO_ANSWER


def _read(connection: socket.socket) -> Answer:
    stream = connection.makefile("rb")
    prefix = stream.read(8)
    if len(prefix) < 8:
        raise ConnectionResetError
    size, mark = struct.unpack(">II", prefix)
    header_bytes = mark & 0xFFFFFF
    header = json.loads(stream.read(header_bytes))
    body = stream.read(size - 4 - header_bytes)
    fields = header.get("extFields") or {}
    return Answer(int(header["code"]), header.get("remark") or "", fields, body)


def _frame(
    code: int, fields: dict[str, str], body: bytes = b"", signer: Signer | None = None
) -> bytes:
    if signer is not None:
        fields = {**fields, "AccessKey": signer[0]}
        text = "".join(fields[name] for name in sorted(fields)).encode()
        digest = hmac.digest(signer[1].encode(), text + body, "sha1")
        fields["Signature"] = base64.b64encode(digest).decode()
    command = {"code": code, "extFields": fields, "flag": 0, "language": "JAVA", "opaque": 1}
    header = json.dumps({**command, "serializeTypeCurrentRPC": "JSON", "version": 513}).encode()
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body
