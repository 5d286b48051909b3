"""Reading a YAML document: YAML 1.2 scalars, duplicate keys refused, errors that name file and line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tandem.base.errors import Problem
from tandem.base.regular import regular

# YAML 1.2 core schema. PyYAML follows YAML 1.1, where 1e-6 is a text, `on` is true and 1:30 is 90.
SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)

MOST_NODES = 100_000
"""Nodes of a document with its aliases followed: a few lines of nested aliases can stand for billions."""
MOST_LEVELS = 100
MOST_BYTES = 2**18
"""Of a file: a config has some thousand."""
SHOWN = 120
"""Characters of a faulty line that are shown."""
LARGEST = 2**63 - 1
"""What an integer may be: larger ones are a slip of the pen, and overflow wherever they are divided."""


class DocumentError(Exception):
    """A text that is not one YAML document; carries the problem to report."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class Yaml12Loader(yaml.SafeLoader):
    """``SafeLoader`` with the scalars of YAML 1.2, keys that are written twice refused, depth and aliases bounded."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Read an opening bracket; raises where there are too many inside each other (time grows with their square)."""
        if self.flow_level >= MOST_LEVELS:
            raise yaml.scanner.ScannerError(None, None, f"more than {MOST_LEVELS} levels", self.get_mark())
        super().fetch_flow_collection_start(token)

    def get_single_node(self) -> yaml.Node | None:
        """Return the document's root; raises where its aliases stand for too much, or for themselves."""
        root: yaml.Node | None = super().get_single_node()
        if root is not None:
            _count(root, {})
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a dict; raises where a key stands twice, or a colon in braces has no space behind it."""
        if isinstance(node, yaml.MappingNode):
            first: dict[str, yaml.Node] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                if key.value in first:
                    line = first[key.value].start_mark.line + 1
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice (first in line {line})", key.start_mark
                    )
                first[key.value] = key
                name, colon, rest = key.value.partition(":")
                if node.flow_style and colon and key.style is None and _is_nothing(value):
                    reason = f"{key.value!r} is one word: write a space behind the colon, {{{name}: {rest}}}"
                    raise yaml.constructor.ConstructorError(None, None, reason, key.start_mark)
        return super().construct_mapping(node, deep)


def _is_nothing(value: yaml.Node) -> bool:
    return isinstance(value, yaml.ScalarNode) and value.style is None and not value.value


def _count(node: yaml.Node, counted: dict[int, int | None]) -> int:
    """Count the nodes below ``node`` with every alias followed; ``counted`` knows those that were counted (None:
    begun).
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in counted:
        counted[id(node)] = None
        parts = [part for pair in node.value for part in (pair if isinstance(node, yaml.MappingNode) else (pair,))]
        counted[id(node)] = 1 + sum(_count(part, counted) for part in parts)
    found = counted[id(node)]
    if found is None or found > MOST_NODES:
        what = "an alias stands for itself" if found is None else f"more than {MOST_NODES} nodes with aliases followed"
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
    return found


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    number = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if abs(number) > LARGEST:
        raise ValueError(f"an integer of {len(text)} digits")
    return number


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


Yaml12Loader.yaml_implicit_resolvers = {}  # not those of YAML 1.1
for _tag, _pattern, _first in SCALARS:
    Yaml12Loader.add_implicit_resolver(
        _tag, re.compile(rf"^(?:{_pattern})$"), [c for c in _first if c != "\0"] + [""] * ("\0" in _first)
    )
Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
Yaml12Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str | bytes, name: str) -> Any:
    """Return the one document in ``text``; ``name`` stands for it in errors. Raises ``DocumentError``."""
    try:
        # A SafeLoader: it constructs plain data only.
        return yaml.load(text, Loader=Yaml12Loader)
    except yaml.MarkedYAMLError as error:
        raise DocumentError(_syntax_problem(error, text, name)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = "not a text in UTF-8"
        raise DocumentError(Problem(name, type(error).__name__, reason, "Save the file as UTF-8 text")) from error
    except ValueError as error:  # a number of thousands of digits
        raise DocumentError(Problem(name, "...", str(error), "Write a shorter number")) from error
    except RecursionError as error:
        raise DocumentError(Problem(name, "...", "nested too deeply", "Write fewer levels")) from error


def _syntax_problem(error: yaml.MarkedYAMLError, text: str | bytes, name: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    reason = " ".join(str(part) for part in (error.context, error.problem) if part)
    if mark is None:
        return Problem(name, "", f"not valid YAML: {reason}", "Correct the syntax")
    lines = (text.decode("utf-8", "replace") if isinstance(text, bytes) else text).splitlines()
    line = lines[mark.line].strip()[:SHOWN] if mark.line < len(lines) else ""
    remedy = "Remove one of the two" if "stands twice" in reason else "Correct the syntax there"
    return Problem(f"{name}, line {mark.line + 1}, column {mark.column + 1}", line, f"not valid YAML: {reason}", remedy)


def read_document(path: Path) -> dict[Any, Any]:
    """Return the mapping in a YAML file. Raises ``DocumentError`` where there is no such file or it holds something
    else.
    """
    try:
        text = regular(path).read_bytes()
    except OSError as error:
        reason = f"can't be read: {error.strerror or error}"
        raise DocumentError(Problem("config file", str(path), reason, "Give the path of a YAML file")) from error
    if len(text) > MOST_BYTES:
        reason, remedy = "too large for a config", "Give the YAML file of a run, not its data"
        raise DocumentError(Problem(str(path), f"{len(text)} bytes", reason, remedy))
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        remedy = "Write `key: value` lines; `tandem init` writes an example"
        raise DocumentError(Problem(str(path), tree, "not a mapping of keys to values", remedy))
    return tree
