"""A ``config.json`` that describes no model is refused with its field and value, by the plan and by every load."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.base.errors import DataError
from tandem.config.model import ModelConfig
from tandem.models.families import fault_of_family, language_models
from tandem.models.folder.described import ACTIVATIONS, ROPES, fault_of_config
from tandem.models.loading import describe_causal_lm, fault_of_model, load_causal_lm
from tandem.plan.checks.model.model import read_checked
from tandem.session.keep.exports import copy_model
from tests.plan.folders import MODEL_CONFIG, write_model
from tools.families import FAMILIES, tiny

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

NO_MODEL: list[tuple[dict[str, object], str]] = [
    ({"rms_norm_eps": 0}, "the rms_norm_eps 0, which is no finite number above 0"),
    ({"layer_norm_eps": -1e-5}, "the layer_norm_eps -1e-05"),
    ({"rms_norm_eps": float("nan")}, "the rms_norm_eps nan"),
    ({"rms_norm_eps": "1e-6"}, "the rms_norm_eps '1e-6'"),
    ({"rope_theta": 0}, "the rope_theta 0, which is no finite number above 0"),
    ({"rope_theta": -1e4}, "the rope_theta -10000.0"),
    ({"rope_theta": float("inf")}, "the rope_theta inf"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "the rope_theta 0 of its rope (default)"),
    ({"final_logit_softcapping": 0.0}, "the final_logit_softcapping 0.0"),
    ({"attn_logit_softcapping": True}, "the attn_logit_softcapping True"),
    ({"query_pre_attn_scalar": 0}, "the query_pre_attn_scalar 0"),
    ({"logits_scaling": 0}, "the logits_scaling 0, which is no finite number other than 0"),
    ({"tie_word_embeddings": "false"}, "the tie_word_embeddings 'false', which is neither true nor false"),
    ({"layer_types": ["full_attention"]}, "2 num_hidden_layers, and layer_types for 1"),
    ({"head_dim": 15, "rope_theta": 1e4}, "heads of 15 (head_dim), and a rope turns pairs"),
    ({"num_experts": 4, "num_experts_per_tok": 5}, "the num_experts_per_tok 5, of 4 experts"),
    ({"hidden_act": "sillu"}, "the hidden_act 'sillu', which transformers lacks: did you mean 'silu'"),
    ({"hidden_act": ["silu"]}, "the hidden_act ['silu'], which transformers lacks"),
    ({"rope_scaling": {"type": "linaer", "factor": 2.0}}, "the rope_type 'linaer', which transformers lacks: did you"),
    ({"rope_scaling": {"type": "linear"}}, "the rope_type 'linear' without its factor"),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "the rope_type 'dynamic' without its factor"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "the rope_type 'yarn' without its factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "the rope_type 'llama3' without its low_freq_factor"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "'longrope' without its long_factor"),
    ({"rope_scaling": {"factor": 2.0}}, "the rope factor 2.0 without a rope_type, so that it would do nothing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "the factor 0 of its rope (linear)"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "the factor '2' of its rope (linear)"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [0]}}, "a long_factor of its rope"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "the high_freq_factor 4.0 of its rope (llama3), which must"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "the rope_type 'yarn' without its factor"),
]


@pytest.mark.parametrize(("changes", "fault"), NO_MODEL, ids=lambda part: str(part)[:60])
def test_what_no_model_has_is_refused_by_plan_and_load(changes: dict[str, object], fault: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **MODEL_CONFIG, **changes)
    (problem,) = read_checked("model", ModelConfig(path=str(folder)))[1]
    assert problem.key == "model.path" and problem.value == str(folder)
    assert fault in problem.reason and problem.remedy
    for load in (load_causal_lm, describe_causal_lm):
        with pytest.raises(DataError) as error:
            load(folder)
        assert fault in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_scaling": None, "final_logit_softcapping": None, "rms_norm_eps": 1e-6, "rope_theta": 1000000},
        {"rope_theta": [1e4, 1e6], "num_experts": 0, "num_experts_per_tok": 8},
        {"auto_map": {"AutoConfig": "own.Config"}, "hidden_act": "of-its-own", "model_type": "of-its-own"},
    ],
    ids=["llama3", "yarn", "nothing", "lists and no experts", "code of its own"],
)
def test_what_a_model_may_have_is_taken(changes: dict[str, object], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **{**MODEL_CONFIG, **changes})
    assert read_checked("model", ModelConfig(path=str(folder)))[1] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_as_transformers_writes_it_is_refused(family: str) -> None:
    config = tiny(family).to_dict()
    assert fault_of_config(config) is None and fault_of_family(config) is None


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (None, "no model_type, which says what code runs the weights"),
        ("lama", "the model_type 'lama', of which transformers has no language model (did you mean 'llama'"),
        ("vit", "the model_type 'vit', of which transformers has no language model"),
        (3, "the model_type 3, of which"),
    ],
)
def test_a_family_that_transformers_does_not_run_is_refused_by_the_plan(
    family: object, said: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", **MODEL_CONFIG, model_type=family)
    (problem,) = read_checked("model", ModelConfig(path=str(folder)))[1]
    assert problem.key == "model.path" and said in problem.reason and "docs/models.md" in problem.remedy


def test_what_is_known_of_transformers_is_what_it_has() -> None:
    assert language_models() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(ACT2FN) == ACTIVATIONS
    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPES)


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}'])
def test_a_broken_generation_config_is_refused_by_every_load(text: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", parameters=1, **MODEL_CONFIG)
    assert fault_of_model(folder) is None
    (folder / "generation_config.json").write_text(text)
    for load in (load_causal_lm, describe_causal_lm, lambda place: copy_model(place, tmp_path / "out")):
        with pytest.raises(DataError, match=r"its generation_config\.json"):
            load(folder)
    assert not (tmp_path / "out").exists()
