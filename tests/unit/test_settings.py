"""Settings: which source wins, and what is said about a wrong value, in one line."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from penstock import settings
from penstock.errors import BadSetting, ConfigError
from penstock.settings import Settings
from penstock.wire import login


def loaded(tmp_path: Path, content: str | bytes) -> Settings:
    path = tmp_path / "settings.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Settings.load(env={}, file=path)


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("servers: [file:1]\nuser: file\npassword: file\ntimeout: 2\ndomain:\n")
    env = {"PENSTOCK_SETTINGS": str(path), "PENSTOCK_USER": "env", "PENSTOCK_PASSWORD": "env"}
    made = Settings.load(env=env, password="argument", domain=None)
    assert made == Settings(servers=("nats://file:1",), user="env", password="argument", timeout=2.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("servers: 5", "servers must be a list of URLs"),
        ("servers: {a: b}", "servers must be a list of URLs"),
        ("password: 1234", "password must be text, got int; put it in quotes"),
        ("timeout: soon", "timeout must be a number of seconds"),
        ("timeout: true", "timeout must be a number of seconds"),
        ("tls_first: maybe", "tls_first is true or false"),
        ("server: x", "did you mean 'servers'"),
        ("just text", "expected `name: value` lines"),
        ("servers: [a\nuser: {{", "line 2, column 5: "),
        ("a: b: c", "line 1, column 5: "),
        ("user: 2026-99-99", "month must be in 1..12"),
        ("token: !!int s3cret", "invalid literal for int() with base 10"),
        ("user: \x01", "not a text file"),
        (b"\xff\xfe\x00bad", "not a text file"),
        ("[" * 5000, "nested deeper than 32 levels"),
    ],
)
def test_a_wrong_file_is_told_in_one_line_with_its_name(tmp_path: Path, content: str | bytes, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, content)
    told = str(refused.value)
    assert said in told
    assert told.startswith(str(tmp_path / "settings.yaml"))
    assert "\n" not in told


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no settings file"):
        Settings.load(env={}, file=tmp_path)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"timeout": "nan"}, ("timeout",)),
        ({"timeout": "inf"}, ("timeout",)),
        ({"timeout": 0}, ("timeout",)),
        ({"servers": "::::"}, ("servers",)),
        ({"servers": ","}, ("servers",)),
        ({"domain": "a b"}, ("domain",)),
        ({"tls_cert": "x"}, ("tls_cert", "tls_key")),
        ({"user": "u", "token": "t"}, ("user", "token")),
    ],
)
def test_a_wrong_value_says_which_settings_it_is_about(values: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(BadSetting) as refused:
        Settings.load(env={}, **values)
    assert refused.value.names == names
    back = pickle.loads(pickle.dumps(refused.value))
    assert (str(back), back.names) == (str(refused.value), names)


def test_certificates_that_are_none_are_named(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match=r"tls_ca: '.*junk\.pem' holds no certificate in PEM form"):
        Settings(tls_ca=str(junk)).ssl_context()
    with pytest.raises(ConfigError, match=r"tls_cert and tls_key: '.*junk\.pem' and '.*' are not a certificate"):
        Settings(tls_cert=str(junk), tls_key=str(junk)).ssl_context()


def test_credentials_that_are_none_are_named(tmp_path: Path) -> None:
    junk = tmp_path / "junk.creds"
    junk.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"junk\.creds cannot be read as a credentials file: it is not text"):
        login.signed(junk, "nonce")


@pytest.mark.parametrize("value", ["!!timestamp x", "!!bool x", "!!int ''", "!!binary aGk=", "!other x"])
def test_a_tag_that_does_not_fit_is_a_line_not_a_traceback(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, f"user: {value}\n")
    assert len(str(caught.value).splitlines()) == 1


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    """Ten times ten, ten levels deep: an error that shows the value would not end."""
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(ConfigError, match="at most 16 aliases"):
        loaded(tmp_path, "\n".join(["l0: &l0 [x]", *levels, "servers: *l9"]))
    assert loaded(tmp_path, "user: &a ann\npassword: *a\n").password == "ann"


# -- a file that lies where the command is run -------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a settings file that names servers."""
    monkeypatch.chdir(tmp_path)
    settings.tell_servers_of_directory.cache_clear()
    (tmp_path / "penstock.settings.yaml").write_text("servers: [nats://elsewhere:4222]\n")
    return tmp_path


@pytest.mark.parametrize("secret", ["PENSTOCK_TOKEN", "PENSTOCK_PASSWORD", "PENSTOCK_CREDENTIALS"])
def test_a_directory_that_names_servers_for_secrets_of_the_environment_is_told(
    here: Path, secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    (here / "s").write_text("")
    env = {secret: "s", "PENSTOCK_USER": "ann"} if secret == "PENSTOCK_PASSWORD" else {secret: "s"}
    Settings.load(env=env)
    Settings.load(env=env)
    (told,) = caplog.messages
    assert secret in told
    assert "elsewhere:4222" in told
    assert str(here / "penstock.settings.yaml") in told


def test_the_variable_or_the_flag_that_the_secret_comes_from_is_named(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Settings.load(env={"NATS_TOKEN": "s"})
    Settings.load(env={}, token="s")
    assert [told.split("login of ")[1].split()[0] for told in caplog.messages] == ["NATS_TOKEN", "--token"]


def test_a_context_is_not_taken_for_a_file_of_the_directory(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here / "penstock.settings.yaml").unlink()
    (here / "nats" / "context").mkdir(parents=True)
    (here / "nats" / "context" / "x.json").write_text('{"url": "nats://known:4222"}')
    made = Settings.load(env={"XDG_CONFIG_HOME": str(here), "PENSTOCK_CONTEXT": "x", "PENSTOCK_TOKEN": "s"})
    assert (made.servers, caplog.messages) == (("nats://known:4222",), [])


def test_servers_that_somebody_chose_are_not_told(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = here / "penstock.settings.yaml"
    Settings.load(env={})
    Settings.load(env={"PENSTOCK_TOKEN": "s", "PENSTOCK_SERVERS": "nats://mine"})
    Settings.load(env={"PENSTOCK_TOKEN": "s"}, servers="nats://mine")
    Settings.load(env={"PENSTOCK_TOKEN": "s", "PENSTOCK_SETTINGS": str(file)})
    file.write_text("servers: [nats://elsewhere:4222]\ntoken: own\n")
    Settings.load(env={})
    assert caplog.messages == []
