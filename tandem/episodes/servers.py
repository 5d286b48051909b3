"""MCP servers over standard input and output, whose tools a model may call. Needs the extra ``mcp``.

The package ``mcp`` speaks the protocol. The server's process is started here, in the process group of whoever starts
it: the package would give it a session of its own, and it could outlive the process of the episodes.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from tandem.base.errors import ConfigError, Problem
from tandem.episodes.tools import Tool

KEY = "actor_rollout_ref.rollout.episode.mcp"
"""Where a config names servers."""

_ENDING_S = 1.0
_LONGEST = 16 << 20  # bytes of a message


class ServerEnded(BaseException):
    """The server's process has ended in a call: its episode can't go on. Not to be caught."""


class ToolServer:
    """One server: started on ``tools``, and again by the first call after it has ended."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name, self._command = name, list(command)
        self._running: asyncio.Task[None] | None = None
        self._session: Any = None
        self._listed: list[Any] = []
        self._starting = asyncio.Lock()

    async def tools(self) -> dict[str, Tool]:
        """Start the server and return its tools by name."""
        await self._start()
        return {one.name: self._tool(one) for one in self._listed}

    async def close(self) -> None:
        """End the server at once."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def _tool(self, listed: Any) -> Tool:
        async def call(**given: Any) -> str:
            return await self._call(listed.name, given)

        described = {"name": listed.name, "description": listed.description or "", "parameters": listed.inputSchema}
        return Tool(call, {"type": "function", "function": described}, None)

    async def _call(self, tool: str, given: Mapping[str, Any]) -> str:
        async with self._starting:
            await self._start()
        running = self._running
        assert running is not None
        asked = asyncio.ensure_future(self._session.call_tool(tool, dict(given)))
        try:
            await asyncio.wait([asked, running], return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and asked.exception() is not None:  # of its end the call hears first
                await asyncio.wait([running], timeout=_ENDING_S)
            if running.done():
                raise ServerEnded(f"the MCP server {self._name} ended in a call of {tool}")
            result = asked.result()
        finally:
            asked.cancel()
        text = "\n".join(map(_text, result.content))
        if result.isError:
            raise ValueError(text)
        return text

    async def _start(self) -> None:
        """Start the server if it doesn't run. Raises ``RuntimeError`` where that fails."""
        if self._running is not None and not self._running.done():
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._serve(ready))
        await asyncio.wait([ready, self._running], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            error = None if self._running.cancelled() else self._running.exception()
            why = "it ended" if error is None else _innermost(error)
            raise RuntimeError(f"the MCP server {self._name} ({self._command[0]}) doesn't start: {why}")

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Run the server until it ends, or this is cancelled."""
        session: Any = importlib.import_module("mcp").ClientSession
        async with (
            _process(self._command) as process,
            _streams(process) as (read, write),
            session(read, write) as self._session,
        ):
            await self._session.initialize()
            self._listed, more = [], None
            while True:
                page = await self._session.list_tools(cursor=more)
                self._listed += page.tools
                if (more := page.nextCursor) is None:
                    break
            ready.set_result(None)
            await process.wait()


@asynccontextmanager
async def _process(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=_LONGEST)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def _streams(process: asyncio.subprocess.Process) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the streams of a session, tied to the process: a message a line, as JSON."""
    anyio: Any = importlib.import_module("anyio")
    kind: Any = importlib.import_module("mcp.types").JSONRPCMessage
    enveloped: Any = importlib.import_module("mcp.shared.message").SessionMessage
    heard, hears = anyio.create_memory_object_stream(0)
    says, said = anyio.create_memory_object_stream(0)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def listen() -> None:
        async with heard:
            while line := await stdout.readline():
                try:
                    message = enveloped(kind.model_validate_json(line))
                except ValueError:  # what a server prints besides
                    continue
                await heard.send(message)

    async def speak() -> None:
        async with said:
            async for one in said:
                stdin.write(one.message.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n")
                await stdin.drain()

    tasks = [asyncio.create_task(listen()), asyncio.create_task(speak())]
    try:
        yield hears, says
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for stream in (heard, hears, says, said):
            stream.close()


def _text(block: Any) -> str:
    """Return one part of a result as text; what is none, such as an image, as JSON without what it shows."""
    return block.text if block.type == "text" else json.dumps({"type": block.type, "note": "no text"})


def _innermost(error: BaseException) -> str:
    """Return what went wrong first, of a group of errors too."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


async def serving(servers: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Tool]:
    """Start the servers in the running loop; return the tools of all by name. They end with the process.

    Raises ``ConfigError`` for one that doesn't start within ``seconds``, or two tools of one name.
    """
    return await _tools_of([ToolServer(name, command) for name, command in servers.items()], servers, seconds)


def server_definitions(servers: Mapping[str, Sequence[str]], seconds: float) -> list[dict[str, Any]]:
    """Return the definitions of the servers' tools, which are started for this once and ended. Raises as ``serving``
    does.
    """
    return list(_definitions(json.dumps({name: list(command) for name, command in servers.items()}), seconds))


@functools.lru_cache(maxsize=4)
def _definitions(written: str, seconds: float) -> list[dict[str, Any]]:
    servers = json.loads(written)

    async def ask() -> list[dict[str, Any]]:
        started = [ToolServer(name, command) for name, command in servers.items()]
        try:
            return [tool.definition for tool in (await _tools_of(started, servers, seconds)).values()]
        finally:
            for one in started:
                await one.close()

    with ThreadPoolExecutor(1) as apart:  # the caller's thread may have a loop of its own, as a notebook has
        return apart.submit(asyncio.run, ask()).result()


async def _tools_of(
    started: Sequence[ToolServer], servers: Mapping[str, Sequence[str]], seconds: float
) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for server, (name, command) in zip(started, servers.items(), strict=True):
        try:
            async with asyncio.timeout(seconds):
                tools = await server.tools()
        except TimeoutError:
            reason = f"it doesn't answer within {seconds:g} s"
            raise ConfigError([Problem(f"{KEY}.{name}", list(command), reason, "Try the command by itself")]) from None
        except RuntimeError as error:
            raise ConfigError([Problem(f"{KEY}.{name}", list(command), str(error), "Mend the command")]) from error
        if twice := found.keys() & tools.keys():
            reason = f"another server has a tool {min(twice)!r} too"
            raise ConfigError([Problem(f"{KEY}.{name}", list(command), reason, "Leave one of the two out")])
        found |= tools
    return found
