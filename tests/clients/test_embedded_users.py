"""Embedded brokers with users: each has its own rules alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import headrace
from headrace import Message, Rule, blocking
from headrace.errors import AccessDenied, ConfigurationError, HeadraceError, LogInFailed
from tests.support.tokens import ec_key, public, token, write_keys

USERS = {
    "shop": [Rule("Topic:orders", ("Pub", "Create"))],
    "audit": [Rule("Topic:*", ("Sub",)), Rule("Group:audit*", ("Sub", "Create"))],
    "nobody": [],
}


@pytest.mark.slow
async def test_each_user_has_its_own_rules() -> None:
    async with headrace.embedded(memory=True, users=USERS) as mq:
        async with mq.producer(user="shop") as producer:
            await producer.send(Message("orders", b"one"))
            with pytest.raises(AccessDenied, match="User:shop has no permission"):
                await producer.send(Message("salaries", b"two"))
        async with mq.consumer("audit_1", "orders", user="audit") as consumer:
            batch = await consumer.receive(1)
            assert batch is not None
            assert [message.body for message in batch] == [b"one"]
        async with mq.admin(user="nobody") as admin:
            assert await admin.topics() == []
        async with mq.admin() as admin:
            assert "orders" in await admin.topics()
            assert await admin.delete_user("shop") == []
        with pytest.raises(HeadraceError, match="shop"):
            async with mq.producer(user="shop") as producer:
                await producer.send(Message("orders", b"three"))


@pytest.mark.slow
async def test_users_may_come_by_tokens(tmp_path: Path) -> None:
    keys = tmp_path / "jwks.json"
    write_keys(keys, public(ec_key(), "k"))
    soon = time.time() + 60
    async with headrace.embedded(memory=True, users=USERS, jwks_file=keys) as mq:
        async with mq.producer(token=lambda: token(sub="shop", exp=soon)) as producer:
            await producer.send(Message("orders", b"one"))
            with pytest.raises(AccessDenied, match="User:shop has no permission"):
                await producer.send(Message("salaries", b"two"))
        async with mq.producer(token=token(sub="nobody", exp=0)) as producer:
            with pytest.raises(LogInFailed, match="it has expired"):
                await producer.send(Message("orders", b"one"))
    with pytest.raises(ConfigurationError, match="jwks_file needs users"):
        headrace.embedded(jwks_file=keys)


@pytest.mark.slow
def test_passwords_are_needed_and_not_shown(tmp_path: Path) -> None:
    with headrace.embedded(tmp_path, users=USERS) as mq:
        with blocking.Producer(**mq.options(user="shop")) as producer:
            producer.send(Message("orders", b"one"))
        for wrong in ({"user": ""}, {"user": "shop", "password": "guess"}):
            with (
                pytest.raises(HeadraceError),
                blocking.Producer(**mq.options(**wrong)) as producer,
            ):
                producer.send(Message("orders", b"two"))
        assert not [word for word in mq.passwords.values() if word in repr(mq)]
        first = mq.passwords
    # Users of before get the rules of now.
    with headrace.embedded(tmp_path, users={"shop": [], "other": USERS["shop"]}) as mq:
        assert mq.passwords["root"] == first["root"]
        with (
            pytest.raises(HeadraceError),
            blocking.Producer(**mq.options(user="shop")) as producer,
        ):
            producer.send(Message("orders", b"two"))
        with blocking.Producer(**mq.options(user="other")) as producer:
            assert producer.send(Message("orders", b"two")).queue_offset >= 0


@pytest.mark.slow
def test_without_users_everyone_is_served() -> None:
    with headrace.embedded() as mq:
        assert mq.options() == {"nameserver": mq.nameserver, "connect": mq.connect}
        with blocking.Producer(**mq.options()) as producer:
            producer.send(Message("orders", b"one"))
        assert not (mq.data / "config" / "security").exists()
