"""Size budgets of the code base: prints whatever file, folder, function or name that breaks one; exit code 1 if so.

Run as ``python tools/budgets.py [ROOT]``.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDERS = ("tandem", "tests", "tools", "examples", "bench")
FILE_LINES = 400
FUNCTION_LINES = 60
MODE_FILE_LINES = 120
PROTOCOL_MEMBERS = 9
FOLDER_FILES = 25
FORBIDDEN_NAMES = frozenset({"utils", "util", "helpers", "helper", "manager", "misc", "common"})
MODE_FOLDER = Path("tandem/control")


def violations(root: Path) -> list[str]:
    """Every broken budget under ``root``, as ``path[:line]: what and how much``, in path order."""
    files = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    broken = [problem for path in files for problem in check_file(path.relative_to(root), path.read_text("utf-8"))]
    return [*broken, *check_folders(path.relative_to(root) for path in files)]


def check_folders(files: Iterable[Path]) -> Iterator[str]:
    """Folders of ``tandem/`` with so many files that their names no longer say where to look."""
    counted = Counter(path.parent for path in files if path.parts[0] == "tandem" and path.stem != "__init__")
    for folder, count in counted.items():
        if count > FOLDER_FILES:
            yield f"{folder}: {count} files, at most {FOLDER_FILES}; part them by meaning"


def check_file(path: Path, source: str) -> Iterator[str]:
    """Broken budgets of one file; ``path`` is relative to the repository."""
    for part in (*path.parts[:-1], path.stem):
        if part in FORBIDDEN_NAMES:
            yield f"{path}: the name {part!r} says nothing; name it after what it does"
    limit = MODE_FILE_LINES if path.parent == MODE_FOLDER else FILE_LINES
    lines = len(source.splitlines())
    if lines > limit:
        yield f"{path}: {lines} lines, at most {limit}"
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: function {node.name} has {length} lines, at most {FUNCTION_LINES}"
        elif isinstance(node, ast.ClassDef) and is_protocol(node):
            count = len(member_names(node))
            if count > PROTOCOL_MEMBERS:
                yield f"{path}:{node.lineno}: protocol {node.name} has {count} members, at most {PROTOCOL_MEMBERS}"


def is_protocol(node: ast.ClassDef) -> bool:
    """Whether the class derives from ``Protocol``, ``Protocol[T]`` or ``typing.Protocol``."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return any(ast.unparse(base).split(".")[-1] == "Protocol" for base in bases)


def member_names(node: ast.ClassDef) -> set[str]:
    """Names that an implementation must provide; overloads and a property's setter count once."""
    names: set[str] = set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(item.name)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        elif isinstance(item, ast.Assign):
            names.update(target.id for target in item.targets if isinstance(target, ast.Name))
    return names


def main() -> int:
    """Print the violations; the exit code."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    problems = violations(root)
    print("\n".join(problems) if problems else "size budgets: all kept")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
