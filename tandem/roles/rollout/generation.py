"""Between prompts and tokens: requests for a rollout engine, and its answers as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tandem.base.errors import ContractError
from tandem.base.seeding import derive_seed
from tandem.columns.images import IMAGES
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.model import RolloutConfig
from tandem.config.schema import EvaluationConfig
from tandem.data.chat import checked_messages, encode_chat_prompt
from tandem.data.prompts import Prompt
from tandem.models.token_ids import TokenIds
from tandem.models.tokenizer import encode_plain
from tandem.rollout.protocol import GroupOutput, GroupRequest, Sampling
from tandem.stages.facts import PROMPT_ROUTES, ROUTES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end an answer: the tokenizer's end token and those of the model's generation config."""
    configured: Any = getattr(model.generation_config, "eos_token_id", None)  # a model need not have such a config
    listed = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None}))


def training_sampling(
    rollout: RolloutConfig,
    max_tokens: int,
    ends: Iterable[int],
    *,
    baseline: bool = False,
    vocabulary: int | None = None,
    routes: int = 0,
) -> Sampling:
    """Return how training samples are drawn; ``ends`` are the model's own end tokens; see ``Sampling`` for
    ``baseline``, ``vocabulary`` and ``routes``.
    """
    stops = {*rollout.stop_token_ids} if rollout.ignore_eos else {*ends, *rollout.stop_token_ids}
    return Sampling(
        n=rollout.n,
        max_tokens=max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        baseline=baseline,
        logprobs_of=rollout.logprobs_of,
        stop_token_ids=tuple(sorted(stops)),
        vocabulary=vocabulary,
        routes=routes,
    )


def evaluation_sampling(evaluation: EvaluationConfig, training: Sampling) -> Sampling:
    """Return how answers to held-out prompts are drawn: greedy at temperature 0."""
    greedy = evaluation.temperature == 0
    return Sampling(
        n=evaluation.n,
        max_tokens=training.max_tokens,
        temperature=1.0 if greedy else evaluation.temperature,
        top_p=evaluation.top_p,
        greedy=greedy,
        logprobs_of="either",
        stop_token_ids=training.stop_token_ids,
        vocabulary=training.vocabulary,
    )


def request(key: int | str, prompt: Prompt, count: int, *origin: int | str) -> GroupRequest:
    """Return a request for ``count`` samples, whose random streams depend on ``origin``, the prompt and their index
    only.
    """
    seeds = tuple(derive_seed(*origin, prompt.uid, index) for index in range(count))
    shown = None if prompt.shown is None else prompt.shown.patches()
    return GroupRequest(key, torch.tensor(prompt.prompt_ids, dtype=torch.int64), seeds, images=shown)


def as_batch(prompt: Prompt, output: GroupOutput, group_id: int, tokenizer: Any) -> DataProto:
    """Return the n samples of one finished group as columns."""
    samples, count = output.samples, len(output.samples)
    responses = Ragged.from_rows([sample.token_ids for sample in samples])
    prompt_ids = output.request.prompt_ids
    return DataProto(
        {
            "prompts": Ragged.from_lengths(prompt_ids.repeat(count), [len(prompt_ids)] * count),
            "responses": responses,
            "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
            "rollout_logprobs": responses.like(torch.cat([sample.logprobs for sample in samples])),
            "token_versions": responses.like(torch.cat([sample.versions for sample in samples])),
            "group_ids": torch.full((count,), group_id, dtype=torch.int64),
            "sample_index": torch.arange(count),
            "truncated": torch.tensor([sample.finish_reason == "length" for sample in samples]),
            **_routes(output),
        },
        {
            "uid": [prompt.uid] * count,
            "prompt_text": [prompt.text] * count,
            "ground_truth": [prompt.ground_truth] * count,
            "data_source": [prompt.data_source] * count,
            "extra_info": [prompt.extra_info] * count,
            "messages": [prompt.messages] * count,
            **({} if prompt.shown is None else {IMAGES: [output.request.images] * count}),
        },
        tokenizer=tokenizer,
    )


def _routes(output: GroupOutput) -> dict[str, Ragged]:
    """Return the columns of recorded routes, if any."""
    given, count = output.prompt_routes, len(output.samples)
    if given is None:
        return {}
    rows = [sample.routes for sample in output.samples if sample.routes is not None]
    prompts = Ragged.from_lengths(given.repeat(count, 1), [len(given)] * count)
    return {PROMPT_ROUTES: prompts, ROUTES: Ragged.from_rows(rows)}


def as_prompts(prompts: Iterable[object], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return whatever a loop of the user's holds as prompts: ``Prompt``, text, chat messages, or token ids.

    Raises ``ContractError`` naming the position of one that is none of these, or where there is none at all.
    """
    if isinstance(prompts, str):
        raise ContractError(f"prompts is the text {prompts!r}: give a list of prompts, such as [{prompts!r}]")
    found = [_as_prompt(i, prompt, tokenizer) for i, prompt in enumerate(prompts)]
    if not found:
        raise ContractError("there are no prompts: give at least one")
    return found


def _as_prompt(index: int, prompt: object, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt, tuple(encode_plain(tokenizer, prompt)), prompt)
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and prompt and all(isinstance(token, int) for token in prompt):
        known = TokenIds.of(tokenizer)
        if outside := [token for token in prompt if token not in known]:
            raise ContractError(f"prompt {index} holds the token id {outside[0]}: the tokenizer knows {known}")
        text = str(tokenizer.decode(list(prompt)))
        return Prompt(text, tuple(prompt), text)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(turn, dict) for turn in prompt):
        messages = checked_messages(prompt)
        text, ids = encode_chat_prompt(tokenizer, messages)
        return Prompt(text, tuple(ids), text, messages=tuple(messages))
    raise ContractError(
        f"prompt {index} is {prompt!r}: give text, a list of chat messages, token ids, or what a prompt source draws"
    )
