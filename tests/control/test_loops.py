"""Each mode's file shows its step: every stage by name, in code, and in the same order."""

from __future__ import annotations

import ast
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto
from tandem.control.entry import LOOPS
from tandem.session.stage_table import StageTable
from tandem.stages.stage import BatchStage, Phase
from tandem.stages.table import BUILT_IN, advantages, correction, ref, reference_point, teacher, train_critic

CONTROL = Path(__file__).parents[2] / "tandem" / "control"
MODES = ("colocate", "hybrid", "fully_async")
SHOWN = {"generate", "score", "ref", "teacher", "old_logprobs", "values", "correction", "advantages", "train", "push"}


def tree(mode: str) -> ast.Module:
    return ast.parse((CONTROL / f"{mode}.py").read_text("utf-8"))


def stages(mode: str) -> set[str]:
    """Those that the file of a mode names, as ``step.ref`` and the like."""
    named = [node for node in ast.walk(tree(mode)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in named if isinstance(node.value, ast.Name) and node.value.id == "step"}


def calls(function: ast.AST) -> list[str]:
    """What is called, in the order of the text, as ``weights.push`` and the like."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [ast.unparse(node.func) for node in sorted(found, key=lambda node: (node.lineno, node.col_offset))]


@pytest.mark.parametrize("mode", MODES)
def test_the_step_is_seen_in_the_file_of_the_mode(mode: str) -> None:
    """The names are used, not only imported or written about."""
    assert stages(mode) == {*SHOWN, "train_critic"}


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_pushed_after_the_end_of_the_step_in_every_loop(mode: str) -> None:
    loops = [node for node in tree(mode).body if isinstance(node, ast.FunctionDef) and node.name.startswith("train")]
    for loop in loops:
        made = [name for name in calls(loop) if name in ("weights.push", "run.end_step", "run.evaluate_at_start")]
        assert made == ["weights.push", "run.evaluate_at_start", "run.end_step", "weights.push"], loop.name


def test_every_loop_says_what_it_consumes_gives_and_waits_for() -> None:
    for loop in LOOPS.values():
        said = (loop.__doc__ or "").lower()
        assert "waits for" in said and "consumes" in said and "produces" in said, loop.__name__


def test_every_stage_is_in_a_loop() -> None:
    named = {name for mode in (*MODES, "preferences") for name in stages(mode)}
    assert named >= SHOWN | {"train_critic", "reference_point"}
    assert len(BUILT_IN) == len(SHOWN | {"train_critic", "reference_point"})


# --- the table that a loop is handed


class Noted:
    """Batch stages that note their order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.around: list[str] = []

    def stage(self, name: str, phase: Phase, changes_weights: bool = False) -> BatchStage:
        def run(batch: DataProto) -> DataProto:
            self.done.append(name)
            return batch

        return BatchStage(name, (), (), run, phase, changes_weights=changes_weights)

    def table(self) -> StageTable:
        stages = [
            self.stage("ref", "sub_batch"),
            self.stage("lab_words", "sub_batch"),
            self.stage("lab_weights", "partition"),
            self.stage("advantages", "partition"),
            self.stage("train_critic", "partition", changes_weights=True),
        ]
        return StageTable(stages, self.executing)

    def executing(self, name: str) -> AbstractContextManager[None]:
        self.around.append(name)
        return nullcontext()


def batch() -> DataProto:
    return DataProto({"rewards": torch.zeros(1)})


def test_absent_stages_are_skipped_and_those_of_plug_ins_join() -> None:
    noted = Noted()
    table = noted.table()
    table.forward(batch(), teacher, ref)
    table.complete(batch(), correction, advantages)
    table.update(batch(), train_critic)
    assert noted.done == ["ref", "lab_words", "lab_weights", "advantages", "train_critic"]
    assert noted.around == noted.done


def test_a_planned_stage_that_a_loop_would_leave_out_is_refused() -> None:
    noted = Noted()
    with pytest.raises(ContractError, match="the loop does not do the planned stage 'advantages'"):
        noted.table().complete(batch(), correction, reference_point)
    assert noted.done == []
