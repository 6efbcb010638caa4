"""Calls of which only the head comes: refused by it, or answered in the end."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any, cast

import pytest

from penstock.facts import Facts
from penstock.gateway import app
from penstock.gateway.app import Gateway
from penstock.topology.model import GatewayIdentity, GatewayLimits, GatewaySpec, GatewayToken


async def called(**headers: str) -> tuple[int, dict[str, str]]:
    """The answer to a call of which only the head comes."""
    token = GatewayToken(hashlib.sha256(b"secret").hexdigest())
    identity = GatewayIdentity("edge", tokens=(token,), subjects=("facts.>",))
    gateway = Gateway(cast(Facts, None), GatewaySpec(GatewayLimits(wait=timedelta()), {"edge": identity}))
    told: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return await asyncio.Future()

    async def send(event: MutableMapping[str, Any]) -> None:
        told.append(event)

    given = {"authorization": "Bearer secret", "content-type": "application/json", **headers}
    head = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "method": "POST", "path": "/penstock.facts.v1.FactService/AppendFact", "headers": head,
             "query_string": b"", "http_version": "1.1", "client": None, "scheme": "https"}  # fmt: skip
    await gateway(scope, receive, send)
    return told[0]["status"], json.loads(told[1]["body"])


async def test_a_body_that_never_ends_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CALL_MARGIN", 0.05)
    status, body = await called()
    assert (status, body["code"]) == (499, "canceled")


@pytest.mark.parametrize("encoding", ["br", "zstd", "?", "gzip, gzip"])
async def test_an_unknown_compression_is_the_callers_mistake(encoding: str) -> None:
    status, body = await called(content_encoding=encoding)
    assert (status, body["code"]) == (415, "unimplemented")
