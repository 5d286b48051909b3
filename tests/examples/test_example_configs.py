"""The configs of the examples: each plans as it stands, and each runs, shortened and on a tiny random model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.config.load import load_words
from tandem.config.schema import Config, SftConfig
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer
from tandem.observe.metrics import METRICS_FILE, Row, read_rows
from tandem.plan.plan import Plan, compile_plan

SMOLLM2 = ["addition", "addition_chat", "reasoning_gym"]
VARIED = {"type": "vowels", "file": str(Path(__file__).with_name("vowels.py"))}
"""A part of the reward that differs between a random model's answers: without any signal a run ends with an error."""

FEW = "data.source={file: examples/quickstart/sums.py, type: SumsWithErrors, rows: 100}"
"""Of the 96,000 rows of the warm-up's source, as many as a shortened run needs."""

FEW_SUMS = "data.source={file: tests/examples/few_sums.py, type: FewSums}"
"""The same of the 10,000 sums of all other runs; that of `grpo.yaml` below reads them all."""

Run = Callable[..., list[Row]]


def smollm2(name: str) -> str:
    return f"examples/smollm2/{name}.yaml"


def plan_of(*words: str) -> Plan:
    return compile_plan(load_words(words, Config))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A command of ``tandem`` on a config, with outputs in a folder of the test; the metrics that it wrote."""

    def call(command: str, config: str, out: str, *words: str) -> list[Row]:
        result: Any = CliRunner().invoke(app, [command, config, f"trainer.output_dir={tmp_path / out}", *words])
        assert result.exit_code == 0, result.output
        return read_rows(tmp_path / out / METRICS_FILE)

    return call


def values(rows: list[Row], key: str) -> list[float]:
    return [float(str(row[key])) for row in rows if key in row]


QUICKSTART = ["grpo", "hybrid", "fully_async"]


def quickstart(name: str) -> str:
    return f"examples/quickstart/{name}.yaml"


@pytest.mark.parametrize("config", [*map(smollm2, SMOLLM2), *map(quickstart, QUICKSTART), "examples/ppo/ppo.yaml"])
def test_only_the_model_must_be_made_first(config: str) -> None:
    plan = plan_of(config, "actor_rollout_ref.model.path=nowhere/at/all")
    assert [problem.key for problem in plan.problems] == ["actor_rollout_ref.model.path"]


def test_the_models_that_examples_name_are_what_their_first_commands_make() -> None:
    made = {load_words([smollm2(name)], Config).actor_rollout_ref.model.path for name in SMOLLM2}
    assert made == {"models/smollm2-135m"}
    warmed_up = load_words(["examples/quickstart/sft.yaml"]).trainer.output_dir + "/final"
    configs = [*map(quickstart, QUICKSTART), "examples/lora/grpo.yaml"]
    started = {load_words([config], Config).actor_rollout_ref.model.path for config in configs}
    assert started == {warmed_up}


def varied(config: str) -> str:
    """The reward of ``config`` with ``VARIED`` added."""
    own = load_words([config, "actor_rollout_ref.model.path=any"], Config).reward_manager
    reward = {"type": "weighted_sum", "parts": [own.model_dump(include={"type", "file"}) | own.parameters, VARIED]}
    return f"reward_manager={json.dumps(reward)}"


@pytest.mark.parametrize("name", SMOLLM2)
def test_a_smollm2_example_runs_shortened(name: str, tiny_model: Path, run: Run) -> None:
    rows = run(
        "train",
        smollm2(name),
        "run",
        f"actor_rollout_ref.model.path={tiny_model}",
        varied(smollm2(name)),
        "trainer.total_steps=2",
        "evaluation.interval=2",
        "evaluation.max_prompts=4",
        "data.train_batch_size=2",
        "data.max_prompt_length=256",  # a token is a character here
    )
    assert len(values(rows, "reward/mean")) == len(values(rows, "eval/reward")) == 2
    assert max(values(rows, "updates")) == 2
    assert not any(values(rows, "reward/failed"))


def test_the_chat_example_keeps_to_the_reference(tiny_model: Path) -> None:
    plan = plan_of(smollm2("addition_chat"), f"actor_rollout_ref.model.path={tiny_model}", "data.max_prompt_length=256")
    assert not plan.problems
    assert "ref" in plan.tags


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engines_example_needs_the_environment_that_make_builds(tiny_model: Path, engine: str) -> None:
    words = (smollm2(f"grpo_{engine}"), f"actor_rollout_ref.model.path={tiny_model}", "data.max_prompt_length=256")
    key = "actor_rollout_ref.rollout.python"
    (missing,) = plan_of(*words, f"{key}=.engines/none/bin/python").problems
    assert missing.key == key
    if find_spec(engine) is None:
        (lacking,) = plan_of(*words, f"{key}={sys.executable}").problems
        assert lacking.key == key and engine in lacking.reason
    python = load_words([words[0]], Config).actor_rollout_ref.rollout.python
    assert python is not None and python.removesuffix("/bin/python") in Path("Makefile").read_text()


def test_make_quickstart_trains_in_hybrid_mode() -> None:
    recipe = Path("Makefile").read_text().split("\nquickstart:")[1].split("\n\n")[0]
    assert "tandem sft examples/quickstart/sft.yaml" in recipe
    (trained,) = re.findall(r"tandem train (\S+)", recipe)
    assert load_words([trained], Config).execution.mode == "hybrid"


@pytest.mark.long
def test_the_quickstart_runs_shortened(tmp_path: Path, run: Run) -> None:
    small = ["data.train_batch_size=8", "trainer.total_steps=2"]
    warm_up = run("sft", "examples/quickstart/sft.yaml", "sft", *small, FEW, "evaluation.interval=2")
    assert len(values(warm_up, "loss/sft")) == 2
    assert len(values(warm_up, "eval/accuracy")) == 1
    start = f"actor_rollout_ref.model.path={tmp_path / 'sft' / 'final'}"
    words = [start, "evaluation.interval=2", "evaluation.max_prompts=16"]
    rows = run("train", config := quickstart("grpo"), "grpo", *small, *words, varied(config))
    assert len(values(rows, "reward/mean")) == len(values(rows, "eval/reward")) == 2
    assert max(values(rows, "updates")) == 2
    words.append(FEW_SUMS)
    rows = run("train", config := "examples/lora/grpo.yaml", "lora", *small, *words, varied(config))
    assert len(values(rows, "reward/mean")) == len(values(rows, "eval/reward")) == 2
    assert (tmp_path / "lora" / "final" / "adapter_model.safetensors").is_file()
    for name in ("hybrid", "fully_async"):
        rows = run("train", config := quickstart(name), name, *small, *words, varied(config))
        assert len(values(rows, "reward/mean")) == len(values(rows, "limit/fraction")) == 2
        assert max(values(rows, "lag/max")) <= 1


@pytest.mark.parametrize("mode", [[], ["--hybrid", "--max-staleness", "1"]], ids=["colocate", "hybrid"])
def test_ppo_runs_shortened(tmp_path: Path, run: Run, mode: list[str]) -> None:
    save_character_model(tmp_path / "model")
    config = "examples/ppo/ppo.yaml"
    rows = run(
        "train",
        config,
        "ppo",
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        varied(config),
        FEW_SUMS,
        "data.train_batch_size=8",
        "trainer.total_steps=3",
        "critic.warmup_steps=1",
        "evaluation.interval=3",
        "evaluation.max_prompts=16",
        "runtime.threads=true",
        *mode,
    )
    assert values(rows, "updates") == [0, 1, 2]
    assert values(rows, "value/applied") == [1, 1, 1]
    assert len(values(rows, "eval/reward")) == 2
    assert (tmp_path / "ppo" / "critic" / "config.json").is_file()


def save_character_model(folder: Path) -> None:
    """A random model over the quickstart's characters."""
    new = load_words(["examples/quickstart/sft.yaml"], SftConfig).model.new
    assert new is not None
    tokenizer = character_tokenizer(new.alphabet, eos=new.alphabet[0], pad=None)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    shape = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    save_pretrained_atomic(
        new_model({**shape, **heads, **ids, "vocab_size": len(tokenizer)}, seed=0), tokenizer, folder
    )


DISTILLATION = "examples/distillation/distill.yaml"


def test_the_student_and_its_teacher_are_what_the_quickstart_makes() -> None:
    section = load_words([DISTILLATION], Config).actor_rollout_ref
    assert section.model.path == load_words(["examples/quickstart/sft.yaml"]).trainer.output_dir + "/final"
    trained = load_words([quickstart("hybrid"), "actor_rollout_ref.model.path=any"], Config)
    assert section.teacher.path == trained.trainer.output_dir + "/final"


@pytest.mark.long
def test_distillation_runs_shortened(tmp_path: Path, run: Run) -> None:
    """From a teacher of the student's shape, which is a tag, and from one of another, which is beside it."""
    small = ["data.train_batch_size=8", "evaluation.interval=2"]
    own, other = "examples/quickstart/sft.yaml", "examples/distillation/small.yaml"
    for config, out, steps in ((own, "teacher", 3), (own, "same", 2), (other, "other", 2)):
        run("sft", config, out, *small, FEW, f"trainer.total_steps={steps}")
    teacher = f"actor_rollout_ref.teacher.path={tmp_path / 'teacher' / 'final'}"
    for student, roles in (("same", ("actor", "rollout")), ("other", ("actor", "rollout", "teacher"))):
        words = [teacher, f"actor_rollout_ref.model.path={tmp_path / student / 'final'}", "trainer.total_steps=2"]
        words += [FEW_SUMS, "runtime.threads=true"]  # no process for the scorer
        for objective in ([], ["algorithm.distillation={type: reverse_kl, only: true}"]):
            plan = plan_of(DISTILLATION, *words, *objective)
            assert plan.problems == () and plan.roles == roles
            rows = run(
                "train", DISTILLATION, f"{student}-taught", *small, *words, *objective, "evaluation.max_prompts=8"
            )
            assert len(values(rows, "distill/kl")) == len(values(rows, "eval/reward")) == 2
            assert max(values(rows, "updates")) == 2
