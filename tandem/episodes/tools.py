"""Tools: plain functions of a file, whose type hints say what a model may call them with. Imports no torch."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tandem.base.errors import ConfigError, Problem
from tandem.base.user_code import import_file, import_problem

KEY = "actor_rollout_ref.rollout.episode.tools"
"""Where a config names the file of the tools."""


@dataclass(frozen=True)
class Tool:
    """One function as a tool: its ``definition`` for chat templates, and the ``arguments`` that it takes.

    ``arguments`` None: it checks them itself.
    """

    function: Callable[..., Any]
    definition: dict[str, Any]
    arguments: type[BaseModel] | None

    @property
    def is_async(self) -> bool:
        """Whether calling it gives something to be awaited."""
        return inspect.iscoroutinefunction(self.function)

    def bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the function's types say. Raises ``ValueError`` in words that a model may read."""
        if self.arguments is None:
            return dict(given)
        try:
            checked = self.arguments.model_validate(dict(given))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ValueError(f"wrong arguments: {wrong}") from None
        return {field.alias or name: getattr(checked, name) for name, field in self.arguments.model_fields.items()}


def load_tools(file: str) -> dict[str, Tool]:
    """Return the tools by name: every function that ``file`` defines and whose name has no underscore in front.

    Raises ``ConfigError`` for a file that can't be run, defines none, or has one without type hints.
    """
    if not Path(file).is_file():
        raise ConfigError([Problem(KEY, file, "there is no such file", "Write the path of a .py file")])
    try:
        module = import_file(file)
    except (Exception, SystemExit) as error:
        raise ConfigError([import_problem(KEY, file, error)]) from error
    functions = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    if not functions:
        raise ConfigError([Problem(KEY, file, "it defines no function", "Define the tools in it")])
    try:
        return {name: make_tool(name, function) for name, function in functions.items()}
    except (TypeError, NameError) as error:
        remedy = "Write a type for each parameter: def add(x: int)"
        raise ConfigError([Problem(KEY, file, str(error), remedy)]) from error


def make_tool(name: str, function: Callable[..., Any]) -> Tool:
    """Return the tool that ``function`` is. Raises ``TypeError`` where a parameter has no type that JSON can say."""
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name!r}: parameter {parameter.name!r} can't be given by its name")
        if parameter.name not in hints:
            raise TypeError(f"tool {name!r}: parameter {parameter.name!r} has no type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Pydantic takes some names for its own and drops others, so that a parameter's own name is an alias.
        fields[f"parameter_{number}"] = (hints[parameter.name], Field(default, alias=parameter.name))
    try:
        arguments = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
        schema = _without_titles(arguments.model_json_schema())
    except Exception as error:  # pydantic has several kinds
        raise TypeError(f"tool {name!r}: {error}") from error
    schema.pop("additionalProperties", None)
    schema.setdefault("properties", {})
    described = {"name": name, "description": inspect.getdoc(function) or "", "parameters": schema}
    return Tool(function, {"type": "function", "function": described}, arguments)


def as_text(result: object) -> str:
    """Return what a tool returned, as the text of a message: text as it is, anything else as JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without the titles that pydantic makes of names: they cost tokens and say nothing."""

    def cleaned(value: Any, named: bool) -> Any:
        if isinstance(value, dict):
            kept = {key: item for key, item in value.items() if named or key != "title"}
            return {key: cleaned(item, key in ("properties", "$defs") and not named) for key, item in kept.items()}
        return [cleaned(item, False) for item in value] if isinstance(value, list) else value

    found: dict[str, Any] = cleaned(schema, False)
    return found
