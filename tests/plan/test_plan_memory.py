"""Estimated memory: from what the model's files say, and only from that."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

from tandem.base.errors import Problem
from tandem.plan.plan import Plan

Plans = Callable[..., Plan]
Problems = Callable[..., list[Problem]]


def write_header(folder: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of which only the header is there: no reader of headers looks further."""
    header = json.dumps(
        {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    )
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())


def test_memory_is_counted_from_the_headers_of_the_weights(place: Path, plan_of: Plans) -> None:
    assert plan_of().memory == ()
    write_header(place / "model", {"a": [100, 64], "b": [64]})
    (memory,) = plan_of().memory
    parameters = 100 * 64 + 64
    assert memory.parts["actor weights"] == 4 * parameters
    assert memory.parts["actor optimizer"] == 8 * parameters
    assert "rollout weights" not in memory.parts
    assert memory.parts["rollout KV cache"] == 2 * 4 * 2 * 2 * 16 * (32 * 128 + 8 * 128)  # a prompt stands there once
    with_ref = plan_of("algorithm.kl.in=loss").memory[0]
    assert with_ref.total - memory.total == 2 * 4 * parameters  # the reference, and the actor while it is in place


def test_memory_shrinks_with_devices_and_with_adapters(place: Path, plan_of: Plans) -> None:
    write_header(place / "model", {"a": [1000, 640]})
    one, two = plan_of().memory[0], plan_of("execution.resource={actor: [1, 2]}").memory[0]
    assert two.parts["actor optimizer"] * 2 == one.parts["actor optimizer"]
    adapted = plan_of("actor_rollout_ref.model.lora_rank=1").memory[0]
    assert adapted.parts["actor optimizer"] < one.parts["actor optimizer"]
    assert one.parts["actor weights"] < adapted.parts["actor weights"] < 1.1 * one.parts["actor weights"]


def test_adapters_are_counted_matrix_by_matrix(place: Path, plan_of: Plans) -> None:
    layers = {f"model.layers.{i}.self_attn.{name}_proj.weight": [64, 32] for i in range(2) for name in "qv"}
    write_header(place / "model", {"lm_head.weight": [100, 64], "model.norm.weight": [64], **layers})
    lora = "actor_rollout_ref.model.lora_rank=4"
    everything = plan_of(lora).memory[0]
    half = plan_of(lora, "actor_rollout_ref.model.lora_target_modules=[q_proj]").memory[0]
    assert everything.parts["actor gradients"] == 4 * 4 * (64 + 32) * 4
    assert half.parts["actor gradients"] * 2 == everything.parts["actor gradients"]


def test_a_reference_with_the_adapters_off_costs_no_memory(place: Path, plan_of: Plans) -> None:
    write_header(place / "model", {"model.layers.0.mlp.up_proj.weight": [1000, 640]})
    words = ("actor_rollout_ref.model.lora_rank=2", "algorithm.kl.in=loss")
    without, fixed, moving = (
        plan_of(*words, *more) for more in (("algorithm.kl.in=off",), (), ("actor_rollout_ref.ref.update_interval=3",))
    )
    assert fixed.tags == moving.tags == ("actor", "ref")
    assert (fixed.base_tags, moving.base_tags) == (("ref",), ())
    assert fixed.memory == without.memory
    assert moving.memory[0].parts["actor other tags"] == 2 * moving.memory[0].parts["actor gradients"]


def test_a_broken_weight_file_is_refused_and_costs_no_more_than_the_estimate(place: Path, plan_of: Plans) -> None:
    (place / "model" / "model.safetensors").write_bytes(b"\xff" * 20)
    plan = plan_of()
    assert plan.memory == ()
    assert [problem.key for problem in plan.problems] == ["actor_rollout_ref.model.path"]


def test_targets_are_looked_for_among_the_modules_of_the_model(place: Path, plan_of: Plans) -> None:
    layers = {f"model.layers.{i}.self_attn.{name}_proj.weight": [64, 32] for i in range(2) for name in "qv"}
    write_header(place / "model", {"lm_head.weight": [100, 64], **layers})
    lora = (
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_target_modules=[q_proj, v_porj, lm_head]",
    )
    unknown, head = plan_of(*lora).problems
    assert (unknown.key, unknown.value) == ("actor_rollout_ref.model.lora_target_modules[1]", "v_porj")
    assert "'v_proj'" in unknown.remedy
    assert head.value == "lm_head"
    assert "q_proj, v_proj" in head.remedy


def moe(place: Path, family: str) -> None:
    experts = {
        f"model.layers.0.mlp.experts.{i}.{name}.weight": [64, 32] for i in range(4) for name in ("w1", "w2", "w3")
    }
    attention = {f"model.layers.0.self_attn.{name}_proj.weight": [64, 32] for name in "qv"}
    write_header(place / "model", {**experts, **attention, "model.layers.0.mlp.gate.weight": [4, 64]})
    config = place / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": family, "num_hidden_layers": 1}))


def test_experts_that_are_one_parameter_get_no_adapter_and_the_plan_says_so(place: Path, plan_of: Plans) -> None:
    moe(place, "mixtral")
    plan = plan_of("actor_rollout_ref.model.lora_rank=4")
    assert plan.problems == ()
    assert plan.memory[0].parts["actor gradients"] == 4 * 4 * (64 + 32) * 2
    (note,) = (note for note in plan.notes if "all-linear" in note)
    assert "experts of the family mixtral" in note and "w1" in note
    targets = "actor_rollout_ref.model.lora_target_modules=[q_proj, w1, gate_up_proj, gate, nothing]"
    problems = plan_of("actor_rollout_ref.model.lora_rank=4", targets).problems
    assert [problem.value for problem in problems] == ["w1", "gate_up_proj", "gate", "nothing"]
    assert all("no linear modules" in problem.reason and "q_proj, v_proj" in problem.remedy for problem in problems[:3])


def test_an_adapter_of_experts_is_no_start(place: Path, plan_of: Plans) -> None:
    moe(place, "mixtral")
    (place / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "w1"]}
    (place / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (problem,) = plan_of("actor_rollout_ref.model.adapter_path=adapter").problems
    assert "w1" in problem.reason and "Merge it" in problem.remedy


def test_what_takes_turns_is_not_added_up(place: Path, plan_of: Plans) -> None:
    write_header(place / "model", {"a": [1000, 640]})
    (memory,) = plan_of("algorithm.adv_estimator=gae", "critic.enable=true").memory
    turns: dict[str | None, int] = {}
    for part in memory.held.values():
        turns[part.turn] = turns.get(part.turn, 0) + (part.size or 0)
    assert len(turns) == 4 and memory.known
    assert memory.total == turns.pop(None) + max(turns.values())
    (alone,) = plan_of().memory
    assert memory.total - alone.total == 12 * 640_000  # weights and moments of the critic, which stay


def test_a_step_holds_what_its_batch_has_and_no_more_than_its_budget(place: Path, plan_of: Plans) -> None:
    write_header(place / "model", {"a": [1000, 640]})
    lengths = ["data.max_prompt_length=16", "data.max_response_length=16"]
    few = plan_of(*lengths, "data.train_batch_size=2").memory[0].parts["actor activations"]
    double = plan_of(*lengths, "data.train_batch_size=4").memory[0].parts["actor activations"]
    cut = plan_of(*lengths, "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256")
    assert few is not None and double == 2 * few == 2 * cut.memory[0].parts["actor activations"]  # type: ignore[operator]
    one = plan_of(*lengths, "actor_rollout_ref.actor.ppo_micro_batch_size=1").memory[0].parts["actor activations"]
    assert one is not None and 4 * one < few < 8 * one  # a prompt that samples of a micro-batch share runs once


def test_a_teacher_whose_files_are_not_here_is_unknown(place: Path, plan_of: Plans) -> None:
    write_header(place / "model", {"a": [1000, 640]})
    words = ("algorithm.distillation.type=reverse_kl", "actor_rollout_ref.teacher.path=owner/elsewhere")
    (memory,) = plan_of(*words).memory
    assert memory.parts["teacher weights"] is None and not memory.known and memory.total > 16 * 640_000


def test_a_run_that_this_machine_cannot_hold_is_warned_of(place: Path, plan_of: Plans) -> None:
    write_header(place / "model", {"a": [1 << 20, 1 << 24]})
    notes = plan_of("runtime.device=cpu").notes
    assert any(note.startswith("WARNING: the step can need about") and "this machine has" in note for note in notes)
    assert not any("WARNING" in note for note in plan_of("runtime.device=cuda").notes)
    write_header(place / "model", {"a": [1000, 640]})
    assert not any("WARNING" in note for note in plan_of("runtime.device=cpu").notes)


def test_keys_and_values_are_bounded_and_the_plan_says_how_many_prompts_wait(place: Path, plan_of: Plans) -> None:
    write_header(place / "model", {"a": [100, 64]})
    key, free = "actor_rollout_ref.rollout.kv_cache_gib", plan_of()
    token = 2 * 4 * 2 * 2 * 16  # keys and values of 2 layers, 2 heads of 16, float32
    one = (token + token // 4) * (4 * 128 + 128)  # 4 samples of a prompt, and the copy of a tensor
    bounded = plan_of(f"{key}={2.5 * one / 2**30}")
    assert bounded.runs
    assert bounded.memory[0].parts["rollout KV cache"] == int(2.5 * one) < free.memory[0].parts["rollout KV cache"]
    assert any(note.startswith(key) and "2 of 8 prompts are in flight" in note for note in bounded.notes)
    assert not any(note.startswith(key) for note in plan_of(f"{key}=1").notes)
    small = plan_of(f"{key}={0.9 * one / 2**30}")
    (problem,) = small.problems
    assert problem.key == key
    assert f"128 prompt tokens and 4 x 128 answer tokens take {one} bytes ({token} a token)" in problem.reason
    assert problem.remedy.startswith("Write at least 0.0")
    assert plan_of(f"{key}={problem.remedy.split()[-1]}").runs


def test_only_the_engine_hf_has_a_bound_of_keys_and_values(problems_of: Problems) -> None:
    found = problems_of("execution.mode=hybrid", "actor_rollout_ref.rollout.name=vllm",
                        "actor_rollout_ref.rollout.kv_cache_gib=1")  # fmt: skip
    assert any(p.key.endswith("kv_cache_gib") and "(hf has)" in p.reason for p in found)
