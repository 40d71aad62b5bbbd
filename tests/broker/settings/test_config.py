"""Settings: every wrong line is named with what was expected, before a file is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conf import generate
from headrace_broker import main as broker_main
from headrace_broker.cluster.expected_store import check_store
from headrace_broker.config import BrokerConfig, ConfigError
from headrace_broker.processors.admin_broker import AdminBrokerProcessor
from headrace_broker.settings.apache_keys import EXPECTED_VALUES, WITHOUT_EFFECT
from headrace_broker.settings.files import load_config, parse_properties
from headrace_broker.settings.listing import settings
from headrace_broker.settings.of_store import retention, store_settings
from headrace_broker.settings.setting import Effect
from tests.support.broker import BrokerUnderTest


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return tmp_path / "broker.conf"


def problems(conf: Path, text: str) -> list[str]:
    conf.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(conf)
    return [problem.removeprefix(f"{conf}:") for problem in error.value.problems]


def test_a_file_of_the_peer_starts_this_broker(conf: Path, tmp_path: Path) -> None:
    conf.write_text(
        "# as conf/broker.conf of Apache RocketMQ\n"
        "brokerClusterName = DefaultCluster\n"
        "brokerName = broker-a\n"
        "brokerId = 0\n"
        "deleteWhen = 04\n"
        "fileReservedTime = 48\n"
        "brokerRole = ASYNC_MASTER\n"
        "flushDiskType = SYNC_FLUSH\n"
        "\n"
        "! the other comment\n"
        "namesrvAddr=127.0.0.1:9876; [::1]:9877\n"
        f"storePathRootDir={tmp_path}/store\n"
        f"storePathCommitLog={tmp_path}/store/commitlog\n"
    )
    config, warnings = load_config(conf)
    assert config.nameservers == ["127.0.0.1:9876", "[::1]:9877"]
    assert config.is_sync_flush
    assert config.file_reserved_time == 48
    assert warnings == [f"{conf}:7: brokerRole has no effect in this broker"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("brokerNam=a", "1: unknown key brokerNam: did you mean brokerName?"),
        ("\nq=a", "2: unknown key q: see conf/broker.conf for all keys"),
        ("listenPort=many", "1: listenPort=many: expected a whole number"),
        ("listenPort=65536", "1: listenPort=65536: expected at most 65535"),
        ("brokerId=1", "1: brokerId=1: expected at most 0"),
        ("flushDiskType=x", "1: flushDiskType=x: expected 'ASYNC_FLUSH' or 'SYNC_FLUSH'"),
        ("brokerName=a b", "1: brokerName=a b: use only letters, digits"),
        ("namesrvAddr=a", "1: namesrvAddr=a: 'a' is not an address: expected HOST:PORT"),
        ("namesrvAddr=http://a:9876", "1: namesrvAddr=http://a:9876: 'http://a:9876' is a URL"),
        ("namesrvAddr=a:1;::1:9876", "1: namesrvAddr=a:1;::1:9876: '::1:9876' is not an address"),
        ("namesrvAddr=a:1,b:1", "1: namesrvAddr=a:1,b:1: 'a:1,b:1': separate addresses by semi"),
        ("monitorPort=10911", "1: monitorPort=10911: listenPort is the same port"),
        ("monitorPort=10909", "1: monitorPort=10909: fastListenPort is the same port"),
        ("listenPort=1\nfastListenPort=1", "2: fastListenPort=1: listenPort is the same port"),
        ("brokerIP1=localhost", "1: brokerIP1=localhost: expected an IPv4 or IPv6 address"),
        ("brokerIP1=999.1.1.1", "1: brokerIP1=999.1.1.1: expected an IPv4 or IPv6 address"),
        ("listenPort", "1: expected key=value, found 'listenPort'"),
        ("=5", "1: expected key=value, found '=5'"),
        ("brokerName=a\\\nb=c", "1: brokerName continues in the next line: write it in one line"),
        ("brokerRole=SLAVE", "1: brokerRole=SLAVE is not supported by this broker: expected"),
        (
            "storePathCommitLog=/elsewhere",
            "1: storePathCommitLog=/elsewhere: expected",
        ),
    ],
)
def test_a_wrong_line_is_named(conf: Path, text: str, problem: str) -> None:
    found = problems(conf, text)
    assert found[0].startswith(problem), found


@pytest.mark.parametrize("address", ["", "192.0.2.7", "2001:db8::7"])
def test_an_address_for_clients(conf: Path, tmp_path: Path, address: str) -> None:
    conf.write_text(
        f"brokerIP1={address}\nbindAddress=::\nanonymousAccess=allow\n"
        f"storePathRootDir={tmp_path}/store\n"
    )
    assert load_config(conf)[0].broker_ip1 == address


def test_a_key_that_stands_twice_names_both_lines(conf: Path) -> None:
    assert problems(conf, "listenPort=1\n\nlistenPort=2") == [
        f"3: listenPort was set at {conf}:1: keep one of them"
    ]


def test_all_wrong_lines_are_named_at_once(conf: Path) -> None:
    found = problems(conf, "maxMessageSize=0\nlistenPort=x\nautoCreateTopicEnable=maybe")
    assert [problem[:2] for problem in found] == ["1:", "2:", "3:"]
    found = problems(conf, "brokerNam=a\nlistenPort=x\nautoCreateTopicEnable=maybe")
    assert found == [
        "1: unknown key brokerNam: did you mean brokerName?",
        "2: listenPort=x: expected a whole number",
        "3: autoCreateTopicEnable=maybe: expected true or false",
    ]


def test_no_file(conf: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read settings: .*No such file"):
        load_config(conf)


def test_a_store_without_a_parent(conf: Path, tmp_path: Path) -> None:
    conf.write_text(f"storePathRootDir={tmp_path}/a/b")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a does not exist: create it first"):
        load_config(conf)
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a is not a directory"):
        load_config(conf)
    assert not (tmp_path / "a/b").exists()


def test_a_store_where_this_user_may_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write everywhere, so the answer of the system is given here.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="this user may not write to"):
        BrokerConfig(store_path_root_dir=tmp_path).check_paths()


@pytest.mark.parametrize("left", [False, True], ids=["no folder", "an empty folder"])
def test_an_unmounted_store_does_not_become_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, left: bool
) -> None:
    root, conf = tmp_path / "store", tmp_path / "broker.conf"
    broker = BrokerUnderTest(tmp_path)
    broker.create_topic("T")
    broker.store_message("T", 0)
    broker.close()
    conf.write_text(f"storePathRootDir={root}\nexpectStore=true\n")
    assert broker_main.main(["-c", str(conf), "--check-config"]) == 0
    root.rename(tmp_path / "mounted")
    if left:
        root.mkdir()
    capsys.readouterr()
    config = load_config(conf)[0]  # for `tier restore`
    for arguments in ([], ["--check-config"]):
        assert broker_main.main(["-c", str(conf), *arguments]) == 2
        told = capsys.readouterr().err
        assert f"storePathRootDir={root}: there is no store, and expectStore=true" in told
    with pytest.raises(ConfigError, match="mount its disk"):
        check_store(config)
    assert root.exists() == left
    assert not left or not list(root.iterdir())


def test_the_store_is_told_in_its_own_units(tmp_path: Path) -> None:
    config = BrokerConfig(
        store_path_root_dir=tmp_path,
        mapped_file_size_consume_queue=2001,
        flush_commit_log_least_pages=3,
        file_reserved_time=2,
        flush_disk_type="SYNC_FLUSH",
    )
    store = store_settings(config, b"12345678")
    assert store.consume_queue_file_bytes == 2020
    assert store.flush_least_bytes == 3 * 4096
    assert store.retention.reserved_ms == 7_200_000
    assert store.flush == "sync"
    assert store.store_host == b"12345678"


def test_settings_that_change_retention_say_so(tmp_path: Path) -> None:
    other = {"true": "false", "false": "true", "04": "05"}
    for setting in settings():
        if setting.reloadable and setting.default is not None:
            config = BrokerConfig(store_path_root_dir=tmp_path)
            before, default = retention(config), setting.default
            changed = other.get(default) or (default.isdecimal() and str(int(default) - 1))
            try:
                effects = config.update({setting.key: changed or default})
            except ConfigError:  # at its minimum
                effects = config.update({setting.key: str(int(default) + 1)})
            is_changed = retention(config) != before
            assert (Effect.RETENTION in effects) is is_changed, setting.key


def test_every_effect_has_its_work(broker: BrokerUnderTest) -> None:
    assert broker.part(AdminBrokerProcessor)._effects.keys() == set(Effect)
    broker.close()


def test_an_update_is_checked_as_a_whole(tmp_path: Path) -> None:
    config = BrokerConfig(store_path_root_dir=tmp_path)
    config.update({"brokerPermission": "4", "autoCreateTopicEnable": "false"})
    assert (config.broker_permission, config.auto_create_topic_enable) == (4, False)
    with pytest.raises(ConfigError, match="brokerPermission=9"):
        config.update({"autoCreateTopicEnable": "true", "brokerPermission": "9"})
    assert not config.auto_create_topic_enable


def test_settings_as_text_make_the_same_settings(tmp_path: Path) -> None:
    config = BrokerConfig(store_path_root_dir=tmp_path, broker_name="b", long_polling_enable=False)
    lines = "\n".join(f"{key}={value}" for key, value in config.as_text().items())
    values, _ = parse_properties(lines, "text")
    assert BrokerConfig.model_validate(values) == config


def test_no_key_is_ours_and_only_the_peers() -> None:
    keys = {setting.key for setting in settings()}
    assert not keys & (WITHOUT_EFFECT | EXPECTED_VALUES.keys())
    assert not WITHOUT_EFFECT & EXPECTED_VALUES.keys()


def test_every_setting_is_explained() -> None:
    assert all(setting.explanation for setting in settings())


@pytest.mark.parametrize("path", sorted(generate.FILES))
def test_samples_and_docs_are_up_to_date(path: str) -> None:
    assert (generate.ROOT / path).read_text() == generate.FILES[path](), (
        "run: python -m conf.generate"
    )


def test_the_sample_is_a_file_of_settings(conf: Path, tmp_path: Path) -> None:
    lines = generate.broker_conf().splitlines()
    wanted = [line[1:] for line in lines if line.startswith("#") and line[1:2].isalpha()]
    set_lines = [line for line in wanted if not line.endswith("=")]
    conf.write_text("\n".join([*set_lines, f"storePathRootDir={tmp_path}/store"]))
    config, warnings = load_config(conf)
    assert warnings == []
    expected = BrokerConfig(store_path_root_dir=tmp_path / "store")
    assert config == expected
