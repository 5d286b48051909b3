"""Option ``--oracle FILE``, one test per case, and a summary per section."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.oracle.oracle_file import Case, read_cases
from tests.oracle.oracle_verdict import Kind, Verdict

HERE = Path(__file__).parent
SAMPLE = HERE / "sample.json"
SHARED = HERE.parents[2] / "shared" / "oracle" / "oracle.json"
RESULTS = pytest.StashKey[list[tuple[Case, Verdict]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file to judge by."""
    parser.addoption(
        "--oracle", default=None, metavar="FILE", help="oracle file (default: shared/oracle, else a sample)"
    )


def oracle_path(config: pytest.Config) -> Path:
    """The file asked for, else the shared one beside the repository, else the sample that ships with the tests."""
    asked = config.getoption("--oracle", default=None)
    if asked is not None:
        return Path(asked)
    return SHARED if SHARED.exists() else SAMPLE


def pytest_configure(config: pytest.Config) -> None:
    """Room for the results."""
    config.stash[RESULTS] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case of the file."""
    if "oracle_case" in metafunc.fixturenames:
        metafunc.parametrize("oracle_case", read_cases(oracle_path(metafunc.config)), ids=lambda case: case.id)


@pytest.fixture
def record_verdict(request: pytest.FixtureRequest) -> list[tuple[Case, Verdict]]:
    """Where a test leaves its verdict for the summary."""
    return request.config.stash.setdefault(RESULTS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Counts per section, then what differs and why, then which packages are missing."""
    results = config.stash.get(RESULTS, [])
    if not results:
        return
    write = terminalreporter.write_line
    path = oracle_path(config)
    terminalreporter.section(f"oracle: {path.name}, {len(results)} cases")
    if path == SAMPLE:
        write(f"only the {len(results)} sample cases were judged: there is no {SHARED}. Another file: --oracle FILE")
    sections: dict[str, Counter[Kind]] = defaultdict(Counter)
    for case, verdict in results:
        sections[case.section][verdict.kind] += 1
    write(f"{'section':<20}" + "".join(f"{kind:>20}" for kind in Kind))
    for section, kinds in [*sections.items(), ("all", sum(sections.values(), Counter()))]:
        write(f"{section:<20}" + "".join(f"{kinds[kind]:>20}" for kind in Kind))
    for kind in (Kind.DIFFERS, Kind.NOT_INSTALLED):
        by_reason: dict[str, list[str]] = defaultdict(list)
        for case, verdict in results:
            if verdict.kind is kind:
                by_reason[verdict.reason].append(case.id)
        for reason, ids in by_reason.items():
            write(f"{kind}: {reason}\n    {', '.join(ids)}")
