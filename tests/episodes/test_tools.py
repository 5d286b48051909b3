"""Functions as tools: what a chat template is told of them, and what is made of a model's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import ConfigError
from tandem.episodes.static import wrong_tools
from tandem.episodes.tools import as_text, load_tools

GOOD = '''
from typing import Literal

def add(x: int, y: int = 1) -> int:
    """Add two numbers."""
    return x + y

async def look(city: str, unit: Literal["C", "F"] = "C") -> dict:
    return {"city": city, "unit": unit}

def _hidden(x):
    return x
'''


def write(folder: Path, text: str) -> Path:
    file = folder / "tools.py"
    file.write_text(text)
    return file


def test_type_hints_become_a_schema(tmp_path: Path) -> None:
    tools = load_tools(str(write(tmp_path, GOOD)))
    assert sorted(tools) == ["add", "look"]
    assert tools["add"].definition == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 1}},
                "required": ["x"],
            },
        },
    }
    assert tools["look"].definition["function"]["parameters"]["properties"]["unit"]["enum"] == ["C", "F"]
    assert (tools["add"].is_async, tools["look"].is_async) == (False, True)


def test_arguments_are_checked_and_defaults_filled_in(tmp_path: Path) -> None:
    add = load_tools(str(write(tmp_path, GOOD)))["add"]
    assert add.bind({"x": 3}) == {"x": 3, "y": 1}
    assert add.bind({"x": "3"}) == {"x": 3, "y": 1}  # what a model quotes by mistake
    for wrong in ({}, {"x": "three"}, {"x": 1, "z": 2}):
        with pytest.raises(ValueError, match="wrong arguments: "):
            add.bind(wrong)


@pytest.mark.parametrize("name", ["model_config", "_x", "copy", "json", "schema", "model_extra"])
def test_a_parameter_may_have_any_name(tmp_path: Path, name: str, recwarn: pytest.WarningsRecorder) -> None:
    tool = load_tools(str(write(tmp_path, f"def f({name}: int, y: str = 'a'): return {name}")))["f"]
    assert [*tool.definition["function"]["parameters"]["properties"]] == [name, "y"]
    assert tool.definition["function"]["parameters"]["required"] == [name]
    assert tool.bind({name: 3}) == {name: 3, "y": "a"}
    with pytest.raises(ValueError, match=name):
        tool.bind({})
    assert not recwarn.list


@pytest.mark.parametrize(("result", "text"), [("plain", "plain"), (3, "3"), ({"a": "é"}, '{"a": "é"}'), (None, "null")])
def test_results_are_text(result: Any, text: str) -> None:
    assert as_text(result) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(x): return x", "parameter 'x' has no type hint"),
        ("x = 1", "no function"),
        ("def f(*x: int): ...", "given by their names"),
        ("def f(x: int, /): ...", "given by their names"),
        ("def f(", "not Python"),
    ],
)
def test_what_can_be_no_tool_is_told_without_running_the_file(tmp_path: Path, source: str, reason: str) -> None:
    file = write(tmp_path, source)
    assert reason in str(wrong_tools(file))
    with pytest.raises(ConfigError):
        load_tools(str(file))


def test_a_good_file_has_no_fault(tmp_path: Path) -> None:
    assert wrong_tools(write(tmp_path, GOOD)) is None
    assert "can't be read" in str(wrong_tools(tmp_path / "none.py"))
