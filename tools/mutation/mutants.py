"""All mutants of a source file: its syntax tree with one node replaced, and where that is."""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.mutation.kinds import KINDS, UNTOLD

ROOT = Path(__file__).resolve().parents[2]
MUTATED = ROOT / "tandem" / "algorithms"


@dataclass(frozen=True)
class Mutant:
    """One small mistake: ``change`` in the function or class ``where`` of ``file``, at ``line``.

    A test can only notice it if it runs one of the lines ``first`` to ``last``: those of the statement, or of the whole
    function for a default; 0 where importing the file is enough. ``place`` and ``variant`` say which node of the file
    is replaced by which of the slips of its kind, ``nth`` tells equal changes in one function apart.
    """

    file: str
    where: str
    kind: str
    change: str
    line: int
    first: int
    last: int
    place: int
    variant: int
    nth: int = 1

    @property
    def name(self) -> str:
        """What tells it from all others, also when lines move."""
        return f"{self.file} {self.where}: {self.change}" + (f" ({self.nth})" if self.nth > 1 else "")

    def tree(self, folder: Path = MUTATED) -> ast.Module:
        """The file's syntax tree with the mistake in it."""
        tree = ast.parse((folder / self.file).read_text("utf-8"))
        place = next(itertools.islice(places(tree), self.place, None))
        place.put(list(KINDS[self.kind](place.node, place.known))[self.variant])
        return ast.fix_missing_locations(tree)


@dataclass(frozen=True)
class Place:
    """A node with the ``holder`` that has it in ``attribute``, and what is around it.

    ``where`` is the function or class, ``known`` the names bound before it, ``unit`` the statement of the file that it
    is in; lines as in ``Mutant``.
    """

    node: ast.AST
    holder: ast.AST
    attribute: str
    position: int | None
    unit: ast.stmt
    where: str = "module"
    known: frozenset[str] = frozenset()
    line: int = 0
    first: int = 0
    last: int = 0

    def put(self, node: ast.AST) -> None:
        """Have ``node`` here, at the same line."""
        if node is not self.node:
            ast.copy_location(node, self.node)
        if self.position is None:
            setattr(self.holder, self.attribute, node)
        else:
            getattr(self.holder, self.attribute)[self.position] = node


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a file in the order of its lines; two slips that give the same code are one."""
    found: list[Mutant] = []
    seen: set[str] = set()
    times: Counter[str] = Counter()
    for number, place in enumerate(list(places(ast.parse(path.read_text("utf-8"))))):
        for kind, variant, slip in slips_at(place):
            place.put(slip)
            code = ast.unparse(ast.fix_missing_locations(place.unit))
            place.put(place.node)
            if code in seen:
                continue
            seen.add(code)
            change = f"{text(place.node)} -> {text(slip)}"
            mutant = Mutant(path.name, place.where, kind, change, place.line, place.first, place.last, number, variant)
            times[mutant.name] += 1
            found.append(replace(mutant, nth=times[mutant.name]))
    return sorted(found, key=lambda mutant: mutant.line)


def slips_at(place: Place) -> list[tuple[str, int, ast.AST]]:
    """Every slip of every kind at a place: the kind's name, its number among those of the kind, the node."""
    return [(name, i, slip) for name, kind in KINDS.items() for i, slip in enumerate(kind(place.node, place.known))]


def text(node: ast.AST) -> str:
    """A node as one line of at most 100 characters."""
    short = " ".join(ast.unparse(ast.fix_missing_locations(node)).split())
    return short if len(short) <= 100 else short[:97] + "..."


def places(tree: ast.Module) -> Iterator[Place]:
    """Every node that a slip could change."""
    for position, statement in enumerate(tree.body):
        if not (isinstance(statement, ast.Import | ast.ImportFrom) or is_type_checking(statement)):
            yield from inside(Place(statement, tree, "body", position, statement, line=statement.lineno))


def is_type_checking(node: ast.stmt) -> bool:
    """Whether the statement is ``if TYPE_CHECKING: ... else: ...``."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def inside(place: Place) -> Iterator[Place]:
    """The place and those below it, without annotations and the texts of messages."""
    if isinstance(place.node, ast.JoinedStr | ast.Raise) or is_untold(place.node):
        return
    yield place
    for name, value in ast.iter_fields(place.node):
        if name in ("annotation", "returns", "ctx", "op", "ops", "bases"):
            continue
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for position, item in items:
            if isinstance(item, ast.AST):
                yield from inside(below(place, item, name, position))


def is_untold(node: ast.AST) -> bool:
    """Whether it is an argument that changes no number."""
    return isinstance(node, ast.keyword) and node.arg in UNTOLD


def below(place: Place, item: ast.AST, attribute: str, position: int | None) -> Place:
    """The place of a child: a function or class is entered, a statement sets the lines and the names bound before."""
    node, where, known = place.node, place.where, place.known
    line, first, last = getattr(item, "lineno", place.line), place.first, place.last
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        where = node.name if place.where == "module" else f"{place.where}.{node.name}"
        first, last = (0, 0) if attribute == "decorator_list" else (node.body[0].lineno, node.end_lineno or 0)
    if isinstance(item, ast.stmt):
        known = place.known | bound_before(node, item.lineno)
        if first and not isinstance(item, ast.FunctionDef | ast.ClassDef):
            first, last = item.lineno, end_of_head(item)
    return Place(item, node, attribute, position, place.unit, where, known, line, first, last)


def bound_before(node: ast.AST, line: int) -> set[str]:
    """The parameters of a function and the names that it, or a loop, binds above the line."""
    names: set[str] = set()
    if isinstance(node, ast.Module | ast.ClassDef):
        return names
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        names |= {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for found in ast.walk(node):
        if isinstance(found, ast.Name) and isinstance(found.ctx, ast.Store) and found.lineno < line:
            names.add(found.id)
    return names


def end_of_head(node: ast.stmt) -> int:
    """The last line of a statement, of a compound one without its body."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return max(node.lineno, int(body[0].lineno) - 1)
    return node.end_lineno or node.lineno


def even_sample(mutants: Sequence[Mutant], size: int) -> list[Mutant]:
    """``size`` of them, as evenly over files and kinds as they allow; always the same ones for the same code."""
    cells: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in sorted(mutants, key=lambda mutant: shuffled(mutant.name)):
        cells[f"{mutant.file} {mutant.kind}"].append(mutant)
    rounds = itertools.zip_longest(*(cells[cell] for cell in sorted(cells, key=shuffled)))
    drawn = [mutant for one_each in rounds for mutant in one_each if mutant is not None][:size]
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.line))


def shuffled(name: str) -> bytes:
    """A sort key that has no order to be seen in it, and is the same everywhere."""
    return hashlib.sha256(name.encode()).digest()
