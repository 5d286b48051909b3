"""The kinds of small mistakes: for a node of a syntax tree, the nodes that a slip would leave in its place."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Set
from typing import TypeGuard

Slips = Iterator[ast.AST]
Kind = Callable[[ast.AST, Set[str]], Slips]
"""From a node and the names known where it stands to what could stand there by mistake."""

BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
NEGATED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
LOGIC: dict[type[ast.operator], type[ast.operator]] = {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
OPPOSITE = {
    "min": "max",
    "minimum": "maximum",
    "amin": "amax",
    "argmin": "argmax",
    "lowest": "largest",
    "bisect_left": "bisect_right",
}
OTHER_STATISTIC = {
    "masked_mean": "masked_sum",
    "sum": "mean",
    "any": "all",
    "mean": "total",
    "exp": "expm1",
    "log": "log1p",
}
DROPPED = frozenset(
    [
        "clamp",
        "clip",
        "detach",
        "abs",
        "double",
        "float",
        "bool",
        "square",
        "sqrt",
        "exp",
        "log",
        "sign",
        "to",
        "sort",
        "sorted",
        "reverse",
        "reversed",
        "list",
    ]
)
SIDES = (
    ("low", "high"),
    ("min", "max"),
    ("above", "below"),
    ("first", "second"),
    ("best", "second"),
    ("chosen", "rejected"),
    ("rise", "fall"),
    ("may_rise", "may_fall"),
    ("teacher", "student"),
    ("unclipped", "clipped"),
    ("tau_pos", "tau_neg"),
    ("give", "take"),
    ("free", "clipped"),
    ("cap", "floor"),
    ("tokens", "sequences"),
    ("a", "b"),
    ("now", "before"),
    ("desirable_weight", "undesirable_weight"),
    ("p", "p_old"),
    ("values", "returns"),
    ("sum", "count"),
    ("advantages", "returns"),
    ("gamma", "lam"),
    ("groups", "lengths"),
    ("mean", "second"),
    ("std", "mean"),
    ("rewards", "values"),
    ("bins", "sizes"),
    ("fewest", "most"),
    ("target", "horizon"),
    ("weights", "values"),
)
MASKS = frozenset(
    ["response_mask", "counted", "compared", "trained", "leaving", "candidate", "present", "mask", "preferred"]
)
COLUMNS = frozenset(["logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs"])
UNTOLD = frozenset(["device", "use_when", "description", "strict", "frozen"])
"""Arguments that change no number."""
SCOPES = ("TOKEN", "SEQUENCE", "GROUP", "PARTITION")


def boundary(node: ast.AST, known: Set[str]) -> Slips:
    """A bound that belongs to the other side."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in BOUNDARY:
        yield ast.Compare(node.left, [BOUNDARY[type(node.ops[0])](), *node.ops[1:]], node.comparators)


def negated(node: ast.AST, known: Set[str]) -> Slips:
    """A condition the wrong way round."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in NEGATED:
        yield ast.Compare(node.left, [NEGATED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif is_where(node):
        yield ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords)


def is_where(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether the node is ``torch.where(condition, one, other)``."""
    return isinstance(node, ast.Call) and called(node) == "where" and len(node.args) == 3


def arithmetic(node: ast.AST, known: Set[str]) -> Slips:
    """``+`` for ``-``, ``*`` for ``/``."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)


def sign(node: ast.AST, known: Set[str]) -> Slips:
    """Operands of a difference or a quotient in the other order, a minus left out."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div):
        yield ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not is_whole(node.operand):
        yield node.operand


def is_whole(node: ast.AST) -> bool:
    """Whether it is a whole number: behind a minus an axis, and -1 and 1 are the same one of two."""
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def logic(node: ast.AST, known: Set[str]) -> Slips:
    """And for or."""
    if isinstance(node, ast.BinOp) and type(node.op) in LOGIC:
        yield ast.BinOp(node.left, LOGIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def constant(node: ast.AST, known: Set[str]) -> Slips:
    """Another number, the other truth value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield other_constant(node.value)


def other_constant(value: float) -> ast.Constant:
    """The other truth value, one more than a whole number, twice another one."""
    if isinstance(value, bool):
        return ast.Constant(not value)
    return ast.Constant(value + 1 if isinstance(value, int) else 2 * value or 1.0)


def dropped(node: ast.AST, known: Set[str]) -> Slips:
    """A clamp, a mask, an absolute value, a condition that was forgotten."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED:
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id in {"torch", "np", "math", "heapq"}):
            yield node.func.value
        elif node.args:
            yield node.args[0]
    elif isinstance(node, ast.Call) and called(node) in {"select", "sorted", "reversed", "_bounded"}:
        yield node.args[0]
    elif is_where(node):
        yield from node.args[1:]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield from (node.left, node.right)
    elif isinstance(node, ast.BoolOp):
        yield from (rest_of(node, i) for i in range(len(node.values)))


def rest_of(node: ast.BoolOp, index: int) -> ast.expr:
    """An ``and`` or ``or`` without one of its parts."""
    rest = [value for i, value in enumerate(node.values) if i != index]
    return rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def epsilon(node: ast.AST, known: Set[str]) -> Slips:
    """The small number that keeps a quotient finite, left out."""
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Name) and node.right.id == "epsilon":
        yield node.left


def argument(node: ast.AST, known: Set[str]) -> Slips:
    """An argument left to its default."""
    if isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in UNTOLD and ast.unparse(keyword) != "scope=Scope.TOKEN":
                yield ast.Call(node.func, node.args, [*node.keywords[:i], *node.keywords[i + 1 :]])
        if len(node.args) > 1 and isinstance(node.args[-1], ast.Name) and node.args[-1].id.isupper():
            yield ast.Call(node.func, node.args[:-1], node.keywords)


def extreme(node: ast.AST, known: Set[str]) -> Slips:
    """The smallest for the largest."""
    if isinstance(node, ast.Call):
        yield from renamed(node, both_ways(OPPOSITE))
        for i, keyword in enumerate(node.keywords):
            if keyword.arg in ("min", "max"):
                other = ast.keyword("max" if keyword.arg == "min" else "min", keyword.value)
                yield ast.Call(node.func, node.args, [*node.keywords[:i], other, *node.keywords[i + 1 :]])


def statistic(node: ast.AST, known: Set[str]) -> Slips:
    """A sum for a mean, any for all."""
    if isinstance(node, ast.Call):
        yield from renamed(node, both_ways(OTHER_STATISTIC))


def precision(node: ast.AST, known: Set[str]) -> Slips:
    """float32 for float64."""
    if isinstance(node, ast.Call) and called(node) == "double":
        yield from renamed(node, {"double": "float"})
    elif isinstance(node, ast.Attribute) and node.attr == "float64":
        yield ast.Attribute(node.value, "float32", node.ctx)


def side(node: ast.AST, known: Set[str]) -> Slips:
    """The other one of two that belong together: low for high, chosen for rejected."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        others = {b for pair in SIDES for a, b in (pair, pair[::-1]) if a == node.id and b in known}
        yield from (ast.Name(other, node.ctx) for other in sorted(others))
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        for one, other in [("low", "high"), ("chosen", "rejected"), ("tokens", "sequences"), ("cap", "floor")]:
            if node.attr in (one, other):
                yield ast.Attribute(node.value, other if node.attr == one else one, node.ctx)


def mask(node: ast.AST, known: Set[str]) -> Slips:
    """Another mask, another column of log-probs."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        for family in (MASKS, COLUMNS):
            if node.id in family:
                yield from (ast.Name(other, node.ctx) for other in sorted((family & known) - {node.id}))
    elif isinstance(node, ast.Attribute) and node.attr in ("counted", "comparable"):
        yield ast.Attribute(node.value, "comparable" if node.attr == "counted" else "counted", node.ctx)


def scope(node: ast.AST, known: Set[str]) -> Slips:
    """A scope that is too narrow, or for the narrowest one too wide."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Scope":
        yield ast.Attribute(node.value, SCOPES[SCOPES.index(node.attr) - 1 if node.attr != "TOKEN" else 1], node.ctx)


def returned(node: ast.AST, known: Set[str]) -> Slips:
    """Two results in the other order, another variable for the one that was computed last."""
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
        yield ast.Return(ast.Tuple(node.value.elts[::-1], ast.Load()))
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
        others = sorted(known - {node.value.id, "cls", "self"})
        yield from (ast.Return(ast.Name(other, ast.Load())) for other in others)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
        yield from (ast.Return(arg) for arg in node.value.args[:1] if called(node.value) in {"select", "per_token"})


def removed(node: ast.AST, known: Set[str]) -> Slips:
    """A line left out: a check, a change in place, a second assignment."""
    again = isinstance(node, ast.Assign) and all(rebinds(target, known) for target in node.targets)
    if (
        again
        or isinstance(node, ast.AugAssign | ast.Break)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or (isinstance(node, ast.If) and not node.orelse)
    ):
        yield ast.Pass()


def rebinds(target: ast.expr, known: Set[str]) -> bool:
    """Whether the names of an assignment's target are known without it, so that its removal is no mere NameError."""
    if isinstance(target, ast.Tuple):
        return all(rebinds(element, known) for element in target.elts)
    return isinstance(target, ast.Subscript) or (isinstance(target, ast.Name) and target.id in known)


def called(node: ast.Call) -> str:
    """The name of what is called, without what it belongs to."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def renamed(node: ast.Call, names: dict[str, str]) -> Slips:
    """The call of the function that ``names`` gives for the called one, if any."""
    other = names.get(called(node))
    if other is not None and isinstance(node.func, ast.Attribute):
        yield ast.Call(ast.Attribute(node.func.value, other, ast.Load()), node.args, node.keywords)
    elif other is not None:
        yield ast.Call(ast.Name(other, ast.Load()), node.args, node.keywords)


def both_ways(names: dict[str, str]) -> dict[str, str]:
    """The mapping and its inverse."""
    return names | {value: key for key, value in names.items()}


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        boundary,
        negated,
        arithmetic,
        sign,
        logic,
        constant,
        dropped,
        epsilon,
        argument,
        extreme,
        statistic,
        precision,
        side,
        mask,
        scope,
        returned,
        removed,
    )
}
