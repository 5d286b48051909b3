"""The episode ``program``: a program of yours, in any language, that talks to the policy at an OpenAI address.

It finds the address and its key in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, and the task as JSON on standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from tandem.episodes.policy import EpisodeOver, Policy, Task

if TYPE_CHECKING:
    from tandem.episodes.address.server import Address

_KEPT = 1 << 16  # bytes of the end of what a program prints
_addresses: dict[asyncio.AbstractEventLoop, tuple[Address, str, asyncio.Task[None]]] = {}


async def program(
    task: Task, policy: Policy, *, command: list[str], reward: Literal["answer", "manager"] = "answer"
) -> Any:
    """Run ``command`` until it ends. Its ``answer`` is the reward: the last line that it prints, a number or a JSON
    object with ``score``; or the reward ``manager`` scores the last turn.
    """
    async with _seat(policy) as (url, key, over):
        printed, said, status = await _run(policy, command, url, key, json.dumps(asdict(task)).encode())
        if status != 0:
            if limit := over():
                raise EpisodeOver(limit)
            last = said.decode(errors="replace").strip()[-500:]
            raise RuntimeError(f"{command[0]} ended with status {status}: {last or 'it said nothing'}")
    if reward == "manager":
        return None
    lines = printed.decode(errors="replace").strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        shown = lines[-1][:80] if lines else "nothing"
        raise ValueError(f"the last line that {command[0]} printed is no reward: {shown!r}") from None


@asynccontextmanager
async def _seat(policy: Policy) -> AsyncIterator[tuple[str, str, Any]]:
    """Give the episode a key at the address of this process, which is there from the first one on."""
    from tandem.episodes.address.server import LOOPBACK, Address, Seat, listening, serve

    loop = asyncio.get_running_loop()
    if loop not in _addresses:
        address, at = Address(policy.sampling), listening()
        _addresses[loop] = address, f"http://{LOOPBACK}:{at.getsockname()[1]}/v1", serve(address, at)[1]
    address, url, _ = _addresses[loop]
    seat = Seat(policy.ask, parallel=policy.branches, in_turn=policy.exact, branches=True)
    with address.seated(seat) as key:
        yield url, key, lambda: seat.over


async def _run(policy: Policy, command: list[str], url: str, key: str, given: bytes) -> tuple[bytes, bytes, int]:
    """Run the program; what it printed last, what it said last on standard error, and its status."""
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    try:
        running = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    except OSError as error:
        raise RuntimeError(f"{command[0]} can't be run: {error.strerror}") from None
    assert running.stdin is not None and running.stdout is not None and running.stderr is not None
    try:
        ends = (_end_of(running.stdout), _end_of(running.stderr), _feed(running.stdin, given))
        printed, said, _ = await asyncio.gather(*ends)
        return printed, said, await running.wait()
    finally:
        if running.returncode is None:
            policy.leaked = True  # whatever it started goes with this process
            running.kill()
            await running.wait()


async def _feed(stream: asyncio.StreamWriter, given: bytes) -> None:
    try:
        stream.write(given)
        await stream.drain()
        stream.close()
    except (BrokenPipeError, ConnectionResetError):  # it doesn't want to know
        pass


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    end = b""
    while part := await stream.read(_KEPT):
        end = (end + part)[-_KEPT:]
    return end
