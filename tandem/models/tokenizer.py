"""Tokenizers: loading, padding rules, exact encoding, and a character tokenizer for small models.

A folder's ``tokenizer.json`` is the authority on what a text becomes. Text is encoded here once; from then on
ids travel.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.errors import DataError, TandemError
from tandem.base.lazy import LazyModule
from tandem.models.folder.described import fault_of_generation
from tandem.models.folder.hub import where_from

if TYPE_CHECKING:
    import tokenizers
    import transformers
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
else:
    tokenizers = LazyModule("tokenizers")
    transformers = LazyModule("transformers")

# Classes that add nothing to tokenizer.json. AutoTokenizer replaces them by the class usual for the model type of
# config.json (Qwen2Tokenizer and others), which splits text its own way: a folder that names one is loaded as it says.
PLAIN_CLASSES = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})


_PROBE = "a probe"
_SHORTEST_MARK = 3  # characters; a shorter special token may be an ordinary character of a small alphabet


def load_tokenizer(
    path: str | Path, *, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local folder or of a hub id, ready to encode and decode exactly.

    A tokenizer without a pad token pads with its end token; no token is ever added. ``chat_template`` replaces the
    folder's own. ``trust_remote_code`` says whether code that it ships is run; nobody is asked. Raises ``TandemError``
    if there is no such folder, none in it, or neither a pad nor an end token.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        tokenizer = _from_folder(folder, trust_remote_code)
    elif folder.exists():
        raise TandemError(f"tokenizer {path}: is a file. Name the folder that holds tokenizer.json")
    elif _looks_local(str(path)):
        raise TandemError(
            f"tokenizer {path}: no such folder. Name a folder written by save_pretrained (it holds tokenizer.json), "
            "or a hub id like 'Qwen/Qwen3-0.6B'"
        )
    else:
        tokenizer = _from_hub(str(path), trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.clean_up_tokenization_spaces = False
    return with_padding(tokenizer)


def with_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Let ``tokenizer`` pad with its end token if it has no pad token; the vocabulary stays as it is."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise TandemError(
                f"tokenizer {tokenizer.name_or_path!r} has neither a pad nor an end token: set eos_token to one of "
                "its tokens in tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Raise ``TandemError`` if a token has an id beyond the ``rows`` of the model's embedding (more rows are fine)."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= rows:
        raise TandemError(
            f"tokenizer {tokenizer.name_or_path!r}: token {token!r} has id {largest}, but the model embeds only {rows} "
            "tokens. Use the tokenizer that the model was saved with, or resize the model's embedding and save it"
        )


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of ``text`` as it stands: nothing is added, nothing is cut.

    Raises ``DataError`` where ids could not stand for the text: half of a surrogate pair, or characters that the
    vocabulary lacks.
    """
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError(
            "the text holds half of a surrogate pair (\\ud800-\\udfff), which is no character: write it whole"
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown in ids and str(tokenizer.unk_token) not in text:
        strange = sorted({c for c in text if unknown in tokenizer(c, add_special_tokens=False)["input_ids"]})
        raise DataError(f"the tokenizer has no token for {', '.join(map(repr, strange)) or 'a part of the text'}")
    return ids


def decode_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of ``ids``, exactly: special tokens are shown, no space is added or taken."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what a plain prompt starts with: the begin token where the tokenizer puts one, else nothing.

    An end token that some tokenizers append is left out: a prompt goes on.
    """
    return [*_leading_ids(tokenizer, tokenizer.bos_token_id, getattr(tokenizer, "add_bos_token", None))]


@functools.lru_cache(maxsize=8)
def _leading_ids(tokenizer: PreTrainedTokenizerBase, begin: int | None, put: bool | None) -> tuple[int, ...]:
    """Ask once for each setting, for asking takes as long as encoding a short text does."""
    around: list[int] = tokenizer("", verbose=False)["input_ids"]
    return (around[0],) if around and around[0] == begin else ()


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a plain text that begins a sequence: the begin token where the tokenizer puts one, then the
    text.

    There is one begin token where the text has it written out already, as one that a template rendered does.
    """
    leading, ids = leading_ids(tokenizer), encode_text(tokenizer, text)
    return ids if leading and ids[: len(leading)] == leading else leading + ids


def encode_once(tokenizer: PreTrainedTokenizerBase, text: str, *, rendered: bool = False) -> list[int]:
    """Return the ids of ``text`` as its model was trained to read it, with what the tokenizer puts around a text.

    Nothing is put around one that a chat template ``rendered``. There is never more than one begin token.
    """
    ids: list[int] = list(tokenizer.encode(text, add_special_tokens=not rendered))
    return ids[1:] if begins(tokenizer, ids) and ids[1:2] == ids[:1] else ids


def end_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's end token, and those of the generation config beside it.

    Raises ``DataError`` for a generation config that can't be read: its end tokens would be lost.
    """
    return _end_ids(tokenizer, tokenizer.eos_token_id)


@functools.lru_cache(maxsize=8)
def _end_ids(tokenizer: PreTrainedTokenizerBase, own: int | None) -> frozenset[int]:
    name = tokenizer.name_or_path
    file: Any = Path(name) / "generation_config.json" if name else None  # without a name it was made, not loaded
    if name and not Path(name).is_dir():
        from transformers.utils.hub import cached_file

        try:
            file = cached_file(name, file.name, local_files_only=True)
        except OSError:  # it has none
            file = None
    place = None if file is None else Path(file)
    if place is None or not place.is_file():
        configured = None
    elif (fault := fault_of_generation(place.parent, ids=False)) is not None:
        raise DataError(f"tokenizer {name!r}: {fault}. Mend the file, or remove it: a model need not have one")
    else:
        configured = json.loads(place.read_text("utf-8")).get("eos_token_id")
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (own, *listed) if isinstance(token, int))


def begins(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
    """Return how many of ``ids`` are the begin token that a cut from the left must keep: 1 or 0."""
    return int(tokenizer.bos_token_id is not None and list(ids[:1]) == [tokenizer.bos_token_id])


def rendered_opening(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """Return what shows that ``text`` was rendered beforehand: a special token, or the template's own words, at its
    start.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()  # of the user's tokenizer
    marks = [*tokenizer.all_special_tokens, *(token.content for token in added if token.special)]
    marks.append(_user_opening(tokenizer, str(tokenizer.chat_template)))
    begun = text.lstrip()
    return next((mark for mark in marks if len(mark) >= _SHORTEST_MARK and begun.startswith(mark)), None)


@functools.lru_cache(maxsize=8)
def _user_opening(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return what the template writes before the text of a user; empty if there is no telling."""
    if not tokenizer.chat_template:
        return ""
    try:
        probe = [{"role": "user", "content": _PROBE}]
        opening = str(tokenizer.apply_chat_template(probe, tokenize=False)).partition(_PROBE)[0]
        return opening.removeprefix(str(tokenizer.bos_token or "")).strip()
    except Exception:  # a template is foreign code: it raises what it likes
        return ""


def character_tokenizer(
    alphabet: Iterable[str], *, eos: str = "<eos>", pad: str | None = "<pad>", unk: str = "<unk>"
) -> PreTrainedTokenizerFast:
    """Return a real tokenizer with one token per character of ``alphabet``, spaces and newlines included; decoding is
    exact.

    Ids: ``pad``, ``eos``, ``unk``, then the alphabet in order. ``eos`` and ``pad`` may be characters of the alphabet;
    ``pad=None`` pads with ``eos``. A character outside the alphabet becomes ``unk``, which ``encode_text`` refuses.
    """
    characters = list(alphabet)
    wrong = [c for c in characters if len(c) != 1]
    if wrong or len(set(characters)) != len(characters):
        twice = sorted({c for c in characters if characters.count(c) > 1})
        raise TandemError(f"alphabet: each entry is one character, once; not so {wrong or twice!r}")
    special = [token for token in dict.fromkeys((pad, eos, unk)) if token is not None and token not in characters]
    vocabulary = {token: i for i, token in enumerate([*special, *characters])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=unk))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    wrap: type[Any] = transformers.PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = wrap(
        tokenizer_object=core,
        eos_token=eos,
        pad_token=eos if pad is None else pad,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    return tokenizer


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).parent.is_dir()


def _from_folder(folder: Path, trust_remote_code: bool) -> Any:
    config, exact = folder / "tokenizer_config.json", folder / "tokenizer.json"
    try:
        declared = json.loads(config.read_text("utf-8")) if config.exists() else {}
        if exact.exists() and declared.get("tokenizer_class") in PLAIN_CLASSES:
            return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        held = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        raise TandemError(
            f"tokenizer {folder}: can't be loaded ({error}). The folder holds {held}; it needs a tokenizer.json as "
            "tokenizer.save_pretrained writes it"
        ) from error


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Keep back what the hub's client logs of each try, four lines at a time: what comes of them is raised."""
    tries = logging.getLogger("huggingface_hub.utils._http")
    before = tries.level
    tries.setLevel(logging.ERROR)
    try:
        yield
    finally:
        tries.setLevel(before)


def _from_hub(name: str, trust_remote_code: bool) -> Any:
    try:
        with _quiet_hub():
            more = where_from(name)
            return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **more)
    except (OSError, ValueError) as error:
        raise TandemError(
            f"tokenizer {name!r}: no such folder, and the hub gave none ({str(error).splitlines()[0]}). "
            "Download the model and name its folder, or check the id"
        ) from error
