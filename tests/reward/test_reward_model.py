"""A tiny reward model in a folder: its scores, alone and in batches, here and in a process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from tandem.base.deadline import Deadline
from tandem.base.errors import DataError
from tandem.columns.proto import DataProto
from tandem.models.tokenizer import character_tokenizer, load_tokenizer
from tandem.reward.process.pool import ScoringPool
from tandem.reward.resolve import resolve
from tandem.reward.scorers.reward_model import RewardModel

TOKENIZER = character_tokenizer("\n0123456789+=<>", eos="\n", pad=None)
CHAT = "{% for m in messages %}{{ '<' if m.role == 'user' else '>' }}{{ m.content }}{% endfor %}\n"


def write_model(folder: Path, labels: int, chat: str | None = None) -> str:
    tokenizer = character_tokenizer("\n0123456789+=<>", eos="\n", pad=None)
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(folder)
    return write_classifier(folder, labels, len(TOKENIZER))


def write_classifier(folder: Path, labels: int, tokens: int) -> str:
    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=labels,
    )
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def read_alone(folder: str, ids: list[int]) -> float:
    """The classifier's own score of ``ids``, without a padding token to look for."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = None
    with torch.inference_mode():
        return float(model(torch.tensor([ids])).logits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("classifier"), 1, CHAT)


def batch(*texts: str, prompts: list[str] | None = None, **columns: Any) -> DataProto:
    rows = [torch.tensor(TOKENIZER.encode(text), dtype=torch.int64) for text in texts]
    named = {"prompt_text": prompts or ["1+1="] * len(texts), **columns}
    return DataProto({"responses": rows}, named, tokenizer=TOKENIZER)


def scores(model: RewardModel, data: DataProto) -> list[float]:
    return [row["score"] for row in model(data)]


def test_scores_do_not_depend_on_the_company(folder: str) -> None:
    texts = ["2", "22", "2222222222", "7", "", "1+1=2"]
    together = scores(RewardModel(path=folder), batch(*texts))
    alone = [scores(RewardModel(path=folder), batch(text))[0] for text in texts]
    pairs = scores(RewardModel(path=folder, batch_size=2), batch(*texts))
    assert together == pytest.approx(alone, abs=1e-5)
    assert pairs == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 4) for score in alone}) == len(texts)
    assert together == scores(RewardModel(path=folder), batch(*texts))


def test_the_score_is_the_models_own(folder: str) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.inference_mode():
        expected = float(model(torch.tensor([TOKENIZER.encode("1+1=2")])).logits)
    assert scores(RewardModel(path=folder), batch("2")) == pytest.approx([expected], abs=1e-5)


def test_a_chat_template_and_the_question_behind_the_prompt(folder: str) -> None:
    model = RewardModel(path=folder, chat_template=True, question="asked")
    infos = [{"asked": "1+1="}, {"asked": [{"role": "user", "content": "1+1="}]}]
    first, second = scores(model, batch("2", "2", prompts=["<<1+1=>>"] * 2, extra_info=infos))
    assert [first, second] == pytest.approx([read_alone(folder, TOKENIZER.encode("<1+1=>2"))] * 2, abs=1e-5)
    with pytest.raises(DataError, match=r"extra_info has no 'asked'.*data\.extra_keys"):
        model(batch("2"))


def test_long_texts_keep_their_end_and_are_counted(folder: str) -> None:
    found = RewardModel(path=folder, max_length=3)(batch("222222", "2", prompts=["777", "7"]))
    whole = RewardModel(path=folder)(batch("222", prompts=[""]))
    assert [row["cut"] for row in found] == [1.0, 0.0]
    assert found[0]["score"] == pytest.approx(whole[0]["score"], abs=1e-5)


def test_several_outputs_need_a_label(tmp_path: Path) -> None:
    path = write_model(tmp_path, 3)
    for label in (None, 3):
        with pytest.raises(DataError, match="has 3 outputs: write label: 0 to 2"):
            RewardModel(path=path, label=label)
    shares = [scores(RewardModel(path=path, label=i), batch("2"))[0] for i in range(3)]
    assert sum(shares) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(DataError, match="no chat template"):
        RewardModel(path=path, label=0, chat_template=True)


def test_a_model_without_a_trained_head_is_refused(folder: str, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    lora = LoraConfig(target_modules=["q_proj"], r=2)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "lm"), lora).save_pretrained(tmp_path / "lora")
    renamed = tmp_path / "renamed"  # a config that says what the weights aren't
    shutil.copytree(tmp_path / "lm", renamed)
    shutil.copy(Path(folder) / "config.json", renamed / "config.json")
    for place, reason in (("lm", "no weights for score.weight"), ("lora", "adapter"), ("renamed", "no weights for")):
        TOKENIZER.save_pretrained(tmp_path / place)
        with pytest.raises(DataError, match=reason):
            RewardModel(path=str(tmp_path / place))


@pytest.mark.usefixtures("warm_python")
def test_in_a_process_of_its_own(folder: str) -> None:
    data = batch("2", "7", "22")
    expected = scores(RewardModel(path=folder), data)
    with ScoringPool(resolve("reward_model", None, {"path": folder}), deadline_s=60.0, tokenizer=TOKENIZER) as pool:
        found = pool.collect(pool.submit(data), Deadline(120))
    assert list(found.rewards) == pytest.approx(expected, abs=1e-5)
    assert found.report()["cut"] == 0.0


# --- the last token, the first token, and one template only ----------------------------------------------------------

ENDS = "<s>{% for m in messages %}[{{ 'I' if m.role == 'user' else '/I' }}]{{ m.content }}{% endfor %}</s>"
POLICY = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


def ending_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """One that begins each text with ``<s>``, ends with ``</s>`` and has nothing else to pad with."""
    special = {"</s>": 0, "<unk>": 1, "<s>": 2}
    vocabulary = special | {character: i for i, character in enumerate("[]/I0123456789+=<>|asitnuer", start=3)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", bos_token="<s>", unk_token="<unk>")
    made.chat_template = ENDS
    made.save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ending")
    return write_classifier(folder, 1, len(ending_tokenizer(folder)))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows that reward models read, before padding."""
    rows: list[list[int]] = []
    read = RewardModel._read
    monkeypatch.setattr(RewardModel, "_read", lambda self, given: rows.extend(given) or read(self, given))
    return rows


def asked(*answers: str, folder: str, policy: str = "", **columns: Any) -> DataProto:
    tokenizer = load_tokenizer(folder, chat_template=policy)
    rows = [torch.tensor(tokenizer.encode(answer, add_special_tokens=False)) for answer in answers]
    return DataProto({"responses": rows}, columns, tokenizer=tokenizer)


def test_the_head_is_read_at_the_last_token_though_the_model_pads_with_it(ending: str, seen: list[list[int]]) -> None:
    answers = ("7", "77", "1+1=2")
    found = scores(
        RewardModel(path=ending, chat_template=True),
        asked(*answers, folder=ending, messages=[[{"role": "user", "content": "7>"}]] * 3),
    )
    tokenizer = load_tokenizer(ending)
    texts = {tokenizer.decode(row): row for row in seen}
    assert [*texts] == [f"<s>[I]7>[/I]{answer}</s>" for answer in answers]
    assert found == pytest.approx([read_alone(ending, row) for row in texts.values()], abs=1e-5)
    assert found != pytest.approx([read_alone(ending, row[:-1]) for row in texts.values()], abs=1e-3)


def test_also_where_the_rows_have_every_token_there_is(ending: str) -> None:
    tokenizer = load_tokenizer(ending)
    every = tokenizer.decode([*range(3, len(tokenizer))])
    data = asked(every, "1", folder=ending, prompt_text=["<unk></s>", "2"])
    expected = [read_alone(ending, tokenizer.encode(text)) for text in ("<unk></s>" + every, "21")]
    assert scores(RewardModel(path=ending), data) == pytest.approx(expected, abs=1e-5)


def test_one_begin_token_whatever_was_rendered_before(ending: str, seen: list[list[int]]) -> None:
    prompts = ["<s>[I]7>[/I]", "[I]7>[/I]"]
    scores(RewardModel(path=ending), asked("7", "7", folder=ending, prompt_text=prompts))
    assert [row.count(2) for row in seen] == [1, 1]
    assert seen[0] == seen[1]


def test_a_prompt_is_in_one_template_only(ending: str, seen: list[list[int]]) -> None:
    model = RewardModel(path=ending, chat_template=True)
    rendered, talk = "<s><|user|>7><|assistant|>", [{"role": "user", "content": "7>"}]
    scores(model, asked("7", folder=ending, prompt_text=[rendered], messages=[talk]))
    assert load_tokenizer(ending).decode(seen[0]) == "<s>[I]7>[/I]7</s>"  # its own template, of the messages
    for text in (rendered, "[I]7>[/I]"):
        with pytest.raises(DataError, match=r"a chat template was applied to it already.*question"):
            model(asked("7", folder=ending, prompt_text=[text]))
    with pytest.raises(DataError, match=r"begins with '<\|user\|>'"):  # of the policy's template
        model(asked("7", folder=ending, policy=POLICY, prompt_text=["<|user|>7><|assistant|>"]))


def test_a_long_text_keeps_its_begin_token(ending: str, seen: list[list[int]]) -> None:
    scores(RewardModel(path=ending, max_length=4), asked("123456", folder=ending, prompt_text=["7>"]))
    assert load_tokenizer(ending).decode(seen[0]) == "<s>456"
