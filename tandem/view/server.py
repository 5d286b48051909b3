"""The page over HTTP, for one person on this machine: on the loopback interface, behind a token in the address."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.observe.metrics import from_json, to_json
from tandem.observe.samples.parts import Kind
from tandem.view.document import FILES, FOLDER, SERVED_POLICY, pages, served
from tandem.view.findings import find
from tandem.view.runs import RunFolder
from tandem.view.samples import WORDS, Query, is_number

HOSTS = ["127.0.0.1", "localhost", "[::1]", "::1"]
"""Names under which it answers: a page elsewhere that lets a name of its own point here gets nothing."""
LONGEST_PAGE = 200
LOOK_S = 1.0
"""Between two looks at files that may have grown; what hasn't is not read."""
_COUNTS = 1 << 31  # steps, groups and places of rows are less


class Viewer:
    """The endpoints over ``runs``; ``stopping`` says whether the server ends, which streams would keep from it."""

    def __init__(self, runs: Mapping[str, RunFolder], stopping: Callable[[], bool]) -> None:
        self._runs, self._stopping = runs, stopping

    @property
    def routes(self) -> list[Route]:
        """All addresses of the page."""
        return [
            Route("/", self.page),
            Route("/page/{name:path}", self.file),
            Route("/docs/{name}", self.words),
            Route("/api/runs", self.list),
            Route("/api/curves", self.curves),
            Route("/api/findings", self.findings),
            Route("/api/timeline", self.timeline),
            Route("/api/samples", self.samples),
            Route("/api/group", self.group),
            Route("/api/prompts", self.prompts),
            Route("/api/prompt", self.prompt),
            Route("/api/failures", self.failures),
            Route("/api/events", self.events),
        ]

    async def page(self, request: Request) -> Response:
        """Send the page itself, empty."""
        return HTMLResponse(served(), headers={"Content-Security-Policy": SERVED_POLICY})

    async def file(self, request: Request) -> Response:
        """Send a script or style of it."""
        name = request.path_params["name"]
        if name not in FILES:
            raise HTTPException(404)
        return FileResponse(FOLDER / name)

    async def words(self, request: Request) -> Response:
        """Send a page of the documentation that a finding names."""
        found = pages().get(f"docs/{request.path_params['name']}")
        if found is None:
            raise HTTPException(404)
        return PlainTextResponse(found)

    async def list(self, request: Request) -> Response:
        """Send all runs with their state, config and last numbers."""
        return _answer([await run_in_threadpool(_described, run) for run in self._runs.values()])

    async def curves(self, request: Request) -> Response:
        """Send the metrics of a run, by key."""
        run = self._run(request)
        return _answer(await run_in_threadpool(_looked, run))

    async def findings(self, request: Request) -> Response:
        """Send what is off in a run."""
        run = self._run(request)
        return _answer(await run_in_threadpool(_findings, run))

    async def timeline(self, request: Request) -> Response:
        """Send who worked and who waited in a run."""
        return _answer(await run_in_threadpool(self._run(request).timeline))

    async def samples(self, request: Request) -> Response:
        """Send a page of samples; what the query may say is in ``read_query``."""
        run, query = self._run(request), read_query(request.query_params)
        return _answer(await run_in_threadpool(run.samples.page, query))

    async def group(self, request: Request) -> Response:
        """Send all answers to a prompt in a step, whole."""
        run, asked = self._run(request), request.query_params
        step, group = _whole(asked, "step", 0), _whole(asked, "group", 0)
        return _answer(await run_in_threadpool(run.samples.group, _kind(asked), step, group))

    async def prompts(self, request: Request) -> Response:
        """Send prompts by how their reward changed."""
        return _answer(await run_in_threadpool(self._run(request).samples.prompts, _kind(request.query_params)))

    async def prompt(self, request: Request) -> Response:
        """Send one prompt over time."""
        run, asked = self._run(request), request.query_params
        return _answer(await run_in_threadpool(run.samples.over_time, _kind(asked), asked.get("uid", "")))

    async def failures(self, request: Request) -> Response:
        """Send what scorers failed with, and the words that can be chosen from."""
        run, kind = self._run(request), _kind(request.query_params)
        failures = await run_in_threadpool(run.samples.failures, kind)
        return _answer({"failures": failures, **await run_in_threadpool(run.samples.names, kind)})

    async def events(self, request: Request) -> Response:
        """Send new rows and states of all runs as server-sent events.

        ``have`` says what the page has, in JSON: a list of run, rows and generation.
        """
        stream = self._growing(request, _read_have(request.query_params.get("have", "[]")))
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _growing(self, request: Request, have: dict[str, tuple[int, int]]) -> AsyncIterator[str]:
        sent: dict[str, Any] = {}
        while not (self._stopping() or await request.is_disconnected()):
            for name, run in self._runs.items():
                described = await run_in_threadpool(_described, run)
                rows, generation = have.get(name, (0, -1))
                if (len(run.metrics.rows), run.metrics.generation) != (rows, generation):
                    found = await run_in_threadpool(run.curves, rows, generation)
                    have[name] = found["rows"], found["generation"]
                    yield _event("curves", found)
                seen = {key: described[key] for key in ("name", "state", "words", "step", "samples")}
                if sent.get(name) != seen:
                    sent[name] = seen
                    yield _event("state", described)
            yield ": still here\n\n"
            await asyncio.sleep(LOOK_S)

    def _run(self, request: Request) -> RunFolder:
        name = request.query_params.get("run", "")
        if name not in self._runs:
            raise HTTPException(404, f"there is no run {name!r}")
        return self._runs[name]


class Gatekeeper:
    """Lets in who has the token: once in the address, then in a cookie that no other site's page is sent with."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 to whoever has no token."""
        if scope["type"] != "http":
            return
        request = Request(scope)
        cookie = f"tandem_view_{request.url.port or 80}"  # cookies are of a host, whatever the port
        given = request.query_params.get("token")
        if given is not None and self._fits(given):
            entered = RedirectResponse("/")
            entered.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            await entered(scope, receive, send)
        elif not self._fits(request.cookies.get(cookie, "")):
            refused = Response("Open the address that `tandem view` printed: it has the token.", 403)
            await refused(scope, receive, send)
        else:
            await self._app(scope, receive, _guarded(send))

    def _fits(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _guarded(send: Send) -> Send:
    """Return ``send`` with headers that keep an answer here and what it is."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(
                {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
            )
        await send(message)

    return sending


def build_app(runs: Mapping[str, RunFolder], token: str, stopping: Callable[[], bool] = lambda: False) -> Starlette:
    """Return the application over ``runs`` for whoever has ``token``; ``stopping`` as in ``Viewer``."""
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS),
        Middleware(Gatekeeper, token=token),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=5),
    ]
    return Starlette(routes=Viewer(runs, stopping).routes, middleware=middleware)


def read_query(asked: Mapping[str, str]) -> Query:
    """Return what an address asks for.

    ``where`` is JSON, a list of (name, one of ``>= <= =``, value); ``sort`` a name, ``-reward``: descending; beside
    them ``kind``, ``text``, ``offset`` and ``limit``.

    Raises ``HTTPException`` (400) for a name, sign or number that isn't one.
    """
    at_least: list[tuple[str, float]] = []
    at_most: list[tuple[str, float]] = []
    equal: list[tuple[str, str]] = []
    sort = asked.get("sort", "-step")
    try:
        for name, sign, value in from_json(asked.get("where", "[]")):
            if sign == "=" and name in WORDS:
                str(value).encode("utf-8")  # half of a pair of surrogates is in no text
                equal.append((name, str(value)))
            elif sign in (">=", "<=") and is_number(name):
                (at_least if sign == ">=" else at_most).append((name, float(value)))
            else:
                raise ValueError(f"{name} {sign}")
    except (ValueError, TypeError) as error:
        raise HTTPException(400, f"where can't be read: {error}") from None
    order = sort.removeprefix("-")
    if not is_number(order) and order not in WORDS:
        raise HTTPException(400, f"there is no order by {sort!r}")
    return Query(
        _kind(asked),
        asked.get("text", ""),
        tuple(at_least),
        tuple(at_most),
        tuple(equal),
        order,
        sort.startswith("-"),
        max(0, _whole(asked, "offset", 0)),
        min(LONGEST_PAGE, max(1, _whole(asked, "limit", 50))),
    )


def _answer(content: object) -> Response:
    """Return ``content`` as JSON; numbers that JSON can't hold, as a scorer may have written them, are null."""
    return JSONResponse(to_json(content))


def _kind(asked: Mapping[str, str]) -> Kind:
    kind = asked.get("kind", "train")
    if kind not in get_args(Kind):
        raise HTTPException(400, f"there is no kind {kind!r}")
    return "eval" if kind == "eval" else "train"


def _whole(asked: Mapping[str, str], name: str, default: int) -> int:
    try:
        found = int(asked.get(name, default))
    except ValueError:
        raise HTTPException(400, f"{name} is no whole number") from None
    if abs(found) >= _COUNTS:
        raise HTTPException(400, f"{name} is out of all bounds")
    return found


def _read_have(text: str) -> dict[str, tuple[int, int]]:
    """Return rows and generation by run. Raises ``HTTPException`` (400) for what says no such thing."""
    try:
        return {str(name): (int(rows), int(generation)) for name, rows, generation in from_json(text)}
    except (ValueError, TypeError) as error:
        raise HTTPException(400, f"have can't be read: {error}") from None


def _described(run: RunFolder) -> dict[str, Any]:
    """Return what the list shows of a run; that it can't be shown, where that is so: others still are."""
    try:
        run.look()
        return run.describe()
    except Exception as error:
        return run.nothing_but(f"it can't be shown: {type(error).__name__}: {error}")


def _looked(run: RunFolder) -> dict[str, Any]:
    run.look()
    return run.curves()


def _findings(run: RunFolder) -> list[dict[str, Any]]:
    run.look()
    return [asdict(finding) for finding in find(run.metrics.rows, run.config())]


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
