"""`penstock ui` in a thread of the test's own process, and a browser to look at it."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.settings import Settings
from penstock.testing import eventually
from penstock.topology.model import Platform
from penstock.ui.access import Access
from penstock.ui.server import Listen, serve


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request brought."""

    status: int
    text: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Served:
    """The pages, over HTTP."""

    url: str

    def get(self, path: str, **headers: str) -> Answer:
        return self._asked(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, headers: dict[str, str] | None = None, **fields: str) -> Answer:
        data = urllib.parse.urlencode(fields).encode()
        return self._asked(urllib.request.Request(self.url + path, data, headers or {}))

    def _asked(self, request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=30) as answer:
                return Answer(answer.status, answer.read().decode(), dict(answer.headers))
        except urllib.error.HTTPError as exc:
            return Answer(exc.code, exc.read().decode(), dict(exc.headers))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@contextmanager
def served(settings: Settings, platform: Platform | None = None, access: Access | None = None) -> Iterator[Served]:
    """The pages of a server, until the block ends."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    stop, found = asyncio.Event(), list[str]()

    def on_ready(url: str) -> None:
        found.append(url)
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve(settings, platform, Listen(port=0), access or Access(), on_ready, stop))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    eventually(lambda: ready.is_set() or not thread.is_alive(), 20, "the pages to be served")
    try:
        yield Served(found[0])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive(), "the pages were still served after they were told to stop"


def chromium() -> str:
    """The browser; the tests fail without one."""
    found = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    assert found, "Chromium is missing: run scripts/ensure-chromium, or `sudo apt-get install chromium`"
    return found
