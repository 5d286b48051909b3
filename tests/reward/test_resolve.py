"""From YAML to a scorer, and the plan's view of the same without running anything."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tandem.base import user_code
from tandem.base.errors import ConfigError
from tandem.reward.outcome import Sample
from tandem.reward.resolve import bind, problems, resolve
from tandem.reward.scoring import run_now
from tandem.reward.static import describe
from tests.reward.test_pool import alive


@pytest.fixture
def write(tmp_path):
    def write_file(source: str, name: str = "my_rewards.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write_file


MANAGER = """
    class KeywordRewardManager:
        def __init__(self, keyword="正确"):
            self.keyword = keyword

        def __call__(self, data):
            return [1.0 if self.keyword in item else 0.0 for item in data]
"""


def test_a_type_may_name_an_importable_path(write, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(MANAGER, "path_of_mine.py")
    write("1 / 0\n\ndef score(response):\n    return 1.0\n", "broken_path.py")
    spec = resolve("path_of_mine.KeywordRewardManager", None, {"keyword": "ok"})
    assert bind(spec) is not None and spec.module == "path_of_mine"
    assert problems("path_of_mine.KeywordRewardManager", None, {}) == []
    assert problems("path_of_mine.KeywordRewardManager", None, {"kw": 1})[0].key == "reward_manager.kw"
    assert "no module 'absent_path'" in problems("absent_path.Score", None, {})[0].reason
    assert "defines no Other" in problems("path_of_mine.Other", None, {})[0].reason
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        resolve("broken_path.score")


@pytest.mark.parametrize("type_", ["keyword_reward", "KeywordRewardManager", "KeywordReward"])
def test_a_class_is_found_by_the_names_that_a_type_may_mean(write, type_) -> None:
    file = write(MANAGER)
    assert resolve(type_, file, {"keyword": "x"}).call.is_batch
    signature = describe(type_, file)
    assert list(signature.parameters) == ["keyword"]
    assert signature.parameters["keyword"].default == "正确"


def test_a_function_is_found_and_bound(write) -> None:
    file = write("def bonus(response, ground_truth, *, scale=2.0): return scale * (response == ground_truth)")
    scorer = bind(resolve("bonus", file, {"scale": 3.0}))
    assert run_now(scorer.score(Sample("a", "a"))).reward == 3.0


def test_an_entry_registered_by_the_file_is_found(write) -> None:
    file = write(
        """
        from tandem.reward.registry import register_reward

        @register_reward("odd_length_of_this_test")
        def something_else(response, *, invert: bool = False):
            return (len(response) % 2 == 1) != invert
        """
    )
    assert list(describe("odd_length_of_this_test", file).parameters) == ["invert"]
    scorer = bind(resolve("odd_length_of_this_test", file, {"invert": True}))
    assert run_now(scorer.score(Sample("ab"))).reward == 1.0


def test_a_scorer_of_a_plugin_is_found_by_name(write, monkeypatch, tmp_path) -> None:
    write(MANAGER, "plugin_of_this_test.py")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("plugin_of_this_test")
    monkeypatch.setitem(sys.modules, "plugin_of_this_test", sys.modules["plugin_of_this_test"])
    spec = resolve("keyword_reward", None, {"keyword": "x"}, plugins=["plugin_of_this_test"])
    assert (spec.module, spec.attribute) == ("plugin_of_this_test", "KeywordRewardManager")
    assert list(describe("keyword_reward", None, ["plugin_of_this_test"]).parameters) == ["keyword"]
    with pytest.raises(ConfigError, match="plugin_of_this_test"):
        resolve("something", None, {}, plugins=["plugin_of_this_test"])


def test_a_file_may_import_its_neighbours(write) -> None:
    write("LIMIT = 4", "neighbour_of_this_test.py")
    file = write("from neighbour_of_this_test import LIMIT\ndef short(response): return len(response) < LIMIT")
    assert run_now(bind(resolve("short", file)).score(Sample("abc"))).reward == 1.0


@pytest.mark.parametrize(
    ("type_", "source", "message"),
    [
        ("gsm9k", None, r"reward_manager\.type = 'gsm9k': .*did you mean 'gsm8k'"),
        ("bonsu", "def bonus(response): return 1", r"defines no bonsu or Bonsu or BonsuManager: did you mean 'bonus'"),
        ("bonus", "def bonus(response):\n  return (", r"my_rewards\.py:2: SyntaxError: '\(' was never closed"),
        (
            "bonus",
            "\nimport no_such_module_here\n",
            r"line 2: ModuleNotFoundError: No module named 'no_such_module_here'",
        ),
        ("bonus", "def bonus(answer, *, x=1): return 1", r"no sample has 'answer'"),
        ("bonus", "", r"defines no bonus or Bonus or BonusManager: it defines nothing at all"),
        ("bonus", "# to do\n", r"it defines nothing at all"),
        ("bonus", "import os\nos._exit(0)", r"reward_manager\.file = .*importing it ends the process with status 0"),
        ("bonus", "import os\nos._exit(3)\ndef bonus(response): return 1", r"ends the process with status 3"),
        ("bonus", "import os, signal\nos.kill(os.getpid(), 11)", r"ends the process by SIGSEGV"),
        ("bonus", "raise SystemExit(0)\ndef bonus(response): return 1", r"line 1: SystemExit"),
        ("bonus", "def bonus(response):\n    yield 1.0", r"function bonus \(line 1\) is a generator"),
        ("bonus", "class Bonus:\n    def __call__(self, data): yield 1", r"its __call__ is a generator"),
        ("bonus", "class Bonus: pass", r"class Bonus .*has no __call__\(self, data\)"),
    ],
)
def test_what_cannot_be_resolved_says_why_and_what_to_write(write, type_, source, message) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(type_, None if source is None else write(source))


def test_a_file_that_hangs_at_import_is_told_and_leaves_no_process(write, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(user_code, "IMPORT_S", 1.5)
    note = tmp_path / "pid"
    file = write(
        f"""
        import os, time
        open({str(note)!r}, "w").write(str(os.getpid()))
        def bonus(response): return 1
        while True: time.sleep(1)
        """
    )
    with pytest.raises(ConfigError, match=r"importing it takes more than 1\.5 s.*constructor"):
        resolve("bonus", file)
    assert not note.exists() or not alive(int(note.read_text()))


def test_a_missing_file_is_named(tmp_path) -> None:
    missing = str(tmp_path / "absent.py")
    with pytest.raises(ConfigError, match=r"reward_manager\.file = .*absent\.py"):
        resolve("bonus", missing)
    assert "there is no file" in describe("bonus", missing)


@pytest.mark.parametrize(
    ("type_", "parameters", "expected"),
    [
        ("math", {}, []),
        ("gsm8k", {"metod": "strict"}, [("reward_manager.metod", "did you mean 'method'")]),
        ("keyword", {}, [("reward_manager.keyword", "needs this parameter")]),
        ("exact", {}, []),
        (
            "weighted_sum",
            {"parts": [{"type": "exact"}], "weights": [1]},
            [("reward_manager.weights", "has no such parameter")],
        ),
        ("weighted_sum", {"parts": []}, [("reward_manager.parts", "at least one part")]),
        ("weighted_sum", {"parts": [{"weight": 1}]}, [("reward_manager.parts[0]", "names its scorer")]),
        (
            "weighted_sum",
            {"parts": [{"type": "math", "weight": "1"}]},
            [("reward_manager.parts[0].weight", "a number")],
        ),
        ("weighted_sum", {"parts": [{"type": "math"}] * 2}, [("reward_manager.parts[1].name", "same metric")]),
        (
            "weighted_sum",
            {"parts": [{"type": "maths"}, {"type": "keyword", "keywrd": "x"}]},
            [
                ("reward_manager.parts[0].type", "did you mean 'math'"),
                ("reward_manager.parts[1].keywrd", "did you mean 'keyword'"),
                ("reward_manager.parts[1].keyword", "needs this parameter"),
            ],
        ),
    ],
)
def test_the_plan_finds_every_wrong_parameter(type_, parameters, expected) -> None:
    found = problems(type_, None, parameters)
    assert [(p.key, text in str(p)) for p, (_, text) in zip(found, expected, strict=True)] == [
        (key, True) for key, _ in expected
    ]
    if expected:
        with pytest.raises(ConfigError):
            resolve(type_, None, parameters)


@pytest.mark.parametrize(
    "source",
    [
        "async def score(response, extra_info={}, *, a, b: float = 0.5, **rest): return 1",
        "class Score:\n def __init__(self, a, b=-2, *, c: int = 3): pass\n def __call__(self, data): pass",
        "class Base:\n def __init__(self, a=None): pass\nclass Score(Base):\n def __call__(self, data): pass",
        "import dataclasses\n@dataclasses.dataclass\nclass Score:\n a: int\n b: str = ''\n def __call__(self, x): pass",
        "class Score:\n def __call__(self, data): pass",
        "try:\n import no_such\nexcept ImportError:\n no_such = None\nif True:\n def score(response): return 1",
    ],
)
def test_the_source_says_what_the_object_says(write, source) -> None:
    from tandem.base.registry import read_signature
    from tandem.base.user_code import import_file

    file = write(source)
    static = describe("score", file)
    module = import_file(file)
    live = read_signature(getattr(module, "score", None) or module.Score)
    assert (static.columns, static.optional_columns) == (live.columns, live.optional_columns)
    assert static.accepts_any == live.accepts_any
    assert {n: (p.required, p.default) for n, p in static.parameters.items()} == {
        n: (p.required, p.default) for n, p in live.parameters.items()
    }


def test_describing_runs_nothing(write) -> None:
    file = write("raise SystemExit('must not run')\ndef score(response): return 1")
    assert describe("score", file).columns == ("response",)


def test_a_name_bound_in_another_way_accepts_anything(write) -> None:
    assert describe("score", write("from elsewhere import score")).accepts_any
    assert describe("score", write("import functools\nscore = functools.partial(max, 1)")).accepts_any


def test_a_missing_package_is_found_by_the_plan_and_before_the_first_sample(write) -> None:
    file = write(
        """
        from tandem.reward.registry import register_reward

        @register_reward("needs_much_in_this_test", packages=("no_such_package_here",))
        def needs_much_in_this_test(response): return 1
        """
    )
    spec = resolve("needs_much_in_this_test", file)
    with pytest.raises(ModuleNotFoundError):
        bind(spec)
    (problem,) = problems("needs_much_in_this_test", None, {})
    assert "pip install no-such-package-here" in problem.remedy
