"""What the files of a model say is the plan's to say: the run would find it after it was started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base.errors import Problem
from tandem.plan.files.model import read_model
from tandem.plan.plan import Plan
from tandem.plan.sft import SftPlan
from tests.plan.folders import MODEL_CONFIG, write_model, write_weights

Plans = Callable[..., Plan]
SftPlans = Callable[..., SftPlan]
Problems = Callable[..., list[Problem]]

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut(folder: Path) -> None:
    write_weights(folder / "model.safetensors", {"a": 1000})
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])


def cut_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((500).to_bytes(8, "little") + b"{")


def index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def another_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def only_what_is_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "training_args.bin")


def pickled_index(folder: Path) -> None:
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model-2.bin"}}))


def shards(folder: Path, held: dict[str, list[str]], listed: dict[str, str]) -> None:
    """``held``: file -> the weights in it; ``listed``: what the index says of them."""
    remove_weights(folder)
    for name, weights in held.items():
        write_weights(folder / name, dict.fromkeys(weights, 2))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def twice(folder: Path) -> None:
    shards(folder, {"1.safetensors": ["a", "b"], "2.safetensors": ["b"]}, {"a": "1.safetensors", "b": "2.safetensors"})


def elsewhere(folder: Path) -> None:
    shards(folder, {"1.safetensors": ["a"], "2.safetensors": ["c"]}, {"a": "1.safetensors", "b": "2.safetensors"})


def generation(text: str, name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "generation_config.json").write_text(text)

    write.__name__ = name
    return write


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def cut_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {')


def beyond_the_embedding(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 100}}}))


def broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}")


FAULTS = [
    (remove_weights, "there are no weights"),
    (cut, "is cut: "),
    (cut_header, "its header alone has 500"),
    (index, "model-2.safetensors: is missing"),
    (broken_index, "model.safetensors.index.json: can't be read"),
    (another_name, "there are no weights in the folder under such a name, and weights.safetensors is not looked at"),
    (only_what_is_no_weights, "there are no weights"),
    (pickled_index, "pytorch_model-2.bin: is missing"),
    (twice, "2.safetensors: holds b, which 1.safetensors holds too"),
    (elsewhere, "2.safetensors: has no b, and model.safetensors.index.json finds it there"),
    (generation("{", "cut_generation"), "its generation_config.json can't be read"),
    (generation("[]", "no_generation"), "holds no JSON object"),
    (generation('{"eos_token_id": [2, 100]}', "an_end_beyond"), "the eos_token_id 100, which is no id"),
    (generation('{"eos_token_id": "x"}', "an_end_of_text"), "the eos_token_id 'x', which is no id"),
    (generation('{"eos_token_id": -1}', "a_negative_end"), "the eos_token_id -1, which is no id"),
    (no_tokenizer, "no tokenizer.json"),
    (cut_tokenizer, "its tokenizer.json can't be read"),
    (beyond_the_embedding, "its tokenizer has the id 100 ('b'), and the model embeds the ids 0 to 99"),
    (broken_template, "the chat template is none that can be rendered: line 1: Unexpected end of template"),
]


@pytest.mark.parametrize(("damage", "reason"), FAULTS, ids=[row[0].__name__ for row in FAULTS])
def test_a_folder_that_is_not_whole_is_refused(
    place: Path, problems_of: Problems, sft_plan_of: SftPlans, damage: Callable[[Path], None], reason: str
) -> None:
    damage(place / "model")
    (problem,) = problems_of()
    assert problem.key == f"{MODEL}.path" and reason in problem.reason and problem.remedy
    (problem,) = sft_plan_of().problems
    assert problem.key == "model.path" and reason in problem.reason


def test_what_lies_beside_the_weights_is_not_counted(place: Path, problems_of: Problems) -> None:
    write_weights(place / "model" / "model.safetensors", {"a": 10})
    write_weights(place / "model" / "consolidated.safetensors", {"b": 30})
    assert problems_of() == [] and read_model(place / "model").parameters == 10
    shards(place / "model", {"1.safetensors": ["a"], "2.safetensors": ["b"]}, {"a": "1.safetensors"})
    (place / "model" / "2.safetensors").rename(place / "model" / "consolidated.safetensors")
    assert problems_of() == [] and read_model(place / "model").parameters == 2


def test_so_is_that_of_a_critic_a_teacher_and_a_tokenizer(place: Path, problems_of: Problems) -> None:
    remove_weights(write_model(place / "other", **MODEL_CONFIG))
    gae = ("algorithm.adv_estimator=gae", "critic.enable=true", "critic.model.path=other")
    assert [problem.key for problem in problems_of(*gae)] == ["critic.model.path"]
    taught = ("algorithm.distillation.type=reverse_kl", "actor_rollout_ref.teacher.path=other")
    assert [problem.key for problem in problems_of(*taught)] == ["actor_rollout_ref.teacher.path"]
    generation("{", "cut")(place / "other")
    (problem,) = problems_of(f"{MODEL}.tokenizer_path=other")
    assert problem.key == f"{MODEL}.tokenizer_path" and "its generation_config.json can't be read" in problem.reason
    (place / "other" / "generation_config.json").unlink()
    no_tokenizer(place / "other")
    assert [p.key for p in problems_of(f"{MODEL}.tokenizer_path=other")] == [f"{MODEL}.tokenizer_path"]


def test_pickled_weights_are_left_to_the_loading(place: Path, problems_of: Problems) -> None:
    remove_weights(place / "model")
    (place / "model" / "pytorch_model.bin").write_bytes(b"x")
    assert problems_of() == []


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "is_encoder_decoder": True},
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "qwen2", "architectures": ["Qwen2ForTokenClassification"]},
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_a_model_that_goes_on_with_no_text_is_refused(
    place: Path, problems_of: Problems, sft_plan_of: SftPlans, config: dict[str, object]
) -> None:
    write_model(place / "other", **MODEL_CONFIG, **config)
    (problem,) = problems_of(f"{MODEL}.path=other")
    assert problem.key == f"{MODEL}.path" and "goes on with a text" in problem.reason
    (problem,) = sft_plan_of("model.path=other").problems
    assert problem.key == "model.path" and "goes on with a text" in problem.reason
    critic = problems_of("algorithm.adv_estimator=gae", "critic.enable=true", "critic.model.path=other")
    assert [problem.key for problem in critic] == ([] if config["model_type"] == "qwen2" else ["critic.model.path"])


def test_an_empty_template_is_none(place: Path, problems_of: Problems) -> None:
    (place / "model" / "chat_template.jinja").write_text("")
    (problem,) = problems_of("data.chat=true")
    assert problem.key == "data.chat" and "has no chat template" in problem.reason


def test_so_is_a_broken_one_of_a_new_model(sft_plan_of: SftPlans) -> None:
    new = "model.new={alphabet: 0123456789+=, chat_template: '{% for m in messages %}'}"
    (problem,) = sft_plan_of("model.path=''", new).problems
    assert problem.key == "model.new.chat_template" and "none that can be rendered: line 1" in problem.reason


def test_a_template_may_mark_what_is_generated(place: Path, problems_of: Problems) -> None:
    text = "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    (place / "model" / "chat_template.jinja").write_text(text)
    assert problems_of("data.chat=true") == []


@pytest.fixture
def plain(place: Path) -> Path:
    """The model without a chat template, and rows of messages."""
    (place / "model" / "chat_template.jinja").unlink()
    message = {"role": "user", "content": "1+1="}
    row = {"prompt": [message], "answer": "2", "chosen": [message], "rejected": "3"}
    row["talk"] = [message, {"role": "assistant", "content": "2"}]
    (place / "messages.jsonl").write_text(json.dumps(row) + "\n")
    return place


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("data.chat=true", "data.chat"),
        ("data.train_files=messages.jsonl data.train_batch_size=1", "data.prompt_key"),
        (
            "data.train_files=messages.jsonl data.train_batch_size=1 data.prompt_key=answer "
            "algorithm.policy_loss.type=dpo",
            "data.chosen_key",
        ),
    ],
)
def test_messages_need_a_chat_template(plain: Path, problems_of: Problems, words: str, key: str) -> None:
    (problem,) = problems_of(*words.split())
    assert problem.key == key and "no chat template" in problem.reason and "data.chat_template" in problem.remedy
    (plain / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert problems_of(*words.split()) == []


def test_so_do_conversations_of_fine_tuning(plain: Path, sft_plan_of: SftPlans) -> None:
    talk = ("data.train_files=messages.jsonl", "data.train_batch_size=1", "data.messages_key=talk")
    for words, key in ((talk, "data.messages_key"), (("data.chat=true",), "data.chat")):
        (problem,) = sft_plan_of(*words).problems
        assert problem.key == key and "no chat template" in problem.reason
    mix = ("data.train_files=[]", "data.mix=[{files: train.jsonl}, {files: messages.jsonl, messages_key: talk}]")
    assert [p.key for p in sft_plan_of(*mix).problems] == ["data.mix[1].messages_key"]
    new = "model={new: {alphabet: '0123456789+=', max_position_embeddings: 64}}"
    assert [p.key for p in sft_plan_of(new, "data.chat=true").problems] == ["data.chat"]


def test_a_stop_token_is_a_token(problems_of: Problems) -> None:
    (problem,) = problems_of(f"{ROLLOUT}.stop_token_ids=[3, 100]")
    assert problem.key == f"{ROLLOUT}.stop_token_ids[1]" and "0 to 99" in problem.reason
    assert problems_of(f"{ROLLOUT}.stop_token_ids=[99]") == []


def test_a_model_that_names_no_end_token_is_told(place: Path, plan_of: Plans) -> None:
    def notes(*words: str) -> list[str]:
        return [note for note in plan_of(*words).notes if "end token" in note]

    assert notes() == []
    (place / "model" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    assert len(notes()) == 1
    assert notes(f"{ROLLOUT}.stop_token_ids=[3]") == notes(f"{ROLLOUT}.ignore_eos=true") == []
    (place / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert notes() == []


def test_answers_that_never_end_can_not_all_be_left_out(problems_of: Problems) -> None:
    never = ("algorithm.overlong=mask", f"{ROLLOUT}.ignore_eos=true")
    (problem,) = problems_of(*never)
    assert problem.key == "algorithm.overlong" and "ignore_eos" in problem.reason
    assert problems_of(*never, f"{ROLLOUT}.stop_token_ids=[3]") == []


def test_weights_of_more_layers_than_the_config_has_are_refused(
    place: Path, problems_of: Problems, sft_plan_of: SftPlans
) -> None:
    layers = {f"model.layers.{i}.mlp.up_proj.weight": 4 for i in range(3)}
    beside = {"vision_tower.layers.9.weight": 4, "mtp.layers.7.weight": 4}
    write_weights(place / "model" / "model.safetensors", {**layers, **beside})
    (problem,) = problems_of()
    assert problem.key == f"{MODEL}.path" and problem.remedy
    assert "has 2 layers" in problem.reason and "model.layers.2.mlp.up_proj.weight" in problem.reason
    (problem,) = sft_plan_of().problems
    assert problem.key == "model.path"
    write_weights(place / "model" / "model.safetensors", {**dict(list(layers.items())[:2]), **beside})
    assert problems_of() == []
