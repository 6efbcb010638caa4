"""The user interface as an ASGI application: who may come in, and which page is where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import NotFound, PenstockError
from penstock.ui import actions, letters, pages, proofs
from penstock.ui.access import COOKIE, Access, Person
from penstock.ui.page import Page, Site
from penstock.ui.runs import Runs
from penstock.ui.watch import Watch
from penstock.web.server import PEER

MAX_FORM = 256 * 1024
"""Bytes of a form."""
MAX_FIELDS = 5_000
"""Fields of a form."""
FORM_WITHIN = 15.0
"""Seconds in which a form must have arrived."""
GUESS_EVERY = 0.5
"""Seconds that the answer to a wrong token takes; one at a time is answered."""
MAX_GUESSES = 16
"""Wrong tokens that wait for their answer."""
HEARTBEAT = 15.0
"""Seconds after which an idle stream of events says something, so that proxies keep it open."""
OTHER_FORM = "this form is not from these pages: open the page again"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
STATIC = {"penstock.css": "text/css", "penstock.js": "text/javascript", "icon.svg": "image/svg+xml"}
WRONG_HOST = PlainTextResponse("this is not the name of this page\n", 421)
Handler = Callable[[Page], Awaitable[Response]]


class Guesses:
    """Answers wrong tokens one after the other, so that nobody can try many. Right ones never wait."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def wrong(self) -> None:
        """Wait for a turn. Raises at once when many wait already."""
        if self._waiting >= MAX_GUESSES:
            raise HTTPException(429, "too many wrong tokens: try again later")
        self._waiting += 1
        try:
            async with self._turn:
                await asyncio.sleep(GUESS_EVERY)
        finally:
            self._waiting -= 1


@dataclass(frozen=True, slots=True)
class Headers:
    """Adds the same headers to every answer, and refuses hosts that are not ours."""

    app: ASGIApp
    access: Access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sent(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers") or ())  # type: ignore[call-overload]  # a list of pairs
                message["headers"] = [*given, *((name.encode(), value.encode()) for name, value in HEADERS.items())]
            await send(message)

        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        answer = self.app if self.access.takes_host(host) else WRONG_HOST
        await answer(scope, receive, sent)  # type: ignore[arg-type]  # the same messages


def application(watch: Watch, access: Access, site: Site, runs: Runs) -> ASGIApp:
    """All pages, for one server. Whoever serves them closes `runs`."""
    guesses = Guesses()

    def route(path: str, handler: Handler, *methods: str) -> Route:
        async def endpoint(request: Request) -> Response:
            page = await _page(request, watch, access, site, guesses, runs)
            return page if isinstance(page, Response) else await _answered(page, handler)

        return Route(path, endpoint, methods=methods or ("GET",))

    async def events(request: Request) -> Response:
        if _person(request, access) is None:
            await _slow_down(request, guesses)
            return PlainTextResponse("log in first\n", 401)
        return StreamingResponse(_ticks(watch), media_type="text/event-stream")

    async def login(request: Request) -> Response:
        return await _login(request, access, site, guesses)

    acting = [
        route("/consumers/{stream}/{name}/{action}", actions.consumer, "POST"),
        route("/letters/{action}", letters.act, "POST"),
    ]
    routes = [
        route("/", pages.flow),
        route("/streams", pages.streams),
        route("/streams/{stream}", pages.stream),
        route("/streams/{stream}/messages", pages.messages),
        route("/consumers", pages.consumers),
        route("/consumers/{stream}/{name}", pages.consumer),
        route("/groups", pages.groups),
        route("/groups/{name}", pages.group),
        route("/pipelines", pages.pipelines),
        route("/pipelines/{name}", pages.pipeline),
        route("/letters", letters.causes),
        route("/letters/audit", letters.audited),
        route("/letters/runs/{id}", letters.run),
        route("/letters/{id}", letters.letter),
        route("/proof", proofs.listed),
        route("/proof/sinks/{stream}/{created}/{name}/{batch:int}", proofs.sink),
        route("/proof/bridges/{stream}", proofs.bridge),
        *acting,
        Route("/events", events),
        Route("/login", login, methods=["GET", "POST"]),
        Route("/static/{name}", _static),
        Route("/healthz", _healthy),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_page(site)})
    return Headers(app, access)


async def _page(
    request: Request, watch: Watch, access: Access, site: Site, guesses: Guesses, runs: Runs
) -> Page | Response:
    """The page that is asked for, by somebody who may; otherwise the answer that says why not."""
    person = _person(request, access)
    if person is None:
        await _slow_down(request, guesses)
        return RedirectResponse("/login", 303)
    page = Page(request, watch, access, site, person, runs)
    if request.method == "POST":
        if not person.operator:
            raise HTTPException(403, "only an operator may do this, and actions must be on (--actions)")
        if not _is_same_site(request, access):
            raise HTTPException(403, OTHER_FORM)
        page.form = await _form(request)
        if not access.is_own_form(person, page.field("token")):
            raise HTTPException(403, OTHER_FORM)
    return page


def _person(request: Request, access: Access) -> Person | None:
    certificate = request.scope.get("state", {}).get(PEER)
    return access.person(request.headers, request.cookies, certificate)


def _is_same_site(request: Request, access: Access) -> bool:
    """What the browser says about where a form comes from; older ones say nothing.

    For our own forms `Origin` is `null`, since our pages tell nobody where people come from.
    """
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    origin = request.headers.get("origin", "null")
    return origin == "null" or access.is_own_origin(origin, request.headers.get("host", ""))


async def _form(request: Request) -> dict[str, list[str]]:
    body = bytearray()
    try:
        async with asyncio.timeout(FORM_WITHIN):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_FORM:
                    raise HTTPException(413, f"a form has at most {MAX_FORM} bytes")
    except TimeoutError as exc:
        raise HTTPException(408, f"the form did not arrive within {FORM_WITHIN:g} s") from exc
    try:
        return parse_qs(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as exc:
        raise HTTPException(400, f"a form has at most {MAX_FIELDS} fields") from exc


async def _answered(page: Page, handler: Handler) -> Response:
    try:
        return await handler(page)
    except NotFound as exc:
        return page.failed(str(exc), 404)
    except PenstockError as exc:
        return page.failed(str(exc), 503 if exc.retryable else 400)


async def _ticks(watch: Watch) -> AsyncIterator[str]:
    """An event for every look at the server."""
    yield "retry: 2000\n\n"
    changes = watch.changes()
    waiting = asyncio.ensure_future(anext(changes))
    try:
        while True:
            done, _ = await asyncio.wait((waiting,), timeout=HEARTBEAT)
            if not done:
                yield ": still here\n\n"
                continue
            yield f"event: tick\ndata: {waiting.result()}\n\n"
            waiting = asyncio.ensure_future(anext(changes))
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await changes.aclose()  # type: ignore[attr-defined]  # an async generator


async def _slow_down(request: Request, guesses: Guesses) -> None:
    """Delay whoever came with a token that is not known."""
    if "authorization" in request.headers or COOKIE in request.cookies:
        await guesses.wrong()


async def _login(request: Request, access: Access, site: Site, guesses: Guesses) -> Response:
    wrong = False
    if request.method == "POST":
        if not _is_same_site(request, access):
            raise HTTPException(403, OTHER_FORM)
        token = ((await _form(request)).get("token") or [""])[0].strip()
        if access.bearer(token):
            answer = RedirectResponse("/", 303)
            secure = request.url.scheme == "https"
            answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure, path="/")
            return answer
        wrong = True
        await guesses.wrong()
    return site.rendered("login.html", 401 if wrong else 200, wrong=wrong)


async def _static(request: Request) -> Response:
    kind = STATIC.get(name := request.path_params["name"])
    if kind is None:
        raise HTTPException(404)
    data = resources.files("penstock.ui").joinpath("static", name).read_bytes()
    return Response(data, media_type=kind)


async def _healthy(_: Request) -> Response:
    return PlainTextResponse("ok\n")


def _no_page(site: Site) -> Callable[[Request, Exception], Response]:
    def answer(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        return site.rendered("problem.html", exc.status_code, problem=exc.detail, title=str(exc.status_code))

    return answer
