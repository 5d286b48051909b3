"""What a run has trained, or any model, put to use: the config by which it answers, and a desk at which it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.base.errors import DataError
from tandem.base.run_folder import CONFIG_FILE, FINAL_FOLDER
from tandem.config.load import load_config, load_words
from tandem.config.schema import Config
from tandem.episodes.parsers import format_of
from tandem.models.adapter_spec import CONFIG as ADAPTER_CONFIG
from tandem.models.adapter_spec import AdapterSpec
from tandem.models.loading import load_causal_lm
from tandem.models.token_ids import TokenIds
from tandem.models.tokenizer import end_ids
from tandem.roles.rollout.desk import Desk
from tandem.roles.rollout.generation import training_sampling
from tandem.rollout.hf import HfEngine
from tandem.runtime.build.composite import model_tokenizer
from tandem.runtime.build.engine_specs import run_device

_MOST_TOKENS = 1 << 15
"""Of an answer, where neither the request nor the model says."""


@dataclass(frozen=True)
class Served:
    """A model at a desk. ``sampling``: the temperature and top_p that answers are drawn with."""

    desk: Desk
    name: str
    chats: bool
    sampling: dict[str, float]


@contextmanager
def model_at_desk(source: str, words: Sequence[str]) -> Iterator[Served]:
    """Load the model of a run's folder, or of a model's, and let it answer for as long as the block runs.

    Answers are drawn as the run drew them; of a model without a run, from its own distribution. ``words`` change the
    config. Raises ``TandemError``.
    """
    config = config_of(source, words)
    section = config.actor_rollout_ref
    tokenizer = model_tokenizer(section.model, config.data)
    tokens = TokenIds.of(tokenizer)
    path, trusted = section.model.path, section.model.trust_remote_code
    adapter = AdapterSpec.of(section.model, 0)
    model = load_causal_lm(path, dtype=section.model.dtype, trust_remote_code=trusted, adapter=adapter, tokens=tokens)
    model.to(run_device(config.runtime))
    context = _MOST_TOKENS if model.context is None else model.context.tokens
    drawn = section.rollout.model_copy(update={"n": 1})
    sampling = training_sampling(drawn, min(context, _MOST_TOKENS), end_ids(tokenizer))
    template = str(tokenizer.chat_template or "")
    given = section.rollout.episode.tool_format
    desk = Desk(
        HfEngine(model, max_num_seqs=section.rollout.max_num_seqs),
        sampling,
        tokenizer,
        tool_format=format_of(template) if given == "auto" else given,
        context=context,
    )
    with closing(desk):
        drawn_with = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        yield Served(desk, Path(source).name, bool(template), drawn_with)


def config_of(source: str, words: Sequence[str]) -> Config:
    """Return the config by which ``source`` answers: its run's, from what it trained, or one of defaults."""
    folder, model = Path(source), "actor_rollout_ref.model"
    file, final = folder / CONFIG_FILE, folder / FINAL_FOLDER
    if not file.is_file():
        return load_words([f"{model}.path={source}", *words], Config)
    if not final.is_dir():
        raise DataError(
            f"{source} holds no {FINAL_FOLDER} yet: export a checkpoint of it (tandem export), and name that"
        )
    config = load_config(file, [])
    if isinstance(config, Config):
        return load_config(file, [*trained(folder), *words], kind=Config)
    base = config.model
    where = [f"{model}.path={final}"]
    if (final / ADAPTER_CONFIG).is_file():
        where = [f"{model}.path={base.path}", f"{model}.adapter_path={final}"]
    same = [f"{model}.dtype={base.dtype}", f"{model}.trust_remote_code={base.trust_remote_code}"]
    return load_words([*where, *same, *words], Config)


def trained(run: Path, final: Path | None = None) -> tuple[str, ...]:
    """Return the changes to the config of a finished ``run`` that make it start from what it trained.

    ``final`` is another folder with a model of it, or with an adapter, than that of its end.
    """
    final, model = run / FINAL_FOLDER if final is None else final, "actor_rollout_ref.model"
    always = (f"{model}.lora_rank=0", "trainer.export=merged", "trainer.resume=null")
    if (final / ADAPTER_CONFIG).is_file():
        return f"{model}.adapter_path={final}", *always
    plain = (
        f"{model}.adapter_path=null",
        f"{model}.lora_target_modules=all-linear",
        f"{model}.lora_base_dtype=float32",
    )
    return f"{model}.path={final}", *plain, "execution.weight_sync.lora=null", *always
