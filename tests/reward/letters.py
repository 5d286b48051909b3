"""A tokenizer of letters that another process can unpickle."""

from __future__ import annotations


class LetterTokenizer:
    """Token = code point."""

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        return "".join(chr(int(i)) for i in ids)
