"""A tokenizer, and chat templates in the manner of four families: how each shows calls, results and ends of turns."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    """A ``template``, the token that ends a turn, and a ``call`` of the tool ``add`` with x = 1 as it is written."""

    name: str
    template: str
    end: str
    call: str


_CHATML = (
    "{% if tools %}<|im_start|>system\ntools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HEADERS = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' and m.tool_calls %}"
    "{% set f = m.tool_calls[0].function %}{{ {'name': f.name, 'parameters': f.arguments} | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}{# <|python_tag|> #}"
)
_BRACKETS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
_TURNS = (
    "{{ bos_token }}{% if tools %}<|turn|>system {{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }} "
    "{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{{ ', ' if not loop.last }}{% endfor %})"
    "{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant {% endif %}"
)

FAMILIES = (
    Family("hermes", _CHATML, "<|im_end|>", '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'),
    Family("llama3", _HEADERS, "<|eot_id|>", '{"name": "add", "parameters": {"x": 1}}'),
    Family("mistral", _BRACKETS, "</s>", '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1}, "id": "000100000"}]'),
    Family("pythonic", _TURNS, "<|end|>", "[add(x=1)]"),
)

_SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|turn|>",
    "<|end|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
_MERGED = ("the", "answer", "is", "tool", "name", "add", "arguments", "12", "user", "assistant", '": ', "}}")


def tokenizer(family: Family) -> Any:
    """A tokenizer that joins some characters to longer tokens, so that equal texts have several spellings in ids."""
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, "<unk>", *string.printable, *_MERGED])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words = "|".join(sorted((word.replace("}", r"\}") for word in _MERGED), key=len, reverse=True))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{words}|[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token=family.end, unk_token="<unk>", pad_token=family.end
    )
    made.chat_template = family.template
    return made
