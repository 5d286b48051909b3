from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tandem.observe.machine import MachineUse
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo


def test_each_line_tells_what_the_machine_has_left(tmp_path: Path) -> None:
    with RunLog(RunInfo(tmp_path)) as log:
        log.log(1, {"reward/mean": 1.0})
    (row,) = read_rows(tmp_path / METRICS_FILE)
    assert 10 < float(str(row["system/memory_mb"])) < psutil.virtual_memory().total / 1e6
    assert 0 <= float(str(row["system/cpu"])) <= 1 and float(str(row["system/disk_left_mb"])) > 0


def test_what_can_not_be_looked_at_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "system/memory_mb" in MachineUse(tmp_path / "gone").measure()
    assert "system/disk_left_mb" not in MachineUse(tmp_path / "gone").measure()
