"""A reward model: a sequence classifier that reads prompt and answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from tandem.base.errors import DataError
from tandem.base.lazy import LazyModule
from tandem.models.tokenizer import begins, encode_once, load_tokenizer, rendered_opening
from tandem.models.tool_calls import fit_calls
from tandem.reward.outcome import Sample
from tandem.reward.ranges import Count, Whole
from tandem.reward.registry import register_reward
from tandem.reward.samples import samples_of

if TYPE_CHECKING:
    import torch
    import transformers

    from tandem.columns.proto import DataProto
else:
    torch = LazyModule("torch")
    transformers = LazyModule("transformers")


@register_reward("reward_model", packages=("torch", "transformers"))
class RewardModel:
    """The score of a sequence classifier (``AutoModelForSequenceClassification``) for prompt and answer.

    ``path`` is a Hugging Face folder or a hub id of a model whose head is trained (``DataError`` if it has none); the
    model's own tokenizer reads the text. One output: the score is its value. Several: the probability of the one with
    number ``label``. At most ``batch_size`` texts are read at a time, on ``device``; of a longer text the last
    ``max_length`` tokens count, and the metric ``cut`` says so.

    ``chat_template`` puts prompt and answer into the model's own template: the messages that the policy's prompt was
    rendered from, or a plain prompt as a user's. Otherwise both are joined as the policy sees them. ``question`` names
    the field of ``extra_info`` (see ``data.extra_keys``) to take for the prompt instead, a text or a list of messages.
    The head is read at the last token of the text, whatever it is. Deterministic: no dropout, no gradients.
    """

    def __init__(
        self,
        *,
        path: str,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        batch_size: Count = 8,
        max_length: Count = 4096,
        label: Whole | None = None,
        chat_template: bool = False,
        question: str | None = None,
    ) -> None:
        self._tokenizer = load_tokenizer(path)
        if chat_template and not self._tokenizer.chat_template:
            raise DataError(f"the tokenizer of {path} has no chat template: write chat_template: false")
        self._model: Any = _trained(path, getattr(torch, dtype))
        outputs = int(self._model.config.num_labels)
        if outputs > 1 and (label is None or not 0 <= label < outputs):
            raise DataError(f"the reward model {path} has {outputs} outputs: write label: 0 to {outputs - 1}")
        self._model.to(device).eval()
        self._label = label if outputs > 1 else None
        self._batch_size, self._max_length = batch_size, max_length
        self._chat, self._question = chat_template, question

    def __call__(self, data: DataProto) -> list[dict[str, float]]:
        """Return one score per sample, whatever it shares a batch with."""
        rows = [self._encoded(sample, data.tokenizer) for sample in samples_of(data)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # so that little is padding
        scores: list[dict[str, float]] = [{}] * len(rows)
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            for i, score in zip(chosen, self._read([self._cut(rows[i]) for i in chosen]), strict=True):
                scores[i] = {"score": score, "cut": float(len(rows[i]) > self._max_length)}
        return scores

    def _cut(self, row: list[int]) -> list[int]:
        """Return the last ``max_length`` tokens, the begin token before them kept."""
        if len(row) <= self._max_length:
            return row
        kept = begins(self._tokenizer, row) if self._max_length > 1 else 0
        return [*row[:kept], *row[len(row) - self._max_length + kept :]]

    def _read(self, rows: Sequence[list[int]]) -> list[float]:
        """Return the scores of ``rows``, each read at its last token.

        A classifier looks for the last token that is not its padding token, by the ids: one that ends its texts with
        what it pads with would be read before that end. So rows are padded with a token that none of them has.
        """
        own, used = self._tokenizer.pad_token_id, {token for row in rows for token in row}
        if own not in used:
            return self._forward(rows, own)
        unused = next((token for token in range(len(self._tokenizer)) if token not in used), None)
        if unused is not None:
            return self._forward(rows, unused)
        return [score for row in rows for score in self._forward([row], None)]

    def _forward(self, rows: Sequence[list[int]], padding: int | None) -> list[float]:
        longest = max(1, *map(len, rows)) if len(rows) > 1 else max(1, len(rows[0]))
        ids = torch.full((len(rows), longest), padding or 0)  # (B, T), padded on the right
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, dtype=ids.dtype)
            mask[i, : len(row)] = 1
        config = self._model.config
        config.pad_token_id = config.get_text_config().pad_token_id = padding
        with torch.inference_mode():
            device = self._model.device
            logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()  # (B, labels)
        chosen = logits[:, 0] if self._label is None else logits.softmax(dim=-1)[:, self._label]
        values: list[float] = chosen.tolist()
        return values

    def _encoded(self, sample: Sample, policy: Any) -> list[int]:
        asked: Any = sample.prompt
        if self._question is not None:
            if self._question not in (sample.extra_info or {}):
                raise DataError(f"extra_info has no {self._question!r}: name its column in data.extra_keys")
            asked = sample.extra_info[self._question]  # type: ignore[index]
        elif self._chat and sample.messages is not None:
            asked = sample.messages
        if self._chat:
            return self._conversation(asked, sample.response, policy)
        text = asked if isinstance(asked, str) else "\n".join(str(message["content"]) for message in asked)
        return encode_once(self._tokenizer, text + sample.response)

    def _conversation(self, asked: Any, response: str, policy: Any) -> list[int]:
        """Return prompt and answer in the model's own template. Raises ``DataError`` where the prompt is in one
        already.
        """
        if isinstance(asked, str):
            openings = (rendered_opening(tokenizer, asked) for tokenizer in (self._tokenizer, policy))
            if opening := next((found for found in openings if found is not None), None):
                raise DataError(
                    f"the prompt begins with {opening!r}, so a chat template was applied to it already, and "
                    "chat_template: true would put it into another: name the column of the bare question as question, "
                    "or write chat_template: false"
                )
            asked = [{"role": "user", "content": asked}]
        messages = fit_calls(self._tokenizer, [*asked, {"role": "assistant", "content": response}])
        return encode_once(
            self._tokenizer, str(self._tokenizer.apply_chat_template(messages, tokenize=False)), rendered=True
        )


def _trained(path: str, dtype: torch.dtype) -> Any:
    """Return the classifier with all of its weights. Raises ``DataError`` where some would be drawn at random."""
    model, found = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=dtype, output_loading_info=True, trust_remote_code=False
    )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise DataError(f"{path} is an adapter: merge it with its model, and write the folder of the whole classifier")
    missing = sorted(found["missing_keys"])
    if missing:
        names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise DataError(
            f"{path} is no trained classifier: it has no weights for {names}, which would be drawn at random. Write "
            "the folder of a model that was trained as AutoModelForSequenceClassification"
        )
    if surplus := sorted(found["unexpected_keys"]):
        raise DataError(
            f"{path} has {len(surplus)} weights that its config.json has no place for, {surplus[0]} among them: write "
            "a config.json that fits them, or save the classifier again"
        )
    return model
