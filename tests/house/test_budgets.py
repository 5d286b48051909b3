from __future__ import annotations

from pathlib import Path

import pytest

from tools.budgets import check_file, check_folders, violations

ROOT = Path(__file__).resolve().parents[2]


def function(lines: int, indent: str = "") -> str:
    return f"{indent}def f():\n" + f"{indent}    x = 1\n" * (lines - 1)


def protocol(base: str, members: int) -> str:
    return f"class P({base}):\n" + "".join(f"    def m{i}(self) -> None: ...\n" for i in range(members))


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("tandem/a.py", "x = 1\n" * 401, "401 lines, at most 400"),
        ("tandem/control/colocate.py", "x = 1\n" * 121, "121 lines, at most 120"),
        ("tandem/a.py", function(61), "function f has 61 lines"),
        ("tandem/a.py", "class C:\n" + function(61, "    "), "function f has 61 lines"),
        ("tandem/a.py", "async " + function(61), "function f has 61 lines"),
        ("tandem/a.py", protocol("Protocol", 10), "protocol P has 10 members"),
        ("tandem/a.py", protocol("typing.Protocol[T]", 10), "protocol P has 10 members"),
        ("tandem/a.py", protocol("Protocol", 9) + "    size: int\n", "protocol P has 10 members"),
        ("tests/helpers.py", "", "'helpers' says nothing"),
        ("tandem/utils/a.py", "", "'utils' says nothing"),
    ],
)
def test_a_broken_budget_is_named(path: str, source: str, problem: str) -> None:
    found = list(check_file(Path(path), source))
    assert len(found) == 1
    assert found[0].startswith(path) and problem in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tandem/a.py", "x = 1\n" * 400),
        ("tandem/a.py", function(60)),
        ("tandem/a.py", "@decorator\n" + function(60)),
        ("tandem/control/colocate.py", "x = 1\n" * 120),
        ("tandem/a.py", protocol("Protocol", 9)),
        ("tandem/a.py", protocol("Base", 30)),
        ("tandem/a.py", protocol("Protocol", 9) + "    @overload\n    def m1(self) -> None: ...\n"),
    ],
)
def test_what_keeps_its_budget_passes(path: str, source: str) -> None:
    assert list(check_file(Path(path), source)) == []


def test_a_folder_of_too_many_files_is_named() -> None:
    files = [Path(f"tandem/plan/part_{i}.py") for i in range(26)]
    assert list(check_folders([*files[1:], Path("tandem/plan/__init__.py"), Path("tandem/plan/parts/a.py")])) == []
    assert list(check_folders(files)) == ["tandem/plan: 26 files, at most 25; part them by meaning"]


def test_files_are_found_in_every_folder(tmp_path: Path) -> None:
    for name in ("tandem/control/deep", "tests", "examples", "bench", "tools"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "misc.py").touch()
    assert len(violations(tmp_path)) == 5


def test_this_repository_keeps_its_budgets() -> None:
    assert violations(ROOT) == []
