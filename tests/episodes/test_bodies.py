"""Bodies that are too large, too slow or too many at once: turned away, whatever a client sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tandem.episodes.address.server import BRANCH, LOOPBACK, Address, Bodies, Seat, listening, serve
from tests.episodes.test_address import TALK, Policy

BODY = json.dumps({"messages": TALK}).encode()


def at_port(policy: Policy, talk: Callable[[int, str], Awaitable[Any]], bodies: Bodies | None = None) -> Any:
    """What ``talk`` (port, key) makes of an address whose key has room for many."""

    async def run() -> Any:
        address, at = Address({"temperature": 1.0, "top_p": 1.0}, bodies=bodies), listening()
        server, task = serve(address, at)
        try:
            with address.seated(Seat(policy.ask, parallel=64, branches=True)) as key:
                return await talk(at.getsockname()[1], key)
        finally:
            server.should_exit = True
            await task

    return asyncio.run(run())


async def request(port: int, key: str, *lines: str, body: bytes = b"") -> tuple[asyncio.StreamReader, Any]:
    """A request of which ``body`` is sent so far."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: here", f"Authorization: Bearer {key}", *lines]
    writer.write("\r\n".join([*head, "", ""]).encode() + body)
    await writer.drain()
    return reader, writer


async def told(reader: asyncio.StreamReader) -> tuple[int, str, str]:
    """The status, the head in small letters, and the message of the error."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].split("\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    return int(head.split()[1]), head, body.get("error", {}).get("message", "")


def test_a_body_that_says_how_large_it_is_is_refused_before_any_of_it_is_read() -> None:
    async def talk(port: int, key: str) -> Any:
        reader, writer = await request(port, key, f"Content-Length: {1 << 30}")  # and nothing of it
        found = await told(reader)
        writer.close()
        return found

    status, head, message = at_port(policy := Policy(), talk)
    assert (status, message) == (413, "the body has more than 16 MiB") and "connection: close" in head
    assert not policy.asked


def test_a_body_that_does_not_say_so_is_refused_once_it_is_too_large() -> None:
    async def talk(port: int, key: str) -> Any:
        reader, writer = await request(port, key, "Transfer-Encoding: chunked")
        for _ in range(3):
            writer.write(b"4\r\n1234\r\n")
        found = await told(reader)
        writer.close()
        return found

    assert at_port(Policy(), talk, Bodies(largest=10))[0] == 413


def test_bodies_that_come_slowly_are_held_up_to_a_bound_and_let_go() -> None:
    async def talk(port: int, key: str) -> Any:
        length, half = f"Content-Length: {len(BODY)}", len(BODY) // 2
        slow = [await request(port, key, length, body=BODY[:half]) for _ in range(6)]
        while bodies.held < 6 * half:
            await asyncio.sleep(0.01)
        reader, writer = await request(port, key, length, body=BODY)
        status, head, _ = await told(reader)
        writer.close()
        for _, late in slow[3:]:
            late.close()
        while bodies.held > 3 * half:
            await asyncio.sleep(0.01)
        again, _ = await request(port, key, length, body=BODY)
        statuses = [(await told(again))[0]]
        for reader, late in slow[:3]:
            late.write(BODY[half:])
            statuses.append((await told(reader))[0])
        return status, "retry-after: 1" in head, statuses, bodies.held

    bodies = Bodies(most=6 * (len(BODY) // 2) + 10)
    assert at_port(Policy(), talk, bodies) == (429, True, [200] * 4, 0)


def test_a_body_that_never_comes_ends_its_request() -> None:
    async def talk(port: int, key: str) -> Any:
        reader, _ = await request(port, key, f"Content-Length: {len(BODY)}", body=BODY[:4])
        return await told(reader)

    status, _, message = at_port(Policy(), talk, Bodies(seconds=0.05))
    assert (status, message) == (408, "the body has not come in 0.05 s")


@pytest.mark.parametrize(("given", "status"), [("1", 200), ("-1", 400), ("two", 400)])
def test_a_branch_is_a_number(given: str, status: int) -> None:
    async def talk(port: int, key: str) -> Any:
        reader, _ = await request(port, key, f"{BRANCH}: {given}", f"Content-Length: {len(BODY)}", body=BODY)
        return await told(reader)

    found, _, message = at_port(policy := Policy(), talk)
    assert found == status and (not message or BRANCH in message)
    assert [asked["branch"] for asked in policy.asked] == [1] * (status == 200)
