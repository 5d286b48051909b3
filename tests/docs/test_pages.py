"""Every block of code in README and docs/ does what the page says."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from itertools import dropwhile, zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from tandem.cli.app import app
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.plan.plan import Plan, compile_plan
from tandem.plan.sft import compile_sft_plan
from tandem.roles.reward import RewardManager
from tests.docs.snippets import Snippet, commands, read_snippets

ROOT = Path(__file__).parents[2]
SHOWN = ("agents/calculator", "agents/guess", "distillation", "own_loop")
EXAMPLES = [ROOT / f"examples/{name}/README.md" for name in SHOWN]
PAGES = [ROOT / "README.md", *EXAMPLES, *sorted((ROOT / "docs").glob("*.md"))]
PLANNED = ("train", "sft")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.long] if page.name == "extend.md" else [])
        for page in PAGES
    ],
)
def test_every_block_of_the_page_works(page: Path, reader: Path) -> None:
    snippets = read_snippets(page, page.name)
    for snippet, following in zip_longest(snippets, snippets[1:]):
        if snippet.file is not None:
            path = reader / snippet.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(snippet.text, "utf-8")
        if snippet.language in TRIALS:
            TRIALS[snippet.language](snippet, following)


def try_yaml(snippet: Snippet, following: Snippet | None) -> None:
    tree: dict[str, Any] = yaml.safe_load(snippet.text)
    if "part" in snippet.words:
        tree = laid_over(yaml.safe_load(Path("run.yaml").read_text("utf-8")), tree)
    Path("snippet.yaml").write_text(yaml.safe_dump(tree, allow_unicode=True), "utf-8")
    config = load_words(["snippet.yaml"])
    plan = compile_plan(config) if isinstance(config, Config) else compile_sft_plan(config)
    assert not plan.problems, (snippet.where, list(map(str, plan.problems)))
    later = plan.later if isinstance(plan, Plan) else ()
    assert bool(later) == ("later" in snippet.words), (snippet.where, list(map(str, later)))
    if "run" in snippet.words:
        result = tandem(["train" if isinstance(plan, Plan) else "sft", "snippet.yaml"], run=True)
        assert result.exit_code == 0, (snippet.where, result.output, result.exception)


def laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``above`` written into ``below``; what names a type or a source replaces the whole mapping."""
    merged = dict(below)
    for key, value in above.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict) and "type" not in value
        merged[key] = laid_over(merged[key], value) if nested else value
    if "reasoning_gym" in above or "source" in above:
        del merged["train_files"]
    return merged


def try_python(snippet: Snippet, following: Snippet | None) -> None:
    code = compile(snippet.text, snippet.where, "exec")
    if snippet.file is None:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(code, names)
        for made in names.values():
            if isinstance(made, RewardManager):
                made.close()  # a script's own end does that


def try_bash(snippet: Snippet, following: Snippet | None) -> None:
    for command in commands(snippet.text):
        words = submitted(shlex.split(command))
        if words[0] == "tandem":
            result = tandem(words[1:], run="run" in snippet.words)
            refused = "refused" in snippet.words
            wanted = 2 if refused else 0
            assert result.exit_code == wanted, (snippet.where, command, result.output, result.exception)
            if refused:
                assert following is not None and following.language == "text", f"{snippet.where}: what does it answer?"
                said = " ".join(result.output.split())
                lines = [" ".join(line.split()) for line in following.text.splitlines()]
                assert all(line in said for line in lines), (snippet.where, following.text, result.output)
        else:
            assert exists(words), f"{snippet.where}: {command!r} can't be checked"


def submitted(words: list[str]) -> list[str]:
    """The ``tandem`` command that is run with variables set before it, or as a Ray job."""
    if words[:3] == ["ray", "job", "submit"]:
        assert words[words.index("--") + 1 :][:3] == ["python", "-m", "tandem"]
        return words[words.index("tandem") :]
    return list(dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), words))


def tandem(words: list[str], *, run: bool) -> Result:
    """The command; those that train are planned instead, unless ``run``."""
    if words[0] in PLANNED and not run:
        words = ["plan", *words[1:]]
    if words[0] in ("models", "eval", "view", "serve", "chat") and not run:
        words = [*words[:1], "--help"]
    return CliRunner().invoke(app, words)


def exists(words: list[str]) -> bool:
    """Whether a command of another program names what there is."""
    match words:
        case ["make", *targets]:
            return all(target in TARGETS for target in targets if "=" not in target)
        case ["python", "-m", "pip", "install", *what] | ["pip", "install", *what]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            named = [name for word in what for name in re.findall(r"\[([\w,]+)\]$", word)]
            return all(extra in extras for name in named for extra in name.split(","))
        case ["python", "-m", "pytest", *_]:
            return True
        case [program, script, *_] if program in ("python", ".venv/bin/python"):
            return Path(script).is_file()
        case ["ray", "start", *options]:
            return all(option.split("=")[0] in ("--head", "--port", "--address") for option in options)
        case ["source", ".venv/bin/activate"] | ["tensorboard", "--logdir", _] | ["git", "clone", *_]:
            return True
    return False


TRIALS: dict[str, Callable[[Snippet, Snippet | None], None]] = {
    "yaml": try_yaml,
    "python": try_python,
    "bash": try_bash,
}


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"
