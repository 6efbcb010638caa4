"""Contexts and variables of the NATS command line as settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.settings import Settings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / ".config" / "nats" / "context"
    folder.mkdir(parents=True)
    (folder / "prod.json").write_text(
        json.dumps(
            {"description": "x", "url": "nats://prod:4222", "user": "u", "password": "p", "jetstream_domain": "hub"}
        )
    )
    (folder / "dev.json").write_text(json.dumps({"url": "nats://dev:4222,nats://dev2:4222", "token": "t"}))
    (folder / "broken.json").write_text("{")
    return tmp_path


def loaded(home: Path, variables: dict[str, str] | None = None, **given: Any) -> Settings:
    return Settings.load(env={"HOME": str(home), **(variables or {})}, **given)


def select(home: Path, name: str) -> None:
    (home / ".config" / "nats" / "context.txt").write_text(f"{name}\n")


def test_a_named_context_says_where_and_how(home: Path) -> None:
    found = loaded(home, context="prod")
    assert (found.servers, found.user, found.password, found.domain) == (("nats://prod:4222",), "u", "p", "hub")
    assert loaded(home, {"PENSTOCK_CONTEXT": "dev"}).servers == ("nats://dev:4222", "nats://dev2:4222")
    assert loaded(home, {"NATS_CONTEXT": "dev"}).servers == ("nats://dev:4222", "nats://dev2:4222")


def test_the_selected_context_counts_where_nothing_else_names_servers(home: Path) -> None:
    assert loaded(home) == Settings()
    select(home, "prod")
    assert loaded(home).user == "u"
    for other in ({"NATS_URL": "nats://x:1"}, {"PENSTOCK_SERVERS": "nats://x:1"}):
        found = loaded(home, other)
        assert (found.servers, found.user, found.password) == (("nats://x:1",), None, None), "no login for strangers"
    assert loaded(home, servers="nats://x:1").user is None
    select(home, "deleted")
    assert loaded(home).user is None


def test_later_logins_replace_earlier_ones_of_another_kind(home: Path) -> None:
    found = loaded(home, {"NATS_USER": "n", "NATS_PASSWORD": "m"}, context="dev")
    assert (found.user, found.password, found.token) == ("n", "m", None)
    found = loaded(home, {"NATS_USER": "n", "NATS_PASSWORD": "m", "PENSTOCK_TOKEN": "t"})
    assert (found.user, found.password, found.token) == (None, None, "t")


@pytest.mark.parametrize(
    ("name", "reason"), [("nosuch", "known are: broken, dev, prod"), ("broken", "no NATS context")]
)
def test_a_context_that_is_none_is_told(home: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        loaded(home, context=name)
