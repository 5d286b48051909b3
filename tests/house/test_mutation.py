"""The tool that mutates ``tandem/algorithms``: which slips it knows, which it draws, what it says of them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.mutate import mutated_files
from tools.mutation.equivalent import equivalents, stale
from tools.mutation.mutants import ROOT, Mutant, even_sample, mutants_of

SOURCE = '''
def clipped(low, high, value: float, *, cap=2.0):
    """A docstring is no number: 3."""
    if value < low:
        raise ValueError(f"{low - 1} is refused")
    value = min(value, high) - low
    return torch.where(value > cap, value.clamp(max=cap), -value)
'''


def mutants_from(tmp_path: Path, source: str = SOURCE) -> list[Mutant]:
    path = tmp_path / "some.py"
    path.write_text(source)
    return mutants_of(path)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("boundary", "value < low -> value <= low"),
        ("negated", "torch.where(value > cap, value.clamp(max=cap), -value) -> torch.where(value > cap, -value,"),
        ("arithmetic", "min(value, high) - low -> min(value, high) + low"),
        ("sign", "min(value, high) - low -> low - min(value, high)"),
        ("sign", "-value -> value"),
        ("constant", "2.0 -> 4.0"),
        ("dropped", "value.clamp(max=cap) -> value"),
        ("extreme", "min(value, high) -> max(value, high)"),
        ("extreme", "value.clamp(max=cap) -> value.clamp(min=cap)"),
        ("side", "low -> high"),
        ("removed", "value = min(value, high) - low -> pass"),
        ("removed", "if value < low: raise"),
    ],
)
def test_slips_of_each_kind_are_made(tmp_path: Path, kind: str, change: str) -> None:
    assert any(mutant.kind == kind and mutant.change.startswith(change) for mutant in mutants_from(tmp_path))


def test_a_mutant_is_the_file_with_one_change_and_says_where(tmp_path: Path) -> None:
    import ast

    found = mutants_from(tmp_path)
    (boundary,) = (mutant for mutant in found if mutant.kind == "boundary" and mutant.line == 4)
    assert ast.unparse(boundary.tree(tmp_path)) == ast.unparse(ast.parse(SOURCE.replace("value < low", "value <= low")))
    assert (boundary.where, boundary.first, boundary.last) == ("clipped", 4, 4)
    (default,) = (mutant for mutant in found if mutant.change == "2.0 -> 4.0")
    assert default.first < default.last  # any test that runs the function may notice its default
    codes = Counter(ast.unparse(mutant.tree(tmp_path)) for mutant in found)
    assert ast.unparse(ast.parse(SOURCE)) not in codes
    assert set(codes.values()) == {1}


def test_messages_docstrings_and_annotations_are_left_alone(tmp_path: Path) -> None:
    assert not any(mutant.line in (3, 5) for mutant in mutants_from(tmp_path))


def test_a_sample_is_even_over_files_and_kinds_and_always_the_same() -> None:
    def named(file: str, kind: str, number: int) -> Mutant:
        return Mutant(file, "f", kind, f"{kind} {number}", number, 1, 1, number, 0)

    many = [named(file, kind, i) for file in ("a.py", "b.py") for kind in ("sign", "side") for i in range(20)]
    many += [named("c.py", "sign", 0)]
    drawn = even_sample(many, 9)
    assert Counter((mutant.file, mutant.kind) for mutant in drawn) == {
        ("a.py", "sign"): 2, ("a.py", "side"): 2, ("b.py", "sign"): 2, ("b.py", "side"): 2, ("c.py", "sign"): 1,
    }  # fmt: skip
    assert drawn == even_sample(many[::-1], 9)
    assert len(even_sample(many, 1000)) == 81


def test_every_mutant_known_as_equivalent_is_one_of_today_and_has_a_reason() -> None:
    entries = equivalents()
    files = mutated_files({entry.name.split()[0] for entry in entries})
    assert stale(entries, [mutant for path in files for mutant in mutants_of(path)]) == []
    assert all(len(entry.reason.split()) > 3 for entry in entries)
    assert max(Counter(entry.name for entry in entries).values()) == 1


def test_a_mutant_dies_by_a_test_that_runs_its_line_and_else_survives(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.mutate", "--tests", "tests/algorithms/test_groups.py", "--processes", "1"]
    command += ["--files", "groups.py", "metric.py", "--log", str(tmp_path / "log")]
    command += ["--names", "self.size >= 2 -> self.size > 2", "self.count + other.count -> self.count - other.count"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "survived: metric.py" in done.stdout and "50.0% of 2" in done.stdout
    killed, survived = (tmp_path / "log").read_text().splitlines()
    assert "groups.py" in killed and "tests/algorithms/test_groups.py::test_" in killed
    assert "metric.py" in survived and "false" in survived
