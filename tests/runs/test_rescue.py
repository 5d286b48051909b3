"""Where the trained model can't be written the run ends, and whatever was trained beside it is kept too."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import WriteError
from tandem.config.trainer import TrainerConfig
from tandem.observe.run_log import RunLog
from tandem.observe.trackers import RunInfo
from tandem.session.keep.rescue import Rescue
from tandem.session.progress import Progress, StepPart
from tandem.session.run import Run


class Disk:
    """Writes folders with ``name`` in them; below ``full`` there is no room."""

    def __init__(self, full: Path, name: str) -> None:
        self.full, self.name = full, name

    def write(self, folder: Path) -> None:
        if folder.is_relative_to(self.full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        folder.mkdir(parents=True)
        (folder / self.name).write_text(self.name)

    def write_parts(self, root: Path) -> dict[str, Path]:
        return {}


class Critic(StepPart):
    """A part with weights of its own."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def rescue(self, folder: Path) -> Rescue:
        return Rescue(self.disk.write, folder, 2, "critic")


@pytest.mark.parametrize("at", ["the end", "a checkpoint"])
def test_a_critic_is_kept_where_the_actor_can_not_be_written(tmp_path: Path, at: str) -> None:
    out = tmp_path / "run"

    def full_at_the_checkpoint(
        root: Path, step: int, *, facts: Mapping[str, Any], keep: int, parts: Mapping[str, Path]
    ) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = Run(
        TrainerConfig(output_dir=str(out), logger=[]),
        RunLog(RunInfo(out)),
        Progress(2, 2),
        out,
        Disk(out, "actor"),
        checkpoint=full_at_the_checkpoint,
        parts=[Critic(Disk(out, "critic"))],
    )
    with pytest.raises(WriteError) as raised, run.running():
        if at == "a checkpoint":
            run.save(2)
    for name, kept in (("model", tmp_path / "run-step-2"), ("critic", tmp_path / "run-critic-step-2")):
        assert f"The {name} of step 2 was written to {kept} instead" in str(raised.value)
        assert (kept / name.replace("model", "actor")).is_file()
