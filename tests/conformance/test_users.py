"""Our clients as users of an Apache RocketMQ broker that serves users only: they sign."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from headrace import Admin, Consumer, Message, Producer, PullConsumer, blocking
from headrace.errors import AccessDenied
from tests.conformance.peer import Peer, quick_peer
from tests.conformance.test_python_client import take

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

AUTH = "org.apache.rocketmq.auth"
SETTINGS = {
    "authenticationEnabled": "true",
    "authorizationEnabled": "true",
    "authenticationMetadataProvider": (
        f"{AUTH}.authentication.provider.LocalAuthenticationMetadataProvider"
    ),
    "authorizationMetadataProvider": (
        f"{AUTH}.authorization.provider.LocalAuthorizationMetadataProvider"
    ),
    "authenticationProvider": f"{AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authorizationProvider": f"{AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "initAuthenticationUser": json.dumps({"username": "root", "password": "rootsecret"}),
    "innerClientAuthenticationCredentials": json.dumps(
        {"accessKey": "inner", "secretKey": "innersecret"}
    ),
}
ROOT: Any = {"user": "root", "password": "rootsecret"}
TOPIC = "Signed"


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with quick_peer("apache", settings=SETTINGS) as started:
        with blocking.Admin(nameserver=started.nameserver, **ROOT) as admin:
            admin.create_topic(TOPIC, queues=2)
        yield started


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_what_a_user_may_works(peer: Peer, backend: str) -> None:
    async def main() -> None:
        at: Any = {"nameserver": peer.nameserver, **ROOT}
        async with Producer(**at) as producer:
            await producer.send(Message(TOPIC, b"one", key="k"))
            await producer.send_many([Message(TOPIC, b"many") for _ in range(10)])
        with anyio.fail_after(60):
            async with Consumer(f"group-{backend}", TOPIC, start="earliest", **at) as consumer:
                assert len(await take(consumer, 11)) == 11
                await consumer.commit()
        async with PullConsumer(**at) as reader:
            await reader.assign(await reader.queues(TOPIC))
            assert await reader.receive_many()

    anyio.run(main, backend=backend)


def test_a_wrong_password_is_one_error(peer: Peer) -> None:
    with (
        blocking.Producer(nameserver=peer.nameserver, user="root", password="hidden") as producer,
        pytest.raises(AccessDenied, match=r"check signature failed.*HEADRACE_PASSWORD") as caught,
    ):
        producer.send(Message(TOPIC, b"x"))
    assert "hidden" not in str(caught.value)


async def test_a_user_without_rights_is_denied_by_name(peer: Peer) -> None:
    async with Admin(nameserver=peer.nameserver, **ROOT) as admin:
        await admin.create_user("alice", "alicepw")
    async with Producer(nameserver=peer.nameserver, user="alice", password="alicepw") as producer:
        with pytest.raises(AccessDenied, match="User:alice has no permission to access Topic:Sig"):
            await producer.send(Message(TOPIC, b"x"))
