"""The address as an ASGI app, and a server of it in the running event loop."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tandem.base.errors import DataError, TandemError
from tandem.episodes.address.protocol import Chat, Completion, Question, RefusedError, read
from tandem.episodes.address.responses import Head, Reply, Stream
from tandem.episodes.policy import Answer, EpisodeOver, PolicyError
from tandem.episodes.text_stream import Hear, Part

LOOPBACK = "127.0.0.1"
MODEL = "policy"
BRANCH = "X-Tandem-Branch"
"""The header that says which branch of its episode a request is of."""

_LARGEST = 16 << 20  # bytes of a body
_RETRY_S = 1

Ask = Callable[..., Awaitable[Answer]]
"""Gives the answer to a question; what is given behind it hears parts of it before."""


StreamItem = tuple[int, Part | Answer | Exception]
"""Which choice, and what there is of it."""


class Seat:
    """Whoever may ask with one key. ``parallel`` questions are under way at most, ``waiting`` more requests are held.

    ``branches``: requests may say which branch they are of; one of each may be under way as well. ``in_turn``: a
    request that comes while another of its branch, or one of no branch, is under way is refused, since which comes
    first is chance. ``over`` is the limit that has ended the episode, once one has.
    """

    def __init__(
        self, ask: Ask, *, parallel: int = 1, waiting: int = 16, in_turn: bool = False, branches: bool = False
    ) -> None:
        self.over, self.branches = "", branches
        self._ask, self._most, self._in_turn = ask, parallel + waiting, in_turn
        self._held: Counter[int | None] = Counter()
        self._turns: dict[int | None, asyncio.Semaphore] = {None: asyncio.Semaphore(1 if in_turn else parallel)}
        self._streams: set[asyncio.Task[None]] = set()

    @contextmanager
    def held(self, branch: int | None = None) -> Iterator[None]:
        """Hold a request, from before its body is read until it is answered. Raises ``BusyError``, ``RefusedError``."""
        if self._in_turn and (self._held[branch] or self._held[None] or (branch is None and self._held.total())):
            raise RefusedError(
                "trainer.exact: an episode asks one thing at a time: await the answer first, or send a branch with "
                f"each, {BRANCH}: 1, up to rollout.episode.branches"
            )
        if self._held.total() >= self._most:
            raise BusyError
        self._held[branch] += 1
        try:
            yield
        finally:
            self._held[branch] -= 1

    async def answers(self, asked: Chat | Completion, branch: int | None = None) -> list[Answer]:
        """Return the answers to a request, one for each choice."""
        choices = (self._one(asked.question(i), branch) for i in range(asked.n))
        found = await asyncio.gather(*choices, return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if not isinstance(one, BaseException)]

    def stream(self, asked: Chat | Completion, held: ExitStack, branch: int | None = None) -> asyncio.Queue[StreamItem]:
        """Begin to answer; the queue gets parts of each choice, its answer, or what keeps it from being answered.

        A client that goes away changes nothing: what was begun is answered, and ``held`` until then.
        """
        items: asyncio.Queue[StreamItem] = asyncio.Queue()

        async def one(choice: int) -> None:
            try:
                said = await self._one(asked.question(choice), branch, lambda p: items.put_nowait((choice, p)))
                items.put_nowait((choice, said))
            except Exception as error:
                items.put_nowait((choice, error))

        async def every() -> None:
            with held:
                await asyncio.gather(*map(one, range(asked.n)))

        task = asyncio.get_running_loop().create_task(every())
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        return items

    async def _one(self, question: Question, branch: int | None, *hear: Hear) -> Answer:
        async with self._turns.setdefault(branch, asyncio.Semaphore(1)):
            try:
                return await self._ask(question if branch is None else {**question, "branch": branch}, *hear)
            except EpisodeOver as over:
                self.over = str(over)
                raise RefusedError(f"the episode is over: it has reached the limit of {over}") from None


class BusyError(Exception):
    """Too many questions wait already."""


class BodyError(Exception):
    """A body that isn't taken, with the ``status`` that says so."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Address:
    """The app: who asks is told apart by the key. ``sampling``: what every answer is drawn with."""

    def __init__(self, sampling: Mapping[str, float], model: str = MODEL, bodies: Bodies | None = None) -> None:
        self._sampling, self._model = sampling, model
        self._seats: dict[str, Seat] = {}
        self._bodies = bodies or Bodies()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
            ]
        )

    @contextmanager
    def seated(self, seat: Seat, key: str | None = None) -> Iterator[str]:
        """Let ``seat`` be asked with the key that comes, for as long as the block runs."""
        key = key or f"tandem-{secrets.token_urlsafe(24)}"
        self._seats[key] = seat
        try:
            yield key
        finally:
            del self._seats[key]

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        if self._seat(request) is None:
            return _no_key()
        listed = {"id": self._model, "object": "model", "created": 0, "owned_by": "tandem"}
        return JSONResponse({"object": "list", "data": [listed]})

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, Chat)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, Completion)

    async def _answer(self, request: Request, kind: type[Chat] | type[Completion]) -> Response:
        seat = self._seat(request)
        if seat is None:
            return _no_key()
        head = Head(f"{kind.__name__.lower()}-{secrets.token_hex(8)}", int(time.time()), self._model)
        try:
            branch = _branch(request, seat)
            with ExitStack() as held:
                held.enter_context(seat.held(branch))
                body = held.enter_context(self._bodies.counted())
                asked = read(kind, await body(request), self._sampling)
                if not asked.stream:
                    return JSONResponse(Reply(asked, await seat.answers(asked, branch), head).body())
                items = seat.stream(asked, held.pop_all(), branch)
            first = await items.get()
            if isinstance(first[1], Exception):
                raise first[1]
        except (BusyError, BodyError, TandemError) as error:
            return _problem(error, seat)
        except ClientDisconnect:  # before all of its body was here: there is nobody to be told
            return Response(status_code=400)
        return StreamingResponse(_events(Stream(asked, head), first, items, seat), media_type="text/event-stream")

    def _seat(self, request: Request) -> Seat | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._seats.get(key.strip()) if scheme.lower() == "bearer" else None


def _branch(request: Request, seat: Seat) -> int | None:
    """Return the branch that a request is of; None where it doesn't say. Raises ``RefusedError``."""
    given = request.headers.get(BRANCH)
    if given is None:
        return None
    if not seat.branches:
        raise RefusedError(f"{BRANCH}: nothing is an episode here, so leave it out")
    if not given.isdecimal() or len(given) > 4:
        raise RefusedError(f"{BRANCH} is a number from 0 on, not {given[:20]!r}")
    return int(given)


class Bodies:
    """Reads bodies. ``largest`` bytes has one at most, ``most`` all that are ``held`` together; each comes in
    ``seconds``.
    """

    def __init__(self, largest: int = _LARGEST, most: int = 16 * _LARGEST, seconds: float = 60.0) -> None:
        self.held, self._largest, self._most, self._seconds = 0, largest, most, seconds

    @contextmanager
    def counted(self) -> Iterator[Callable[[Request], Awaitable[bytes]]]:
        """Give what reads a body, which counts as held until the block ends. Reading raises ``BusyError`` where there
        is no room for it now, and ``BodyError`` for one that is too large or too slow.
        """
        taken = 0

        async def read_body(request: Request) -> bytes:
            nonlocal taken
            length = request.headers.get("content-length", "")
            if length.isdecimal() and int(length) > self._largest:  # before any of it is read
                raise self._too_large()
            body = bytearray()
            async for part in request.stream():
                body += part
                self.held, taken = self.held + len(part), taken + len(part)
                if len(body) > self._largest:
                    raise self._too_large()
                if self.held > self._most:
                    raise BusyError
            return bytes(body)

        async def in_time(request: Request) -> bytes:
            try:
                async with asyncio.timeout(self._seconds):
                    return await read_body(request)
            except TimeoutError:
                raise BodyError(408, f"the body has not come in {self._seconds:g} s") from None

        try:
            yield in_time
        finally:
            self.held -= taken

    def _too_large(self) -> BodyError:
        return BodyError(413, f"the body has more than {self._largest >> 20} MiB")


async def _events(
    stream: Stream, first: StreamItem, items: asyncio.Queue[StreamItem], seat: Seat
) -> AsyncIterator[str]:
    choice, what = first
    while not isinstance(what, Exception):
        for chunk in stream.chunks(choice, what):
            yield f"data: {json.dumps(chunk)}\n\n"
        if stream.ended:
            yield "data: [DONE]\n\n"
            return
        choice, what = await items.get()
    yield f"data: {bytes(_problem(what, seat).body).decode()}\n\n"


def _no_key() -> Response:
    text = "no episode has this key: send the one you were given, Authorization: Bearer KEY"
    return _refusal(401, text, "invalid_api_key")


def _problem(error: Exception, seat: Seat) -> JSONResponse:
    """Return what a client is told of an error."""
    match error:
        case BusyError():
            text = "too many questions wait already: ask again later"
            return _refusal(429, text, "rate_limit_exceeded", headers={"Retry-After": str(_RETRY_S)})
        case BodyError():
            return _refusal(error.status, str(error), "invalid_body", headers={"Connection": "close"})
        case RefusedError():
            return _refusal(400, str(error), "episode_over" if seat.over else "invalid_value", error.field)
        case DataError() | PolicyError():  # the policy can't be asked this
            return _refusal(400, str(error), "invalid_value")
    return _refusal(503, str(error), "unavailable")


def _refusal(
    status: int, text: str, code: str, field: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    types = {429: "rate_limit_error", 503: "server_error"}
    problem = {"message": text, "type": types.get(status, "invalid_request_error")}
    return JSONResponse({"error": {**problem, "param": field, "code": code}}, status, headers)


class _Server(uvicorn.Server):
    """A server that leaves signals to whoever runs the loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave every signal alone, for the loop to be ended by."""
        yield


def listening(port: int = 0, host: str = LOOPBACK) -> socket.socket:
    """Return a socket that listens at ``port``; 0: any. Raises ``TandemError`` where it can't be had."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen()  # who comes before the server waits for it
    except OSError as error:
        found.close()
        raise TandemError(f"{host}:{port} can't be had ({error.strerror}): choose another port") from error
    return found


def serve(address: Address, at: socket.socket) -> tuple[uvicorn.Server, asyncio.Task[None]]:
    """Serve in the running loop; ``should_exit`` of the server ends the task."""
    config = uvicorn.Config(
        address.app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=2
    )
    server = _Server(config)
    return server, asyncio.get_running_loop().create_task(server.serve([at]))
