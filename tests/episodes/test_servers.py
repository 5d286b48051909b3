"""Tools of MCP servers, and the built-in tool that runs programs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.base.errors import ConfigError
from tandem.episodes.servers import server_definitions
from tandem.episodes.toolbox import all_tools
from tandem.reward.outcome import Outcome
from tests.episodes.test_groups import Says, made_of, playing, prompt

COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
SERVERS = {"sums": COMMAND}


def call(name: str, **given: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"


def says(text: str, seed: int) -> str:
    """Each prompt names a tool, and the second turn ends."""
    if "tool_response" in text:
        return "the answer is 12"
    asked = text.rpartition("user\n")[2].partition("<")[0]
    return call(asked, **({} if asked in ("quits", "pid") else {"x": 3}))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_model_calls_the_tools_of_a_server_which_ends_with_the_episodes() -> None:
    pytest.importorskip("mcp")
    asked = ["add", "broken", "quits", "pid"]
    plays: Says = says
    offered = server_definitions(SERVERS, 60.0)
    options = {
        "n": 1,
        "max_tokens": 2000,
        "tools": ("python",),
        "sandbox": {"isolation": "limits"},
        "offered": offered,
        "servers": SERVERS,
    }
    with playing("tool_calls", plays, **options) as (groups, engine, made):
        found = [made_of(groups, engine, [prompt(made, name)])[0] for name in asked]
    facts = {name: group.batch.non_tensor_batch["episode"][0] for name, group in zip(asked, found, strict=True)}
    results = {name: [m["content"] for m in fact["messages"] if m["role"] == "tool"] for name, fact in facts.items()}
    assert results["add"] == ["4"] and facts["add"]["tool_errors"] == 0
    assert (
        results["broken"] == ["Error: Error executing tool broken: no 3 today"] and facts["broken"]["tool_errors"] == 1
    )
    (verdict,) = found[2].verdicts
    assert verdict.outcome is Outcome.FAILED and "the MCP server sums ended in a call of quits" in verdict.reason
    (pid,) = map(int, results["pid"])  # the server was started again
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_definitions_are_those_of_the_server() -> None:
    pytest.importorskip("mcp")
    (add, *_) = server_definitions(SERVERS, 60.0)
    assert add["function"]["name"] == "add" and add["function"]["description"] == "Add two numbers."
    assert add["function"]["parameters"]["required"] == ["x"]


@pytest.mark.parametrize(
    ("word", "reason"), [("ends", "the MCP server sums .* doesn't start: "), ("hangs", "it doesn't answer within 2 s")]
)
def test_a_server_that_does_not_start_is_told(word: str, reason: str) -> None:
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match=reason):
        server_definitions({"sums": [*COMMAND, word]}, 2.0 if word == "hangs" else 60.0)


def test_python_runs_programs_in_a_sandbox() -> None:
    tool = all_tools(["python"], {"isolation": "limits", "seconds": 2.0})["python"]
    assert tool.definition["function"]["parameters"]["required"] == ["code"]
    assert tool.function("x = 6\nprint(x)\nx * 7") == "6\n42"
    with pytest.raises(ValueError, match=r"^1\nline 2: ZeroDivisionError: division by zero$"):
        tool.function("print(1)\n1 / 0")
    with pytest.raises(ValueError, match="line 1"):
        tool.function("if")
    with pytest.raises(ValueError, match="more than 2 s"):
        tool.function("while True: pass")


def test_a_model_runs_programs() -> None:
    plays: Says = lambda text, seed: "12" if "tool_response" in text else call("python", code="print(3 * 4)")  # noqa: E731
    offered = [tool.definition for tool in all_tools(["python"], {"isolation": "limits"}).values()]
    options = {"n": 1, "max_tokens": 2000, "tools": ("python",), "offered": offered, "sandbox": {"isolation": "limits"}}
    with playing("tool_calls", plays, **options) as (groups, engine, made):
        (group,) = made_of(groups, engine, [prompt(made, "what is 3*4")])
    (facts,) = group.batch.non_tensor_batch["episode"]
    assert [m["content"] for m in facts["messages"]][2:] == ["12", "12"]
    assert (facts["tool_calls"], facts["tool_errors"]) == (1, 0)


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def python(code: str) -> str:\n    return code\n")
    with pytest.raises(ConfigError, match="there are two tools 'python'"):
        all_tools(["python", str(tmp_path / "mine.py")], {"isolation": "limits"})
