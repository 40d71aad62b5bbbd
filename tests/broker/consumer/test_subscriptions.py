"""Settings of consumer groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace_broker.consumer.subscriptions import SubscriptionGroups
from headrace_broker.host_budget import Host
from headrace_broker.store.files.config_file import ConfigFile
from headrace_protocol import fastjson
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from tests.support.golden import STORES, golden_store

HOST = Host(b"\x7f\0\0\1")
NOW_MS = 1_700_000_000_000


@dataclass
class Policy:
    auto_create_subscription_group: bool = True


def open_groups(folder: Path, policy: Policy | None = None) -> SubscriptionGroups:
    file = ConfigFile(folder / "subscriptionGroup.json")
    return SubscriptionGroups(policy or Policy(), file, lambda: NOW_MS)


def test_a_new_broker_has_the_built_in_groups(tmp_path: Path) -> None:
    names = {group.group_name for group in open_groups(tmp_path).all()}
    golden = fastjson.loads((golden_store("clean") / "config/subscriptionGroup.json").read_bytes())
    made_by_clients = {"g_push", "g_retry", "g_orderly", "g_lite", "g_manifest"}
    assert names == golden["subscriptionGroupTable"].keys() - made_by_clients


@pytest.mark.parametrize("name", STORES)
def test_a_file_of_the_peer_is_kept(name: str, tmp_path: Path) -> None:
    original = (golden_store(name) / "config/subscriptionGroup.json").read_bytes()
    (tmp_path / "subscriptionGroup.json").write_bytes(original)
    open_groups(tmp_path).put(SubscriptionGroupConfig(group_name="new"))
    before = fastjson.loads(original)
    after = fastjson.loads((tmp_path / "subscriptionGroup.json").read_bytes())
    assert after["subscriptionGroupTable"].pop("new")["retryMaxTimes"] == 16
    assert after["subscriptionGroupTable"] == before["subscriptionGroupTable"]
    assert after["forbiddenTable"] == before["forbiddenTable"]
    assert after["dataVersion"]["counter"] == before["dataVersion"]["counter"] + 1


def test_a_group_is_made_when_it_is_asked_for(tmp_path: Path) -> None:
    groups = open_groups(tmp_path)
    before = groups.change_count
    assert groups.get("g") is None
    assert groups.get_or_create("g", HOST) == SubscriptionGroupConfig(group_name="g")
    assert groups.get_or_create("g", HOST) is groups.get("g")
    assert groups.change_count == before + 1
    assert open_groups(tmp_path).get("g") == groups.get("g")
    assert groups.delete("g")
    assert not groups.delete("g")
    assert open_groups(tmp_path).get("g") is None


def test_no_group_is_made_when_that_is_off(tmp_path: Path) -> None:
    policy = Policy()
    groups = open_groups(tmp_path, policy)
    policy.auto_create_subscription_group = False
    with pytest.raises(RequestError, match="autoCreateSubscriptionGroup is off") as error:
        groups.check_consumable("g", HOST)
    assert error.value.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


def test_a_group_that_may_not_consume(tmp_path: Path) -> None:
    groups = open_groups(tmp_path)
    groups.put(SubscriptionGroupConfig(group_name="g", consume_enable=False))
    with pytest.raises(RequestError, match="consumeEnable is false") as error:
        groups.check_consumable("g", HOST)
    assert error.value.code == ResponseCode.NO_PERMISSION


@pytest.mark.parametrize("name", ["", "a b", "g" * 121, "@"])
def test_names_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError) as error:
        open_groups(tmp_path).get_or_create(name, HOST)
    assert error.value.code == ResponseCode.INVALID_PARAMETER
