"""Arguments of Admin's methods, checked and made plain in the call.

A number of numpy becomes an int. A type other than the annotation's is an error that names the
argument; otherwise the encoder would fail later, in words of its own.
Source: tests/clients/test_admin_arguments.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace.errors import ConfigurationError
from headrace.names import check_queue
from headrace.received import ReceivedMessage
from headrace.rights import Rule
from headrace.values import encoded_text, kind_of, plain_flag, plain_int, plain_text, shown
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.quotas import Quota
from headrace_protocol.recall_handle import RecallHandle
from headrace_protocol.statictopic.plans import Mode

if TYPE_CHECKING:
    from collections.abc import Callable

_OPTIONAL: Final = " | None"


def _text(value: object, name: str) -> str:
    text = plain_text(value, name, ConfigurationError)
    encoded_text(text, name, ConfigurationError)
    return text


def _number(value: object, name: str) -> int:
    return plain_int(value, name, ConfigurationError)


def _texts(value: object, name: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name}={shown(value)} is {kind_of(value)}: it must be a dict")
    return {
        _text(key, f"a key of {name}"): _text(each, f"{name}[{shown(key)}]")
        for key, each in value.items()
    }


def _several(plain: Callable[[object, str], Any]) -> Callable[[object, str], list[Any]]:
    def check(value: object, name: str) -> list[Any]:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise ConfigurationError(
                f"{name}={shown(value)} is {kind_of(value)}: it must be a list"
            )
        return [plain(each, f"{name}[{index}]") for index, each in enumerate(value)]

    return check


def _one_of(kind: type, way_out: str = "") -> Callable[[object, str], Any]:
    def check(value: object, name: str) -> object:
        if isinstance(value, kind):
            return value
        raise ConfigurationError(
            f"{name}={shown(value)} is {kind_of(value)}: it must be a {kind.__name__}{way_out}"
        )

    return check


def _config(value: object, name: str) -> SubscriptionGroupConfig:
    config: SubscriptionGroupConfig = _one_of(SubscriptionGroupConfig)(value, name)
    changes: dict[str, object] = {}
    for field in msgspec.structs.fields(config):
        given = getattr(config, field.name)
        if check := _OF_DEFAULT.get(type(field.default)):
            changes[field.name] = check(given, f"{name}.{field.name}")
    changes["attributes"] = _texts(config.attributes, f"{name}.attributes")
    return msgspec.structs.replace(config, **changes)


_OF_DEFAULT: Final[dict[type, Callable[[object, str], object]]] = {
    str: _text,
    int: _number,
    bool: plain_flag,
}
# By the annotation of an argument, without what stands for its absence.
CHECKS: Final[dict[str, Callable[[Any, str], object]]] = {
    "str": _text,
    "int": _number,
    "bool": plain_flag,
    "Mapping[str, str]": _texts,
    "Collection[str]": _several(_text),
    "Collection[int]": _several(_number),
    "Collection[Rule]": _several(_one_of(Rule)),
    "MessageQueue": lambda queue, _name: check_queue(queue),
    "SubscriptionGroupConfig": _config,
    "Mode": _one_of(Mode),
    "Quota": _one_of(Quota),
    "RecallHandle": _one_of(RecallHandle, "; decode_recall_handle makes one of a text"),
    "ReceivedMessage": _one_of(ReceivedMessage),
    "Mapping[str, ConsumerConnection]": _one_of(Mapping, "; members returns one"),
    "list[BrokerProblem]": _one_of(list),
}


def plain_arguments(method: Callable[..., Any]) -> Callable[..., Any]:
    """An async method that gets plain arguments. Raises ConfigurationError for wrong types."""
    signature = inspect.signature(method)
    checks = {
        name: check
        for name, parameter in signature.parameters.items()
        if (check := CHECKS.get(str(parameter.annotation).removesuffix(_OPTIONAL)))
    }
    optional = {
        name
        for name, parameter in signature.parameters.items()
        if str(parameter.annotation).endswith(_OPTIONAL)
    }

    @wraps(method)
    async def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name in checks and not (value is None and name in optional):
                bound.arguments[name] = checks[name](value, name)
        return await method(*bound.args, **bound.kwargs)

    return checked
