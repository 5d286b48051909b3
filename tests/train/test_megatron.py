"""The engine on Megatron-core is the one on fully_shard: same log-probs, losses, gradients and weights within rounding.

Nothing of CUDA is asked for here: Megatron-core's own attention is not used, nor its random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.errors import DataError
from tandem.config.model import OptimConfig
from tandem.models.loading import as_causal_lm, new_model
from tandem.models.megatron import fault_for_megatron
from tandem.train import checkpoint
from tandem.train.megatron.engine import MegatronEngine
from tandem.train.megatron.names import pieces
from tandem.train.packed_engine import PackedEngine
from tandem.train.sharding import local_shard, rank_mesh
from tests.train.agreeing import OBJECTIVE, WANTED, same
from tests.train.conftest import GPT2, build_batch, build_engine
from tests.train.test_tensor_parallel import EVEN, model_of

MakeAny = Callable[..., Any]

SHAPES = {
    "llama": {
        **EVEN,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    "qwen2": {**EVEN, "model_type": "qwen2", "tie_word_embeddings": True, "num_attention_heads": 8},
    "qwen3": {**EVEN, "model_type": "qwen3", "head_dim": 8},
}

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def megatron(model: Any, **options: Any) -> MegatronEngine:
    options = {"optim": OptimConfig(lr=1e-3), "max_tokens_per_micro_batch": 10_000, **options}
    return MegatronEngine(model, total_updates=100, **{"temperature": 1.0, **options})


def known_batch(lengths: list[int]) -> Any:
    """Tokens that the model's tokenizer has."""
    whole = build_batch(lengths)
    whole.batch["responses"] = whole.ragged("responses").like(whole.ragged("responses").values % 5)
    return whole


def agree(one: PackedEngine, many: MegatronEngine, whole: Any, rows: list[int]) -> None:
    """All that both compute, gradients of all weights, and a step; ``many`` gets the ``rows`` of the batch."""
    mine = whole[rows]
    expected, found = one.forward(whole, WANTED), many.forward(mine, WANTED)
    for name, values in expected.items():
        wanted = values.take(torch.tensor(rows)).values
        torch.testing.assert_close(found[name].values, wanted, atol=2e-5, rtol=1e-4)
    loss, other = (engine.forward_backward(part, OBJECTIVE) for engine, part in ((one, whole), (many, mine)))
    torch.testing.assert_close(other.loss, loss.loss, atol=1e-4, rtol=1e-5)
    many.join_gradients()
    gradients = {name: parameter.grad for name, parameter in many.model.parameters_by_name.items()}
    assert all(gradient is not None for gradient in gradients.values())
    own = many.seen(gradients)  # type: ignore[arg-type]
    whole_gradients = {name: weight.grad for name, weight in one.model.model.named_parameters()}
    assert own.keys() == whole_gradients.keys()
    for name, gradient in own.items():
        wanted = many.model.own_part(name, whole_gradients)  # type: ignore[arg-type]
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-4, msg=name)
    step = one.optim_step(OBJECTIVE.denominator(whole))
    other_step = PackedEngine.optim_step(many, OBJECTIVE.denominator(whole))
    assert other_step.applied and other_step.grad_norm == pytest.approx(step.grad_norm, rel=1e-5)
    same(one, many)


@needs_megatron
@pytest.mark.parametrize("family", SHAPES)
def test_one_rank_of_megatron_gives_what_fully_shard_gives(family: str) -> None:
    shape = SHAPES[family]
    engine = megatron(model_of(shape), max_tokens_per_micro_batch=26, gradient_checkpointing=True)
    before, source = dict(engine.export()), dict(model_of(shape).model.state_dict())
    assert before.keys() == source.keys()
    assert all(torch.equal(before[name], weight) for name, weight in source.items())  # a round trip changes no bit
    agree(build_engine(model=model_of(shape)), engine, known_batch([4, 6, 3, 9]), [0, 1, 2, 3])


@needs_megatron
def test_two_ranks_of_megatron_give_what_one_gives(on_ranks: MakeAny, tmp_path: Path) -> None:
    """Splitting the model, or the samples; weight tags, checkpoints, models beside it and half precision."""
    whole, root = known_batch([4, 6, 3, 9]), tmp_path / "checkpoints"

    def body(mesh: DeviceMesh, rank: int) -> None:
        tensor = rank_mesh("cpu", 2, 2)
        for shape in SHAPES.values():
            many = megatron(model_of(shape), mesh=tensor, max_tokens_per_micro_batch=26, gradient_checkpointing=True)
            one = build_engine(model=model_of(shape))
            agree(one, many, whole, [0, 1, 2, 3])
            assert many.shards()["model.embed_tokens.weight"].shape == (12, 16)  # each rank has its half alone
        data = megatron(model_of(shape), mesh=mesh)
        agree(build_engine(model=model_of(shape)), data, whole, [[0, 1, 2], [3]][rank])
        data.forward_backward(whole[[0, 1] if rank else []], OBJECTIVE)  # one has nothing
        assert data.optim_step(OBJECTIVE.denominator(whole)).applied

        checkpoint.save(root, 1, tensors={"actor": many.state_dict()}, facts={}, keep=1)
        other = build_engine(shape, seed=5)
        tag = many.shards_of(dict(other.model.model.named_parameters()))
        for name, shard in many.shards().items():
            shard.copy_(tag[name])
        same(other, many)
        beside = many.beside(as_causal_lm(new_model(GPT2, seed=3)))
        alone = build_engine(GPT2, seed=3).forward(whole, ["logprobs"])["logprobs"].values
        torch.testing.assert_close(beside.forward(whole, ["logprobs"])["logprobs"].values, alone, atol=2e-5, rtol=1e-4)
        for again in (megatron(as_causal_lm(new_model(shape, seed=7))), megatron(model_of(shape), mesh=tensor)):
            state = {"actor": again.state_dict()}  # as many ranks, and another number
            checkpoint.open_checkpoint(root / "step_00000001").load_tensors(state)
            again.load_state_dict(state["actor"])
            assert again.updates == 1
            same(one, again)
        for saved, shard in zip(state["actor"]["model"].values(), again.shards().values(), strict=True):
            assert torch.equal(local_shard(saved), shard)
        agree(one, again, whole, [0, 1, 2, 3])  # moments too

        half = [model_of(shape, "bfloat16") for _ in range(2)]
        halves = [megatron(half[0], mesh=tensor), build_engine(model=half[1], mesh=tensor)]
        found = [half.forward(whole, ["logprobs"])["logprobs"].values for half in halves]
        torch.testing.assert_close(*found, atol=0.05, rtol=0.05)
        norms = []
        for half in halves:
            half.forward_backward(whole, OBJECTIVE)
            norms.append(half.optim_step(OBJECTIVE.denominator(whole)).grad_norm)
        assert norms[0] == pytest.approx(norms[1], rel=0.05)

    on_ranks(2, body)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 3]), st.booleans(), st.booleans()
)
def test_ranks_have_each_number_of_each_weight_once(
    per_group: int, groups: int, size: int, ranks: int, biased: bool, tied: bool
) -> None:
    config = SimpleNamespace(
        hidden_size=5,
        vocab_size=2 * ranks,
        num_hidden_layers=2,
        head_dim=size,
        intermediate_size=3 * ranks,
        num_key_value_heads=groups * ranks,
        num_attention_heads=groups * ranks * per_group,
    )
    found = dict(pieces(config, ranks, tied=tied, biased=biased, normed=True))
    weights = {name: torch.randn(piece.shape) for name, piece in found.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] if tied else weights["lm_head.weight"]
    mlp, fused = 6, (per_group + 2) * size * groups
    heads = per_group * groups * size
    shapes = {
        "linear_qkv.weight": (fused, 5),
        "linear_qkv.bias": (fused,),
        "linear_fc1.weight": (mlp, 5),
        "linear_fc2.weight": (5, mlp // 2),
        "linear_proj.weight": (5, heads),
        "output_layer.weight": (2, 5),
        "word_embeddings.weight": (2, 5),
        "q_layernorm.weight": (size,),
        "k_layernorm.weight": (size,),
    }
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in found}
    for rank in range(ranks):
        parameters: dict[str, torch.Tensor] = {}
        for piece in found.values():
            shape = next((shape for end, shape in shapes.items() if piece.parameter.endswith(end)), (5,))
            parameters.setdefault(piece.parameter, torch.full(shape, torch.nan))
        for name, piece in found.items():
            piece.of(parameters[piece.parameter]).copy_(piece.part(weights[name], rank, ranks))
        assert not any(tensor.isnan().any() for tensor in parameters.values())
        for name, piece in found.items():
            parts[name].append(piece.of(parameters[piece.parameter]))
    for name, piece in found.items():
        whole = parts[name][0] if piece.cut is None else torch.cat(parts[name], piece.cut)
        assert torch.equal(whole.reshape(piece.shape), weights[name])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma2"}, "which weight of a model of the family gemma2 is which"),
        ({"attention_bias": True}, "its config.json says attention_bias: True"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.rope_type: yarn"),
    ],
)
def test_what_megatron_would_run_otherwise_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    assert fault_for_megatron({"model_type": "llama", "attention_bias": False}) is None
    assert words in str(fault_for_megatron({"model_type": "llama", **change}))


@needs_megatron
def test_a_model_of_another_family_is_refused() -> None:
    with pytest.raises(DataError, match=r"family gpt2 is which.*Write strategy: fsdp2"):
        megatron(as_causal_lm(new_model(GPT2, seed=0)))
