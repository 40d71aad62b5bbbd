"""Settings of access control in the files of both daemons: checked alike, and secrets not shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_broker.config import BrokerConfig
from headrace_broker.config import ConfigError as BrokerError
from headrace_broker.settings.files import load_config as load_broker
from headrace_daemon.access.errors import AccessError
from headrace_daemon.access.settings import AccessOptions, Secret, TokenSettings, read_access
from headrace_nameserver.config import ConfigError as NameServerError
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.config import load_config as load_nameserver
from headrace_nameserver.server import NameServer
from headrace_protocol.errors import PortableError
from headrace_protocol.rights.access import AccessSettings
from headrace_protocol.rights.credentials import Credentials
from tests.support.cli import headrace

ON = "authenticationEnabled=true"
ROOT = '{"username":"root","password":"hidden-1"}'
INNER = '{"accessKey":"inner","secretKey":"hidden-2"}'
Config = BrokerConfig | NameServerConfig
Load = Callable[..., Config]


def _broker(folder: Path, *lines: str) -> BrokerConfig:
    path = folder / "broker.conf"
    path.write_text("\n".join((f"storePathRootDir={folder / 'store'}", *lines)))
    return load_broker(path)[0]


def _nameserver(folder: Path, *lines: str) -> NameServerConfig:
    path = folder / "nameserver.conf"
    path.write_text("\n".join((f"kvConfigPath={folder / 'kv' / 'kvConfig.json'}", *lines)))
    return load_nameserver(path)


@pytest.fixture(params=[_broker, _nameserver])
def load(request: pytest.FixtureRequest) -> Load:
    return request.param


def secret_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "secret.json"
    path.write_text(text)
    path.chmod(mode)
    return path


def error_of(load: Load, folder: Path, *lines: str) -> PortableError:
    with pytest.raises((BrokerError, NameServerError)) as raised:
        load(folder, *lines)
    return raised.value


def test_nothing_is_checked_by_default(tmp_path: Path, load: Load) -> None:
    access = load(tmp_path).access_config()
    assert access.settings == AccessSettings()
    assert access[1:] == (None, None, None, False, None)


def test_tokens_need_keys_and_an_audience(tmp_path: Path, load: Load) -> None:
    lines = ("authJwksFile=jwks.json", "authJwtAudience=headrace")
    assert load(tmp_path, ON, *lines).access_config().tokens == TokenSettings(
        "jwks.json", "headrace", "", "sub"
    )
    more = ("authJwtIssuer=https://provider.example", "authJwtUserClaim=azp")
    assert load(tmp_path, ON, *lines, *more).access_config().tokens == TokenSettings(
        "jwks.json", "headrace", "https://provider.example", "azp"
    )


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["authJwksFile=jwks.json"], "authJwksFile=jwks.json: needs authJwtAudience"),
        (["authJwtAudience=a"], "authJwtAudience=a: takes effect only with authJwksFile"),
        (["authJwtIssuer=i"], "authJwtIssuer=i: takes effect only with authJwksFile"),
        (
            ["authJwksFile=jwks.json", "authJwtAudience=a", "authJwtUserClaim="],
            "authJwtUserClaim: is empty",
        ),
    ],
)
def test_wrong_settings_of_tokens_are_named(
    tmp_path: Path, load: Load, lines: list[str], reason: str
) -> None:
    assert reason in str(error_of(load, tmp_path, ON, *lines))


def test_all_settings_are_apaches(tmp_path: Path, load: Load) -> None:
    access = load(
        tmp_path,
        ON,
        "authorizationEnabled=true",
        "authenticationWhitelist=105, 106",
        "authorizationWhitelist=206,",
        f"initAuthenticationUser={ROOT}",
        f"innerClientAuthenticationCredentials={INNER}",
        "authRequiresTls=none",
        "authExportEnable=true",
        "anonymousAccess=read",
    ).access_config()
    assert access.settings == AccessSettings(
        True, True, frozenset((105, 106)), frozenset((206,)), False, "read"
    )
    assert access.initial == Credentials("root", "hidden-1")
    assert access.inner == Credentials("inner", "hidden-2")
    assert access.exports


def test_secrets_come_from_files_and_the_environment(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = secret_file(tmp_path, ROOT + "\n")
    monkeypatch.setenv("HEADRACE_INNER_CLIENT_AUTHENTICATION_CREDENTIALS", INNER)
    access = load(tmp_path, f"initAuthenticationUserFile={file}").access_config()
    assert access.initial == Credentials("root", "hidden-1")
    assert access.inner == Credentials("inner", "hidden-2")
    monkeypatch.setenv("HEADRACE_INIT_AUTHENTICATION_USER", INNER)
    other = secret_file(tmp_path, ROOT.replace("root", "first"))
    access = load(tmp_path, f"initAuthenticationUserFile={other}").access_config()
    assert access.initial == Credentials("first", "hidden-1")


@pytest.mark.parametrize(
    ("lines", "key", "reason"),
    [
        (["authorizationEnabled=true"], "authorizationEnabled", "needs authenticationEnabled=true"),
        (["authenticationWhitelist=105,x"], "authenticationWhitelist", "'x' is no request code"),
        (["authorizationWhitelist=-1"], "authorizationWhitelist", "'-1' is no request code"),
        (["authRequiresTls=maybe"], "authRequiresTls", "maybe"),
        (["initAuthenticationUser=hidden-1"], "initAuthenticationUser", "expected a line of JSON"),
        (['initAuthenticationUser={"username":"root"}'], "initAuthenticationUser", "JSON"),
        (
            ['initAuthenticationUser={"username":" ","password":"hidden-1"}'],
            "initAuthenticationUser",
            "The username is blank",
        ),
        (
            ['initAuthenticationUser={"username":"root","password":" "}'],
            "initAuthenticationUser",
            "password can not be blank",
        ),
        (
            [f"innerClientAuthenticationCredentials={ROOT}"],
            "innerClientAuthenticationCredentials",
            '{"accessKey":"NAME","secretKey":"..."}',
        ),
        (["authKeyFile=/nowhere/key"], "authKeyFile", "No such file"),
        (["initAuthenticationUserFile=/nowhere/u"], "initAuthenticationUserFile", "No such file"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line(
    tmp_path: Path, load: Load, lines: list[str], key: str, reason: str
) -> None:
    text = str(error_of(load, tmp_path, *lines))
    assert ".conf:2: " in text
    assert key in text
    assert reason in text
    assert "hidden" not in text


@pytest.mark.parametrize("key", ["initAuthenticationUser", "innerClientAuthenticationCredentials"])
def test_a_secret_has_one_place(tmp_path: Path, load: Load, key: str) -> None:
    text = ROOT if key.startswith("init") else INNER
    file = secret_file(tmp_path, text)
    error = error_of(load, tmp_path, f"{key}={text}", f"{key}File={file}")
    assert f"{key}File={file}: {key} is set, too: keep one of them" in str(error)


@pytest.mark.parametrize("key", ["initAuthenticationUserFile", "authKeyFile"])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, load: Load, key: str) -> None:
    file = secret_file(tmp_path, ROOT, 0o640)
    text = str(error_of(load, tmp_path, f"{key}={file}"))
    assert f"{key}={file}" in text
    assert f"chmod 600 {file}" in text
    assert "hidden" not in text


def test_no_text_of_the_settings_shows_a_secret(tmp_path: Path, load: Load) -> None:
    config = load(
        tmp_path,
        f"initAuthenticationUser={ROOT}",
        f"innerClientAuthenticationCredentials={INNER}",
    )
    access = config.access_config()
    for text in (repr(config), str(config), repr(access), repr(AccessOptions.of(config))):
        assert "hidden" not in text
    assert access.initial == Credentials("root", "hidden-1")


def test_an_environment_that_is_no_json_is_named() -> None:
    with pytest.raises(AccessError, match="HEADRACE_INIT_AUTHENTICATION_USER: expected"):
        read_access(
            AccessOptions.of(NameServerConfig()),
            {"HEADRACE_INIT_AUTHENTICATION_USER": "hidden"},
        )


def test_a_secret_is_shown_as_stars() -> None:
    secret = Secret("hidden")
    assert secret.get_secret_value() == "hidden"
    assert "hidden" not in f"{secret} {secret!r} {[secret]}"


# -- the broker's own ------------------------------------------------------------------------------


def test_a_running_broker_changes_none_of_them(tmp_path: Path) -> None:
    from headrace_broker.settings.access import AccessFields
    from headrace_broker.settings.listing import KEYS, RELOADABLE

    keys = {field.alias for field in AccessFields.model_fields.values()}
    assert len(keys) == 15
    assert keys <= set(KEYS)
    assert not keys & RELOADABLE


def test_other_settings_change_beside_secrets(tmp_path: Path) -> None:
    config = _broker(tmp_path, f"initAuthenticationUser={ROOT}")
    assert config.as_text()["initAuthenticationUser"] == "**********"
    config.update({"deleteWhen": "05"})
    assert config.delete_when == "05"
    assert config.access_config().initial == Credentials("root", "hidden-1")


PACKAGE = "org.apache.rocketmq.auth."


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("authenticationProvider", "authentication.provider.DefaultAuthenticationProvider"),
        (
            "authenticationMetadataProvider",
            "authentication.provider.LocalAuthenticationMetadataProvider",
        ),
        ("authenticationStrategy", "authentication.strategy.StatefulAuthenticationStrategy"),
        ("authorizationProvider", "authorization.provider.DefaultAuthorizationProvider"),
        (
            "authorizationMetadataProvider",
            "authorization.provider.LocalAuthorizationMetadataProvider",
        ),
        ("authorizationStrategy", "authorization.strategy.StatelessAuthorizationStrategy"),
    ],
)
def test_apaches_classes_are_taken_and_no_others(tmp_path: Path, key: str, name: str) -> None:
    path = tmp_path / "broker.conf"
    for value in ("", PACKAGE + name):
        path.write_text(f"storePathRootDir={tmp_path / 'store'}\n{key}={value}")
        assert load_broker(path)[1] == [f"{path}:2: {key} has no effect in this broker"]
    for value in ("com.example.Mine", PACKAGE + "Mine", "com.example." + name):
        error = error_of(_broker, tmp_path, f"{key}={value}")
        assert f"{key}={value} is not supported by this broker" in str(error)


# -- the nameserver's own --------------------------------------------------------------------------


def test_a_nameserver_needs_a_place_for_its_users(tmp_path: Path) -> None:
    path = tmp_path / "nameserver.conf"
    path.write_text(ON)
    with pytest.raises(NameServerError, match=r"authUsersPath or kvConfigPath"):
        load_nameserver(path)
    with pytest.raises(NameServerError, match=r"authUsersPath or kvConfigPath"):
        NameServer(NameServerConfig(authentication_enabled=True))
    path.write_text(f"{ON}\nauthUsersPath={tmp_path / 'users.json'}")
    assert load_nameserver(path).users_path == tmp_path / "users.json"
    assert _nameserver(tmp_path, ON).users_path == tmp_path / "kv" / "users.json"


# -- addresses that others reach -------------------------------------------------------------------

SAFE = ["authenticationEnabled=true", "authorizationEnabled=true"]


def test_three_lines_start_a_daemon_safely(tmp_path: Path, load: Load) -> None:
    error = error_of(load, tmp_path, "bindAddress=0.0.0.0")
    lines = error.problems  # type: ignore[attr-defined]
    shown = [line.strip() for line in lines if line.startswith("    ")]
    assert shown == [*SAFE, "initAuthenticationUserFile=super.json"]
    assert ".conf:2: bindAddress=0.0.0.0: other machines reach this address" in lines[0]
    file = secret_file(tmp_path, ROOT)
    given = [line.replace("super.json", str(file)) for line in shown]
    access = load(tmp_path, "bindAddress=0.0.0.0", *given).access_config()
    assert access.settings.authentication
    assert access.settings.authorization
    assert access.initial == Credentials("root", "hidden-1")


@pytest.mark.parametrize("line", ["anonymousAccess=allow", "anonymousAccess=read", ON])
def test_consent_opens_an_address(tmp_path: Path, load: Load, line: str) -> None:
    assert load(tmp_path, "bindAddress=0.0.0.0", line).bind_address == "0.0.0.0"


@pytest.mark.parametrize(
    ("words", "is_checked"),
    [
        ("need.client.auth=require", True),
        ("need.client.auth=optional", False),
        ("need.client.auth=none", False),
        ("need.client.auth=require\ntls.server.mode=permissive", False),
    ],
)
def test_certificates_of_clients_open_an_address(
    tmp_path: Path, load: Load, words: str, is_checked: bool
) -> None:
    tls = tmp_path / "tls.properties"
    tls.write_text(
        "tls.server.certPath=c\ntls.server.keyPath=k\ntls.server.trustCertPath=t\n"
        f"tls.server.{words}"
    )
    lines = "bindAddress=0.0.0.0", f"tlsConfigFile={tls}"
    if is_checked:
        assert load(tmp_path, *lines).tls_config_file == str(tls)
    else:
        assert "nobody there is checked" in str(error_of(load, tmp_path, *lines))


@pytest.mark.parametrize("kind", ["broker", "nameserver"])
def test_unusable_files_are_reported_by_the_command(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "daemon.conf"
    own = f"storePathRootDir={tmp_path / 'store'}\n" if kind == "broker" else ""
    path.write_text(f"{own}tlsConfigFile=/nowhere/tls")
    outcome = headrace(kind, "-c", str(path), "--check-config")
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("headrace: /nowhere/tls: cannot read the settings of TLS")


def test_an_unusable_file_of_tls_is_named(tmp_path: Path, load: Load) -> None:
    error = error_of(load, tmp_path, "bindAddress=0.0.0.0", "tlsConfigFile=/nowhere/tls")
    assert "tlsConfigFile=/nowhere/tls: " in str(error)
