"""An MCP server over standard input and output, some of whose tools break."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.fastmcp import FastMCP

if sys.argv[1:] == ["hangs"]:
    time.sleep(600)
if sys.argv[1:] == ["ends"]:
    sys.exit("no licence")

server = FastMCP("sums")


@server.tool()
def add(x: int, y: int = 1) -> int:
    """Add two numbers."""
    return x + y


@server.tool()
def broken(x: int) -> int:
    """Always fail."""
    raise RuntimeError(f"no {x} today")


@server.tool()
def quits() -> int:
    """End the server."""
    os._exit(3)


@server.tool()
def pid() -> int:
    """The process of the server."""
    return os.getpid()


server.run()
