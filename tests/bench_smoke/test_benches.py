"""The benches run, on small sizes; what they measure is no test's business."""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench import generate, load_probe, logprob_memory, measured_run, memory, plain_grpo, quickstart, transport
from bench.peers import compare
from tandem.config.load import load_words
from tandem.config.schema import Config, SftConfig
from tandem.models.loading import as_causal_lm, new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer, load_tokenizer
from tandem.plan.plan import compile_plan
from tandem.session.sft import llama_shape
from tools.families import build

ROOT = Path(__file__).parents[2]
PLAIN: Any = plain_grpo  # written without types, to be as plain as can be


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the quickstart's shape, exported as ``tandem sft`` does."""
    model = load_words([str(ROOT / "examples/quickstart/sft.yaml")], SftConfig).model
    assert model.new is not None
    tokenizer = character_tokenizer(model.new.alphabet, eos=model.new.alphabet[0])
    folder = tmp_path_factory.mktemp("models") / "final"
    save_pretrained_atomic(new_model(llama_shape(model, tokenizer), seed=3), tokenizer, folder)
    return folder


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def plain_model(weights: Path) -> Any:
    model: Any = PLAIN.Model()
    PLAIN.load(model, weights)
    return model


def test_the_plain_program_computes_what_the_exported_model_computes(weights: Path) -> None:
    exported, tokenizer = AutoModelForCausalLM.from_pretrained(weights).eval(), load_tokenizer(weights)
    plain = plain_model(weights)
    texts = ["12+34=", " 5+60=", "99+ 0="]
    ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    rows = [tokenizer.convert_tokens_to_ids(character) for character in PLAIN.VOCAB]
    with torch.no_grad():
        expected = exported(ids).logits[..., rows]
        torch.testing.assert_close(plain(torch.tensor([PLAIN.encode(text) for text in texts])), expected)


def test_a_step_of_the_plain_program(weights: Path) -> None:
    torch.manual_seed(0)
    model = plain_model(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    reward, tokens = PLAIN.grpo_step(model, optimizer, random.Random(0), 2, epochs=2)
    assert 0 <= reward <= 1
    assert 16 <= tokens <= 16 * PLAIN.MAX_NEW


@pytest.mark.long
def test_the_quickstart_bench_from_given_weights(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--seeds", "5", "--steps", "1", "--weights", str(weights), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *words])
    monkeypatch.setattr(quickstart, "CONFIG", str(a_learnable(tmp_path)))
    quickstart.main()
    result = json.loads((tmp_path / "quickstart.json").read_text())
    assert result["summary"]["cpu_ratio"] > 0
    (run,) = result["runs"]
    assert {"rollout", "train"} <= set(run["tandem"]["parts"])
    assert run["tandem"]["children"] >= 0  # one step of scoring can be less than a tick of the clock
    assert "| 5 |" in capsys.readouterr().out


def a_learnable(folder: Path) -> Path:
    """The quickstart's config, shortened, with a reward in which random answers differ: without any a run fails."""
    config = (ROOT / "examples/quickstart/grpo.yaml").read_text()
    changes = {"type: exact": "type: match_fraction", "train_batch_size: 64": "train_batch_size: 8"}
    for old, new in (changes | {"at_start: true": "at_start: true, max_prompts: 16"}).items():
        assert old in config
        config = config.replace(old, new)
    (folder / "grpo.yaml").write_text(config)
    return folder / "grpo.yaml"


def test_the_summary_of_the_quickstart_bench() -> None:
    def row(seed: int, last: float, plain: float) -> dict[str, Any]:
        ours = quickstart.curve([0.0] * 10 + [last] * 10, 0.9, 0.5)
        return {"seed": seed, "tandem": ours, "plain": quickstart.curve([plain] * 20, 0.8, 1.0)}

    rows = [row(0, 0.5, 0.1), row(1, 0.7, 0.3)]
    found = quickstart.summary(rows)
    assert found == pytest.approx({"last_tandem": 0.6, "last_plain": 0.2, "smallest_gain": 0.5, "cpu_ratio": 0.5})
    assert len(quickstart.as_table(rows).splitlines()) == 4


def test_warm_up_steps_are_not_counted(weights: Path, tmp_path: Path) -> None:
    words = [
        str(a_learnable(tmp_path)),
        f"actor_rollout_ref.model.path={weights}",
        f"trainer.output_dir={tmp_path / 'run'}",
        "trainer.total_steps=3",
        "data.train_batch_size=2",
        "evaluation={interval: 0}",
        "trainer.logger=[]",
    ]
    run = measured_run.measured_run(words, skip=1)
    assert len(run["rewards"]) == len(run["lengths"]) == 3
    assert run["cpu_per_step"] * 2 > sum(run["parts"].values()) * 2
    assert run["evals"] == []


@pytest.mark.parametrize("name", compare.TASKS)
def test_the_peer_bench_gives_tandem_a_config_that_plans(name: str, weights: Path, tmp_path: Path) -> None:
    task = compare.TASKS[name]
    rows = task.rows(5)
    assert rows == task.rows(5)
    assert all(eval(row["prompt"].rstrip("=")) == int(row["answer"]) for row in rows if not task.chat)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    skip, *words = compare.tandem_words(task, 4, 3, str(weights), data, 1, tmp_path / "run")
    assert skip == "--skip=1"
    plan = compile_plan(load_words([str(word) for word in words], Config))
    assert [problem.key for problem in plan.problems] == (["data.chat"] if task.chat and plan.problems else [])
    assert ("ref" in plan.tags) == (task.kl > 0)


def test_the_table_of_the_peer_bench() -> None:
    runs = {
        "tandem": [{"cpu_per_step": 1.0, "parts": {"rollout": 0.25, "publish": 0.001}, "lengths": [9.0, 3.0, 4.0]}],
        "float32": [{"cpu_per_step": 2.0, "parts": {"rollout": 1.5}, "lengths": [9.0, 3.0, 3.0]}],
    }
    *_, ours, theirs = compare.as_table(runs).splitlines()
    assert ours == "| tandem | 1.000 | rollout 0.25 | 3.5 |"
    assert theirs == "| TRL float32 | 2.000 | rollout 1.50 | 3.0 |"


def test_generation_against_model_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(small).eval()
    prompts = [torch.randint(3, 64, (5 + i,)) for i in range(2)]
    monkeypatch.setattr(generate, "load", lambda folder, count: (model, prompts, (2,)))
    found = generate.against_generate(Namespace(model=None, prompts=2, samples=2, tokens=3, rounds=1))
    assert found["forbidden"]["ratio"] > 0 and found["natural"]["ratio"] > 0


def test_generation_against_a_plain_loop() -> None:
    assert generate.against_plain_loop(1)["ratio"] > 0


def test_memory_of_logprobs() -> None:
    for chunked in (True, False):
        assert logprob_memory.measure(64, 128, 8, chunked)["seconds"] >= 0


@pytest.mark.long
def test_an_estimate_of_memory_and_its_peak_come_from_one_run(tmp_path: Path) -> None:
    words = memory.run(4, 4, 2, 2, actor_rollout_ref__model__lora_rank=2)
    found = memory.child(memory.write(tmp_path, memory.shape(12, 16, 1), words))
    assert found["estimate"] > 0 and found["measured"] > 0
    assert {"actor weights", "actor activations", "rollout KV cache"} <= found["parts"].keys()


def test_the_proof_of_a_model_is_done_anew_each_time_it_is_measured() -> None:
    model = as_causal_lm(build("llama"))
    assert load_probe.proof(model) > 0
    assert load_probe.forwards(model) == load_probe.forwards(model) > 4
    assert model.proved == {"training", "generation"}


def test_transports_are_measured_against_a_copy() -> None:
    found = transport.measure(megabytes=1, tensors=3, bucket_mb=1, rounds=1)
    assert [*found] == [transport.COPY, "shared_memory", "collective (gloo)"]
    assert all(seconds > 0 for seconds in found.values())
