"""Components log in with JWTs made of the claims that `penstock permissions --form jwt` prints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.integration.conftest import Serve
from tests.support.commands import ended, here
from tests.support.guarded import refused
from tests.support.jwts import OperatorMode

from penstock.settings import Settings
from penstock.testing import stream_messages

PLATFORM = {
    "streams": {
        "SRC": {"subjects": ["src.>"], "allow_atomic": True},
        "DST": {"subjects": ["dst.>"], "allow_atomic": True},
        "DLQ": {"subjects": ["dlq.>"]},
    },
    "consumers": {"reader": {"stream": "SRC", "filter": "src.>", "service": "reading", "dlq": "dlq.src"}},
    "services": {"writing": {"publishes": ["src.>"]}},
}
ALL = {"name": "operator", "nats": {"pub": {"allow": [">"]}, "sub": {"allow": [">"]}, "subs": -1, "data": -1,
                                    "payload": -1, "type": "user", "version": 2}}  # fmt: skip


class Platform:
    """A server in operator mode, with a `.creds` file for every user."""

    def __init__(self, folder: Path, serve: Serve) -> None:
        mode, self.file, self.folder = OperatorMode(), folder / "penstock.yaml", folder
        data = folder / "data"
        port = serve(f'jetstream {{ store_dir: "{data}" }}\n{mode.config()}')
        self.url = f"nats://127.0.0.1:{port}"
        self.file.write_text(json.dumps(PLATFORM))
        printed = ended("permissions", self.file, "--bridge", "copy=SRC:DST", "--form", "jwt").stdout
        for claims in [ALL, *json.loads(printed)]:
            mode.credentials(folder / f"{claims['name']}.creds", claims)

    def settings(self, user: str) -> Settings:
        inbox = "_INBOX" if user == "operator" else f"_INBOX_{user}"
        return Settings(servers=(self.url,), credentials=str(self.folder / f"{user}.creds"), inbox_prefix=inbox)

    def run(self, user: str, *words: str) -> str:
        mine = self.settings(user)
        done = here("--servers", self.url, "--credentials", mine.credentials or "", "--inbox-prefix", mine.inbox_prefix,
                    *words, cwd=self.folder)  # fmt: skip
        assert done.returncode == 0, (user, words, done.stderr)
        return done.stdout


@pytest.fixture
def made(tmp_path: Path, serve: Serve) -> Platform:
    platform = Platform(tmp_path, serve)
    platform.run("operator", "apply", str(platform.file))
    platform.run("operator", "rotate-key")
    return platform


def test_a_publisher_a_reader_and_a_bridge_work_with_jwts_of_their_claims(made: Platform) -> None:
    (made.folder / "lines").write_text('{"n": 1}\n{"n": 2}\n')
    made.run("writing", "publish", "src.a", "--file", "lines", "--atomic")
    page = json.loads(made.run("reading", "fetch", "reader", "--stream", "SRC", "--wait", "10s", "--json"))
    assert len(page["facts"]) == 2
    made.run("reading", "confirm", "reader", page["receipt"], "--stream", "SRC")
    made.run("bridge-copy", "bridge", "copy", "SRC", "DST", "--map", "src.>=dst.>", "--until-caught-up")
    assert len(stream_messages(made.settings("operator"), "DST")) == 2
    made.run("dlq-capture", "dlq", "capture", "--until-caught-up")
    made.run("dlq", "dlq", "ls")


@pytest.mark.parametrize("user", ["writing", "reading", "bridge-copy", "dlq-capture", "dlq"])
def test_what_the_claims_do_not_grant_is_refused(made: Platform, user: str) -> None:
    for subject in (
        "other.x",
        "$JS.API.STREAM.DELETE.SRC",
        "$JS.API.STREAM.PURGE.DLQ",
        "$KV.penstock_facts.signing-key",
    ):
        assert asyncio.run(refused(made.settings(user), subject)), subject
