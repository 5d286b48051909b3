"""Tiny random models of many families, and which way each goes through Tandem.

``python tools/families.py`` runs all of them and writes ``docs/models.md``; with names, it prints their rows. Tests run
one family of each kind and compare its row with the page.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tandem.base.errors import DataError
from tandem.models.loading import as_causal_lm
from tandem.models.probe import Probe, Use, prove

TARGET = Path(__file__).resolve().parent.parent / "docs" / "models.md"
MOST = 4_000_000
"""Parameters of a tiny model."""

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "decoder_ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 8,
    "attention_window_size": 8,
    "attention_chunk_size": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    # sparse attention
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    # linear attention, state spaces, convolutions
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_d_ssm": 128,
    "mamba_dt_rank": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "state_size": 16,
    "time_step_rank": 8,
    "chunk_size": 16,
    "n_groups": 1,
    "lru_width": 64,
    "rotary_dim": 8,
    # Wide enough that what one token does to another is seen.
    "initializer_range": 0.2,
}
"""Fields of configs by name, where a family has them."""

LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # keys for each head; the head that is rotated
GROUPED = {"num_expert_group": 1, "num_experts_per_token": 2}
LINEAR = ["linear_attention", "full_attention"]
SHARED = ["linear_attention", "hybrid", "hybrid"]
FAMILIES: dict[str, dict[str, Any]] = {
    # attention and nothing else that mixes tokens
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "codegen": {},
    "cohere": {},
    "cohere2": {},
    "ctrl": {},
    "cwm": {},
    "diffllama": {},
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "dots1": {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "gemma": {},
    "gemma3_text": {},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "final_logit_softcapping": 3.0},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gptj": {},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {},
    "granitemoeshared": {},
    "helium": {},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hyperclovax": {"logits_scaling": 0.25},
    "jais2": {},
    "jetmoe": {},
    "laguna": {},
    "llama": {},
    "minimax_m2": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "moshi": {},
    "nanochat": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "starcoder2": {},
    "xglm": {},
    # latent attention
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "longcat_flash": {**LATENT, "zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    "minicpm3": LATENT,
    "sarvam_mla": LATENT,
    "youtu": LATENT,
    # sparse or compressed attention
    "axk1": LATENT,
    "axk2": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": {},
    "glm_moe_dsa": LATENT,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    # linear attention, state spaces, convolutions
    "bailing_hybrid": {**LATENT, "layer_types": LINEAR, "linear_head_dim": 16, "linear_num_heads": 4, **GROUPED},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {},
    "falcon_mamba": {},
    "granitemoehybrid": {"layer_types": LINEAR},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**LATENT, "layer_types": LINEAR, "linear_head_dim": 16, "linear_num_heads": 4, **GROUPED},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax": {"layer_types": LINEAR},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "num_hidden_layers": 3},
    "olmo_hybrid": {},
    "qwen3_5_moe_text": {"layer_types": LINEAR},
    "qwen3_5_text": {"layer_types": LINEAR},
    "qwen3_next": {"layer_types": LINEAR},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv": {},
    "xlstm": {},
    "zamba": {
        "layers_block_type": SHARED,
        "num_hidden_layers": 3,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
    "zamba2": {"layers_block_type": SHARED, "num_hidden_layers": 3},
    # attention that does more than the usual
    "bloom": {},
    "doge": {},
    "falcon": {},
    "gemma2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_oss": {},
    "granite_swa": {},
    "llama4_text": {},
    "mimo_v2_flash": {},
    "mpt": {},
    "nemotron": {},
    "stablelm": {},
    "vaultgemma": {},
}
"""Family -> what its tiny config has beside ``SMALL``."""


def tiny(family: str, **overrides: Any) -> PreTrainedConfig:
    """A config of ``family`` for a model of some 100,000 parameters."""
    cls = CONFIG_MAPPING[family]
    fields = {**_shrunk(cls().to_dict()), **FAMILIES.get(family, {}), **overrides}
    config: PreTrainedConfig = cls(**fields)
    return config


def build(family: str, **overrides: Any) -> PreTrainedModel:
    """A tiny random model of ``family``, always the same."""
    config = tiny(family, **overrides)
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(config).num_parameters()
    if count > MOST:
        raise ValueError(f"{family} has {count} parameters: give it smaller sizes in FAMILIES")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny(family, **overrides), dtype=torch.float32)
    model.eval()
    return model


def _shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    off = {name for name in ("sliding_window", "num_experts", "n_routed_experts") if fields.get(name) is None}
    small = {name: value for name, value in SMALL.items() if name in fields and name not in off}
    kinds = list(dict.fromkeys(fields.get("layer_types") or []))
    if kinds:
        small["layer_types"] = kinds if len(kinds) > 1 else 2 * kinds
        small["num_hidden_layers"] = len(small["layer_types"])
    return small


@dataclass(frozen=True)
class Row:
    """How a family goes through Tandem: the route of training and of generation, or why there is none."""

    family: str
    training: str
    generation: str
    why: str


def look(family: str) -> Row:
    """Run the tiny model of ``family`` along each route, with documents longer than its windows and blocks."""
    every = ((0, 0), (0, 1), (1, 0), (1, 1))
    probe = Probe(prompts=(22, 9), answers=((14, 5), (3, 18)), compared=every)
    found, reasons = dict[str, str](), list[str]()
    uses: tuple[Use, ...] = ("training", "generation")
    try:
        model = as_causal_lm(build(family))
    except DataError as error:
        return Row(family, "refused", "refused", str(error))
    for use in uses:
        try:
            reasons += prove(model, use, probe, known={}).values()
            found[use] = f"{model.route}, no cache" if use == "generation" and model.recomputes else model.route
        except DataError as error:
            found[use] = "refused"
            reasons.append(str(error))
    return Row(family, found["training"], found["generation"], "; ".join(dict.fromkeys(reasons)))


HEAD = """# Models

What becomes of a tiny random model of each family, tried by `make families` (tools/families.py) with the versions of
constraints.txt. A model is proved again when a run loads it.

- **packed**: documents side by side in one row, a shared prompt computed once.
- **rows**: a row for each document and no shared prompt: right, and slower. The last column says why.
- **refused**: neither equals plain transformers.

The proof runs four short documents along the route, for training and for generation, and compares hidden states and
logits of two that have neighbours with those of plain transformers, which runs these two side by side. That is 7
forwards of a few tokens (13 for rows): 29 to 67 ms for the tiny models here, and 0.89 s for 135 M parameters in
float32, where reading the weights took 0.21 s. A process that only trains needs 2 of them, one that only generates 5.
Each forward reads all weights once, so it grows with the model. (Processor time of one thread, median of five, AMD EPYC
with two cores; `python -m bench.load_probe`.)

| family | training | generation | why |
| --- | --- | --- | --- |
"""


def page(rows: Iterable[Row]) -> str:
    """``docs/models.md``."""
    return HEAD + "".join(line(row) for row in rows)


def line(row: Row) -> str:
    """A row of the page's table."""
    return "| " + " | ".join(str(value).replace("|", "/") for value in row.__dict__.values()) + " |\n"


def main(names: list[str]) -> None:
    """Print the rows of ``names``; without any, write the page."""
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = []
    for family in names or FAMILIES:
        rows.append(look(family))
        print(line(rows[-1]), end="", flush=True)
    if not names:
        from tools.features import section  # which builds on this

        TARGET.write_text(page(rows) + section(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
