"""What a scorer's source says about it, read without running it: for plans, which import nothing of the user's."""

from __future__ import annotations

import ast
import copy
import importlib.machinery
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.base.registry import Parameter, Signature, near
from tandem.base.regular import regular
from tandem.base.source import changing_decorator, yields
from tandem.reward.registry import REWARDS, unknown_field

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_UNKNOWN = Signature((), (), {}, accepts_any=True)


def candidate_names(type_: str) -> tuple[str, ...]:
    """Return the names under which ``type`` may be defined: ``keyword_reward``, ``KeywordReward``,
    ``KeywordRewardManager``.
    """
    camel = "".join(word[:1].upper() + word[1:] for word in type_.split("_"))
    return tuple(dict.fromkeys((type_, camel, camel + "Manager")))


def describe(type_: str, file: str | None = None, plugins: Sequence[str] = ()) -> Signature | str:
    """Return the signature of the scorer ``type``, or in words why there is none.

    Looks where ``resolve`` looks: in ``file`` if given, else in the registry, else in the modules named by
    ``plugins``. Source is parsed, never run. A name that the source binds in another way than by ``def`` or ``class``
    gives a signature that accepts any parameter, and so does an unknown name where there are plugins: only importing
    them shows what they register.
    """
    if file is not None:
        return _describe_file(type_, Path(file))
    if type_ in REWARDS:
        return REWARDS[type_].signature
    if "." in type_:  # package.module.name
        module, _, name = type_.rpartition(".")
        path = _source_of(module)
        return f"there is no module {module!r}" if path is None else _describe_file(name, path)
    for plugin in plugins:
        path = _source_of(plugin)
        if path is not None and not isinstance(found := _describe_file(type_, path), str):
            return found
    if plugins:
        return _UNKNOWN
    return (
        f"there is no reward {type_!r}: {near(type_, REWARDS)} (one of your own is found by file: FILE beside type, "
        "or by its module under plugins)"
    )


def _describe_file(type_: str, path: Path) -> Signature | str:
    try:
        tree = ast.parse(regular(path).read_bytes(), filename=str(path))
    except FileNotFoundError:
        return f"there is no file {str(path)!r}"
    except OSError as error:
        return f"{str(path)!r} can't be read: {error.strerror}"
    except SyntaxError as error:
        return f"{path}:{error.lineno}: {type(error).__name__}: {error.msg}"
    except ValueError as error:  # null bytes
        return f"{path}: {error}"
    bound = dict(_bindings(tree.body))
    for name in candidate_names(type_):
        if name in bound:
            return _signature(bound[name], bound)
    for node in bound.values():
        if isinstance(node, _Definition) and type_ in _registered_names(node):
            return _signature(node, bound)
    public = [name for name in bound if not name.startswith("_")]
    names = " or ".join(candidate_names(type_))
    hint = near(type_, public) if public else "it defines nothing at all"
    return f"{path} defines no {names}: {hint}"


def describe_episode(name: str, file: Path) -> Signature | str:
    """Return the parameters of the async function ``name`` that ``file`` defines, or in words why it is no episode."""
    try:
        bound = dict(_bindings(ast.parse(regular(file).read_bytes()).body))
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except (SyntaxError, ValueError) as error:
        return f"not Python: {error}"
    node = bound.get(name)
    if node is None:
        public = [known for known in bound if not known.startswith("_")]
        return f"{file} defines no {name}: {near(name, public) if public else 'it defines nothing at all'}"
    if not isinstance(node, ast.AsyncFunctionDef):
        return f"{name} of {file} is no async function: an episode is `async def {name}(task, policy)`"
    if yields(node):
        return f"{name} of {file} is a generator (it has a yield): an episode returns its reward, or None"
    if (decorator := changing_decorator(node)) is not None:
        return f"{name} of {file} is decorated with {decorator}: an episode is called anew for each sample"
    taken = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if len(taken) != 2:
        return f"{name} of {file} takes ({', '.join(taken)}): an episode takes (task, policy), parameters behind a *"
    return Signature(tuple(taken), (), _keyword_only(node.args, bound), node.args.kwarg is not None)


def describe_class(name: str, file: Path, *, root: str) -> Signature | str:
    """Return the parameters of the class ``name`` that ``file`` defines, or in words why there are none to be known.

    ``root``: a base class from elsewhere whose constructor takes nothing.
    """
    try:
        bound = dict(_bindings(ast.parse(regular(file).read_bytes()).body))
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except (SyntaxError, ValueError) as error:
        return f"not Python: {error}"
    node = bound.get(name)
    if not isinstance(node, ast.ClassDef):
        classes = [name for name, found in bound.items() if isinstance(found, ast.ClassDef)]
        return near(name, classes) if classes else "it defines no class"
    plain = [ast.unparse(base).rpartition(".")[2] for base in node.bases] == [root] and "__init__" not in _methods(node)
    return Signature((), (), {}, accepts_any=False) if plain else _constructor(node, bound)


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield top-level names of a module and the statements that bind them, those inside ``if``, ``try``, ``with``
    too.
    """
    for node in body:
        if isinstance(node, _Definition):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
            yield from ((name.id, node) for name in names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, part, []):
                    yield from _bindings(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _registered_names(node: _Definition) -> list[object]:
    """Return the names given to ``@register_reward("...")``."""
    calls = [d for d in node.decorator_list if isinstance(d, ast.Call) and d.args]
    return [
        call.args[0].value
        for call in calls
        if ast.unparse(call.func).rpartition(".")[2] == "register_reward" and isinstance(call.args[0], ast.Constant)
    ]


def _signature(node: ast.stmt, bound: dict[str, ast.stmt]) -> Signature | str:
    if isinstance(node, ast.ClassDef):
        call = _methods(node).get("__call__")
        if not node.bases and call is None:
            return f"class {node.name} (line {node.lineno}) has no __call__(self, data): a scorer is called"
        if call is not None and yields(call):
            return f"class {node.name} (line {call.lineno}): its __call__ is a generator: a scorer returns its score"
        return _constructor(node, bound)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _UNKNOWN
    if yields(node):
        return f"function {node.name} (line {node.lineno}) is a generator (it has a yield): a scorer returns its score"
    arguments = node.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    for name in positional:
        if (reason := unknown_field(name)) is not None:
            return f"function {node.name} (line {node.lineno}): {reason}"
    required = len(positional) - len(arguments.defaults)
    return Signature(
        tuple(positional[:required]),
        tuple(positional[required:]),
        _keyword_only(arguments, bound),
        arguments.kwarg is not None,
    )


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def _constructor(node: ast.ClassDef, bound: dict[str, ast.stmt]) -> Signature:
    """Return the parameters of ``__init__``, of a dataclass's fields, or of the first base where that is in the same
    file.
    """
    init = _methods(node).get("__init__")
    if init is not None:
        positional = [*init.args.posonlyargs, *init.args.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(init.args.defaults)) + [*init.args.defaults]
        parameters = {a.arg: _parameter(a, d, bound) for a, d in list(zip(positional, defaults, strict=True))[1:]}
        return Signature((), (), parameters | _keyword_only(init.args, bound), init.args.kwarg is not None)
    if node.bases:
        base = bound.get(ast.unparse(node.bases[0]))
        return _constructor(base, bound) if isinstance(base, ast.ClassDef) and base is not node else _UNKNOWN
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        named = ((ast.unparse(n.target), n) for n in fields)
        parameters = {k: _parameter(ast.arg(k, n.annotation), n.value, bound) for k, n in named}
        return Signature((), (), parameters, accepts_any=False)
    return Signature((), (), {}, accepts_any=False)


def _keyword_only(arguments: ast.arguments, bound: dict[str, ast.stmt]) -> dict[str, Parameter]:
    return {a.arg: _parameter(a, d, bound) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}


def _parameter(argument: ast.arg, default: ast.expr | None, bound: dict[str, ast.stmt]) -> Parameter:
    annotation = None if argument.annotation is None else _spelled_out(argument.annotation, bound)
    return Parameter(argument.arg, _literal(default), annotation, required=default is None)


def _spelled_out(annotation: ast.expr, bound: dict[str, ast.stmt]) -> str:
    """Return the source of an annotation, what the file's own aliases stand for in their place."""
    aliases = {
        name: node.value
        for name, node in bound.items()
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Subscript | ast.BinOp)
    }

    class Aliases(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return aliases.get(node.id, node)

    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):  # quoted
        annotation = ast.Name(annotation.value)
    return ast.unparse(Aliases().visit(copy.deepcopy(annotation)))


def _literal(node: ast.expr | None) -> object:
    """Return the value of a literal, else its source text."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _source_of(module: str) -> Path | None:
    """Return the source file of a module, found without importing it or its packages."""
    search: Sequence[str] | None = None
    name = ""
    spec = None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = importlib.machinery.PathFinder.find_spec(name, search)
        if spec is None:
            return None
        search = spec.submodule_search_locations or ()
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None
