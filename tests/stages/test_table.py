"""The order of a step follows from columns, and what a plug-in may register."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tandem
from tandem.base.errors import TandemError
from tandem.config.load import config_from_tree
from tandem.config.schema import Config
from tandem.plan.parts.entries import look_up
from tandem.plan.parts.stages import step_facts
from tandem.stages.facts import Step
from tandem.stages.registry import STAGES, register_stage
from tandem.stages.stage import Phase, Stage
from tandem.stages.table import BUILT_IN, plan_step

MODES = ("colocate", "hybrid", "fully_async")


@dataclass
class Made(Stage):
    """A stage of a plug-in, as data."""

    name: str  # type: ignore[misc]
    needed: tuple[str, ...]
    given: tuple[str, ...]
    phase: Phase = "sub_batch"  # type: ignore[misc]

    def needs(self, step: Step) -> tuple[str, ...]:
        return self.needed

    def gives(self, step: Step) -> tuple[str, ...]:
        return self.given


def facts(mode: str = "hybrid", algorithm: dict[str, object] | None = None) -> Step:
    tree = {
        "execution": {"mode": mode},
        "actor_rollout_ref": {"model": {"path": "m"}},
        "algorithm": algorithm or {"kl": {"in": "reward"}, "use_tis": True},
    }
    config = config_from_tree(tree, Config)
    return step_facts(config, look_up(config))


@given(
    st.permutations([("a", ()), ("b", ("a",)), ("c", ("a", "b")), ("d", ("c", "old_logprobs")), ("e", ())]),
    st.sampled_from(MODES),
)
def test_stages_come_after_those_that_give_what_they_need(
    further: list[tuple[str, tuple[str, ...]]], mode: str
) -> None:
    """However the config lists them; and the built-in ones stay as they are."""
    stages = [Made(f"makes_{name}", ("responses", *needs), (name,)) for name, needs in further]
    planned = plan_step(facts(mode), stages)
    there = {"prompts"}
    for stage in planned:
        asked = {name for name in stage.needs if any(name in other.gives for other in planned)}
        assert asked <= there, stage
        there |= set(stage.gives)
    built_in = [stage.name for stage in planned if not stage.name.startswith("makes_")]
    assert built_in == [stage.name for stage in plan_step(facts(mode))]
    assert planned == plan_step(facts(mode), stages)


def test_a_further_stage_comes_before_who_reads_it_and_before_the_weights_change() -> None:
    """Also one that is for the whole partition, and only the train call reads."""
    stages = [Made("late", ("advantages",), ("loss_weights",), "partition"), Made("early", ("responses",), ("tone",))]
    names = [stage.name for stage in plan_step(facts(), stages)]
    assert names == [
        "rollout", "reward", "ref", "old", "early", "correction", "advantages", "late", "train", "publish"
    ]  # fmt: skip


def test_a_circle_ends_too_and_is_left_to_the_plan() -> None:
    planned = plan_step(facts(), [Made("one", ("y",), ("x",)), Made("other", ("x",), ("y",))])
    assert {stage.name for stage in planned} >= {"one", "other", "train"}


@pytest.mark.parametrize("mode", MODES)
def test_each_built_in_stage_is_run_by_a_role_that_the_mode_has(mode: str) -> None:
    apart = mode == "fully_async"
    roles = {stage.name: stage.role for stage in plan_step(facts(mode))}
    assert roles == {
        "rollout": "rollout",
        "reward": "reward",
        "ref": "reference" if apart else "actor",
        "old": "actor_fwd" if apart else "actor",
        "correction": "advantages" if apart else "actor",
        "advantages": "advantages" if apart else "actor",
        "train": "actor",
        "publish": "actor",
    }


def test_in_fully_async_the_actors_loop_only_trains() -> None:
    class Own(Made):
        def role(self, step: Step) -> str:
            return "actor"

    stages = {one.name: one.role for one in plan_step(facts("fully_async"), [Own("tone", ("responses",), ("x",))])}
    assert stages["tone"] == "tone"


def test_every_time_of_the_table_has_one_part_of_the_step() -> None:
    assert len({stage.name for stage in BUILT_IN}) == len(BUILT_IN)
    assert {stage.time_key for stage in BUILT_IN} >= {"time/ref", "time/old", "time/rollout", "time/publish"}


# --- plug-ins


@pytest.fixture
def registered() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(STAGES._entries)
    yield
    STAGES._entries.clear()
    STAGES._entries.update(before)


def subclass(**attributes: object) -> type[Stage]:
    return type("Mine", (Made,), attributes)


@pytest.mark.usefixtures("registered")
class TestRegistering:
    def test_a_name_that_is_taken_is_refused(self) -> None:
        tandem.register_stage(subclass(name="mine"))
        with pytest.raises(TandemError, match="stage 'mine' is registered twice"):
            register_stage(subclass(name="mine"))

    @pytest.mark.parametrize("name", ["old", "publish", "step", "evaluation", "critic", "reference"])
    def test_names_of_stages_times_and_roles_are_taken(self, name: str) -> None:
        with pytest.raises(TandemError, match=f"'{name}': the name is taken"):
            register_stage(subclass(name=name))

    @pytest.mark.parametrize("name", ["", "Judge", "a/b", "push_fast", 3])
    def test_what_is_no_name(self, name: object) -> None:
        with pytest.raises(TandemError, match="set name to small letters"):
            register_stage(subclass(name=name))

    def test_what_belongs_elsewhere(self) -> None:
        with pytest.raises(TandemError, match="write phase = 'sub_batch', or register a reward"):
            register_stage(subclass(name="mine", phase="group"))
        with pytest.raises(TandemError, match="leave changes_weights out"):
            register_stage(subclass(name="mine", changes_weights=True))

    def test_the_constructor_is_the_schema(self) -> None:
        register_stage(subclass(name="mine"))
        assert set(STAGES["mine"].signature.parameters) == {"name", "needed", "given", "phase"}
