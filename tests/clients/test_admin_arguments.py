"""Every argument of every method of Admin is checked in the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import Admin, Message, MessageQueue, embedded
from headrace.admin.arguments import CHECKS, plain_arguments
from headrace.errors import ConfigurationError
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.quotas import Quota
from headrace_protocol.recall_handle import RecallHandle
from headrace_protocol.statictopic.plans import Mode

# What ``check_start`` takes care of.
OTHERS = {"Start"}
# A value of each kind that is right.
RIGHT: dict[str, Any] = {
    "str": "T",
    "int": 1,
    "bool": True,
    "Mapping[str, str]": {},
    "Collection[str]": [],
    "Collection[int]": [],
    "Collection[Rule]": [],
    "MessageQueue": MessageQueue("T", "b", 0),
    "SubscriptionGroupConfig": SubscriptionGroupConfig(group_name="g"),
    "Mode": Mode.STRICT,
    "Quota": Quota(of="user", name="u"),
    "RecallHandle": RecallHandle("T", "b", 1, "id"),
    "ReceivedMessage": None,
    "Mapping[str, ConsumerConnection]": {},
    "list[BrokerProblem]": [],
}


def kind(parameter: inspect.Parameter) -> str:
    return str(parameter.annotation).removesuffix(" | None")


def methods() -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for name, method in inspect.getmembers(Admin, inspect.iscoroutinefunction)
        if not name.startswith("_") and name not in {"start", "stop"}
    }


ARGUMENTS = [
    (name, parameter)
    for name, method in methods().items()
    for parameter in inspect.signature(method).parameters.values()
    if parameter.name != "self"
]
CHECKED = [(name, each.name) for name, each in ARGUMENTS if kind(each) in CHECKS]


def test_no_kind_of_argument_is_unknown() -> None:
    assert {kind(each) for _, each in ARGUMENTS} <= CHECKS.keys() | OTHERS
    assert len(CHECKED) > 80


@pytest.mark.parametrize(("method", "argument"), CHECKED, ids=str)
async def test_another_type_is_refused_by_name(method: str, argument: str) -> None:
    given = {
        each.name: RIGHT[kind(each)]
        for name, each in ARGUMENTS
        if name == method and each.default is inspect.Parameter.empty and kind(each) in RIGHT
    }
    admin = Admin(nameserver="127.0.0.1:1")
    for wrong in (object(), 1.5, b"T"):
        with pytest.raises(ConfigurationError, match=f"{argument}=") as error:
            await getattr(admin, method)(**given | {argument: wrong, **others(method, argument)})
        assert "msgspec" not in str(error.value)


def others(method: str, argument: str) -> dict[str, object]:
    """Required arguments of a kind that is not checked."""
    return {
        each.name: None
        for name, each in ARGUMENTS
        if name == method
        and each.name != argument
        and each.default is inspect.Parameter.empty
        and kind(each) in OTHERS
    }


@pytest.mark.parametrize(
    ("kind", "given", "plain"),
    [
        ("int", np.int64(7), 7),
        ("int | None", None, None),
        ("bool", np.True_, True),
        ("str", np.str_("T"), "T"),
        ("Mapping[str, str]", {np.str_("a"): "b"}, {"a": "b"}),
        ("Collection[int]", np.array([1, 2]), [1, 2]),
        ("Collection[str]", {"a": 1}, ["a"]),
    ],
)
async def test_plain_values_reach_the_method(kind: str, given: object, plain: object) -> None:
    async def method(value: Any) -> Any:
        return value

    method.__annotations__["value"] = kind
    found = await plain_arguments(method)(given)
    assert (type(found), found) == (type(plain), plain)


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        ("int", True, "value=True is bool: it must be an int"),
        ("str", "\ud800", "has a lone surrogate"),
        ("Mapping[str, str]", {"a": 5}, r"value\['a'\]=5 is int: it must be str"),
        ("Collection[str]", "broker-a", "value='broker-a' is str: it must be a list"),
        ("Collection[int]", ["1"], r"value\[0\]='1' is str: it must be an int"),
        (
            "SubscriptionGroupConfig",
            SubscriptionGroupConfig(group_name="g", retry_max_times="3"),  # type: ignore[arg-type]
            "value.retry_max_times='3' is str: it must be an int",
        ),
    ],
)
async def test_a_refusal_names_the_place(kind: str, given: object, told: str) -> None:
    async def method(value: Any) -> None:
        raise AssertionError(value)

    method.__annotations__["value"] = kind
    with pytest.raises(ConfigurationError, match=told):
        await plain_arguments(method)(given)


async def test_numbers_of_numpy_do_what_plain_ones_do() -> None:
    async with embedded(memory=True) as mq, mq.admin() as admin:
        await admin.create_topic("T", queues=np.int64(2), perm=np.int32(6))  # type: ignore[arg-type]
        config = SubscriptionGroupConfig(group_name="g", retry_max_times=np.int16(3))  # type: ignore[arg-type]
        await admin.create_group(config)
        assert (await admin.group("g")).retry_max_times == 3
        async with mq.producer() as producer:
            queue = (await producer.queues("T"))[0]
            await producer.send(Message("T", b"x", key="k"), queue=queue)
        assert await admin.reset_queue("g", queue, np.int64(1)) == {queue: 1}  # type: ignore[arg-type]
        found = await admin.query_by_key("T", "k", max_count=np.int8(1), begin_ms=np.uint64(0))  # type: ignore[arg-type]
        assert len(found) == 1
