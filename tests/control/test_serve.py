"""A finished model at an OpenAI-compatible address, and in the terminal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.base.errors import DataError
from tandem.control.serve import run_chat
from tandem.episodes.address.server import LOOPBACK, Address, Seat, listening, serve
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer
from tandem.runtime.build.finished import config_of, model_at_desk

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
TALK: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that can chat."""
    tokenizer = character_tokenizer("\nabcdefghijklmnopqrstuvwxyz ", eos="\n", pad=None)
    tokenizer.chat_template = TEMPLATE
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    shape = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    folder = tmp_path_factory.mktemp("served") / "tiny"
    save_pretrained_atomic(
        new_model({**shape, **heads, **ids, "vocab_size": len(tokenizer)}, seed=0), tokenizer, folder
    )
    return folder


def test_many_clients_are_answered_at_once_and_equal_seeds_alike(model: Path) -> None:
    async def talk(served: Any) -> Any:
        address, at = Address(served.sampling, served.name), listening()
        server, task = serve(address, at)
        with address.seated(Seat(served.desk.ask, parallel=8), "secret") as key:
            url = f"http://{LOOPBACK}:{at.getsockname()[1]}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                chat = client.chat.completions.create
                found = await asyncio.gather(
                    *(chat(model="tiny", messages=TALK, seed=seed, max_tokens=9) for seed in (1, 2, 1)),
                    chat(model="tiny", messages=TALK, n=2, max_tokens=5, logprobs=True),
                )
                text = await client.completions.create(model="tiny", prompt="hello", seed=1, max_tokens=9)
                stream = await chat(model="tiny", messages=TALK, seed=1, max_tokens=9, stream=True)
                parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
                with pytest.raises(openai.BadRequestError, match="it may have 64"):
                    await client.completions.create(model="tiny", prompt="a" * 70)
        server.should_exit = True
        await task
        return found, text, parts

    with model_at_desk(str(model), []) as served:
        (first, other, again, two), text, parts = asyncio.run(talk(served))
    said = [answer.choices[0].message.content for answer in (first, other, again)]
    assert said[0] == said[2] != said[1]
    assert text.choices[0].text == said[0]  # this template adds nothing to a user's words
    assert "".join(parts) == said[0] and len([part for part in parts if part]) == len(said[0]) > 1
    assert len(two.choices) == 2 and two.usage.completion_tokens == sum(
        len(choice.logprobs.content) for choice in two.choices
    )


def test_a_talk_goes_on_until_it_begins_anew(model: Path) -> None:
    said: list[str] = []
    with pytest.raises(DataError, match="it may have 64"):
        run_chat(str(model), [], said.append, lines=["a" * 30, "", "b" * 40, "c" * 40])
    assert said[1] == "(anew)" and len(said) == 3


@pytest.mark.parametrize("tuned", [False, True], ids=["trained", "fine-tuned"])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_runs_folder_answers_with_what_it_trained_as_it_drew(tmp_path: Path, tuned: bool, adapters: bool) -> None:
    rollout = "" if tuned else "  rollout: {temperature: 0.5}\n"
    section = "model: {path: base, dtype: bfloat16}\n"
    (tmp_path / "config.yaml").write_text(
        f"{section}data: {{train_files: [a.jsonl]}}\n" if tuned else f"actor_rollout_ref:\n  {section}{rollout}"
    )
    final = tmp_path / "final"
    final.mkdir()
    if adapters:
        (final / "adapter_config.json").write_text("{}")
    found = config_of(str(tmp_path), ["actor_rollout_ref.rollout.top_p=0.9"]).actor_rollout_ref
    where = (found.model.path, found.model.adapter_path)
    assert where == (("base", str(final)) if adapters else (str(final), None))
    assert (found.rollout.temperature, found.rollout.top_p) == (1.0 if tuned else 0.5, 0.9)
    assert found.model.dtype == "bfloat16"


def test_a_run_without_a_model_yet_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(DataError, match="holds no final yet"), model_at_desk(str(tmp_path), []):
        pass
