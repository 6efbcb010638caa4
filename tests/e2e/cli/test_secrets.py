"""The password of a login, given in a server's URL, shows up in nothing that a command prints."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tests.e2e.cli.test_command_line import COMMANDS, command_of
from tests.support.commands import here

from penstock.errors import BadSetting, BrokerUnreachable, PenstockError
from penstock.jetstream import connect
from penstock.server.embedded import EmbeddedServer
from penstock.server.server_config import ServerConfig
from penstock.settings import Settings, without_login
from penstock.topology.load import load
from penstock.wire import aio

PASSWORD = "hunter2.s3cret"
OWN_SERVERS = {("quickstart",), ("bench",)}
"""Commands that start servers for themselves; `test_secrets_at_work` runs them."""
RUNNING = {("gateway",), ("server",), ("ui",), ("work",), ("replicate",), ("dlq", "capture"), ("pipeline", "run")}
"""Commands that run, or try, until they are stopped: here they fail at the URL, in `test_secrets_at_work` they work."""
WORDS = {
    ("append",): ["s.a", "id", "--data", "x"],
    ("replicate",): ["reader", "--to-servers", "URL", "--until-caught-up"],
    ("bridge",): ["b", "S", "T", "--dry-run"],
    ("publish",): ["s.a", "--file", "lines.jsonl"],
    ("consumer", "pause"): ["S", "reader", "--for", "1s"],
    ("consumer", "prune"): ["--unused", "1s", "--yes"],
    ("consumer", "reset"): ["S", "reader", "--to-sequence", "1", "--yes"],
    ("consumer", "resume"): ["S", "reader"],
    ("consumer", "show"): ["S", "reader"],
    ("group", "migrate"): ["g", "status", "--stream", "S", "--legacy", "reader"],
    ("group", "delete"): ["g", "--yes"],
    ("group", "move"): ["g", "p"],
    ("group", "pause"): ["g"],
    ("group", "resume"): ["g"],
    ("group", "seek"): ["g", "--to", "1", "--yes"],
    ("group", "show"): ["g"],
    ("fetch",): ["reader"],
    ("confirm",): ["reader", "pr2.x.y"],
    ("dlq", "discard"): ["--all", "--reason", "test"],
    ("dlq", "replay"): ["--all"],
    ("dlq", "show"): ["x"],
    ("gateway",): ["FILE"],
    ("pipeline", "run"): ["nothing", "--file", "FILE"],
    ("pipeline", "ls"): ["--file", "FILE"],
    ("pipeline", "package"): ["--file", "FILE", "--output", "job.zip"],
    ("pipeline", "status"): ["--file", "FILE"],
    ("server",): ["--leaf-of", "URL", "--user", "u", "--password", PASSWORD, "--tls-cert", "none"],
    ("sources", "create-consumer"): ["FILE", "S"],
    ("import",): ["new.yaml", "--force"],
    ("run",): ["secret_service:app", "--until-done"],
    ("view",): ["S"],
    ("work",): ["handlers:handle", "--stream", "S"],
}
TAKE_FILE = {("permissions",), ("lint",), ("plan",), ("apply",), ("verify",), ("asyncapi",), ("sources", "migrate")}
LEAVES = [words for words in COMMANDS if not isinstance(command_of(words), click.Group)]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server that asks for the password, with a stream and a consumer."""
    with EmbeddedServer(data=tmp_path_factory.mktemp("nats"), user="ann", password=PASSWORD) as server:

        async def prepare() -> None:
            async with connect(server.settings) as broker:
                config = {"name": "S", "subjects": ["s.>"], "allow_direct": True, "allow_atomic": True}
                await broker.jetstream.create_stream(config)
                await broker.jetstream.create_consumer("S", {"durable_name": "reader", "ack_policy": "explicit"})

        asyncio.run(prepare())
        yield server


@pytest.fixture
def urls(guarded: EmbeddedServer) -> dict[str, str]:
    """URLs with the login: one that works, and some that do not."""
    return {
        "works": f"nats://ann:{PASSWORD}@127.0.0.1:{guarded.config.port}",
        "refused": f"nats://bob:{PASSWORD}@127.0.0.1:{guarded.config.port}",
        "nobody": f"nats://ann:{PASSWORD}@127.0.0.1:1",
        "no port": f"nats://ann:{PASSWORD}@127.0.0.1:4222x",
        "slash": f"nats://ann:7/{PASSWORD}@127.0.0.1:4222",
        "no scheme": f"ann:{PASSWORD}@127.0.0.1:99999",
        "no NATS": f"http://ann:{PASSWORD}@127.0.0.1:1",
    }


def platform(url: str) -> str:
    return json.dumps({
        "name": "p",
        "environments": {"dev": {"servers": [url]}},
        "streams": {"S": {"subjects": ["s.>"]}, "T": {"subjects": ["t.>"]}},
        "gateway": {"identities": {"c": {"tokens": [{"sha256": "0" * 64}], "subjects": ["t.>"]}}},
    })  # fmt: skip


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_no_command_prints_the_password(words: tuple[str, ...], urls: dict[str, str], tmp_path: Path) -> None:
    if words in OWN_SERVERS:
        return
    (tmp_path / "lines.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "handlers.py").write_text("def handle(message, context): ...\n")
    (tmp_path / "secret_service.py").write_text(
        "import penstock\napp = penstock.App('penstock.yaml')\n"
        "@app.consumer('reader')\nasync def handle(message): ...\n"
    )
    as_json = [["--json"]] if any("--json" in one.opts for one in command_of(words).params) else []
    for case, url in urls.items():
        if words in RUNNING and case in ("works", "refused", "nobody", "no NATS"):
            continue
        file = tmp_path / "penstock.yaml"
        file.write_text(platform(url))
        rest = [{"URL": url, "FILE": str(file)}.get(one, one) for one in WORDS.get(words, [])]
        rest += [str(file)] if words in TAKE_FILE else []
        servers = [] if str(file) in rest else ["--servers", url]  # by the file, or by a flag
        for flags in ([], *as_json):
            done = here("--timeout", "5" if case == "works" else "0.2", *servers, *words, *rest, *flags, cwd=tmp_path)
            shown = done.stdout + done.stderr
            assert PASSWORD not in shown
            assert "Traceback" not in shown
            assert "Missing" not in done.stderr, f"{words} needs more words here"


def test_the_login_of_a_url_becomes_user_and_password() -> None:
    made = Settings(servers=(f"nats://ann:{PASSWORD.replace('.', '%2E')}@a:1", "tls://b:2"))
    assert (made.servers, made.user, made.password) == (("nats://a:1", "tls://b:2"), "ann", PASSWORD)
    assert Settings(servers=("nats://t0ken@a:1",)).token == "t0ken"
    given = Settings(servers=(f"nats://ann:{PASSWORD}@a:1",), user="bob", password="b")
    assert (given.user, given.password) == ("bob", "b")
    with pytest.raises(BadSetting, match="different logins"):
        Settings(servers=("nats://a:b@h", "nats://c:d@i"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [("nats://a:b@h:1", "nats://h:1"), ("a:b@h", "h"), ("nats://a:b@c@h", "nats://h"), ("h:1", "h:1"),
     ("nats://t@[::1]:4", "nats://[::1]:4"), ("tls://h", "tls://h")],
)  # fmt: skip
def test_a_url_is_shown_without_its_login(url: str, shown: str) -> None:
    assert without_login(url) == shown


def test_reprs_and_errors_hold_no_password(urls: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(platform(urls["nobody"]))
    settings = Settings(servers=(urls["nobody"],), timeout=1)
    shown = [repr(settings), repr(load(file)), repr(ServerConfig(user="u", password=PASSWORD, leaf_of=urls["works"]))]

    async def attempt() -> None:
        async with connect(settings):
            pass

    async def other() -> None:
        await aio.connect(settings)

    for act in (attempt, other):
        with pytest.raises(BrokerUnreachable) as refused:
            asyncio.run(act())
        shown += [repr(refused.value), str(refused.value), str(pickle.dumps(refused.value))]
    for url in ("no port", "slash", "no scheme"):
        with pytest.raises(PenstockError) as bad:
            Settings(servers=(urls[url],))
        shown += [repr(bad.value), str(bad.value)]
    assert not [one for one in shown if PASSWORD in one]
