"""A tiny model that can chat, and the runs of it whose samples are episodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer
from tests.e2e.seven import SHAPE, write_rows

EPISODE = "actor_rollout_ref.rollout.episode"
PLAYS = Path(__file__).parent / "plays.py"
TALK = (f"{EPISODE}={{type: talk, file: {PLAYS}, turns: 2}}",)
MODES = {
    "colocate": (),
    "hybrid": ("execution.mode=hybrid", "execution.max_staleness=0", "execution.num_iters_per_train_update=2"),
    "fully_async": ("execution.mode=fully_async", "execution.max_staleness=0"),
}
TEMPLATE = (
    "{% for m in messages %}{{ '<' if m.role == 'user' else '=' if m.role == 'tool' else '' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}{# tools #}"
)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can chat, and the config of a run."""
    folder = tmp_path_factory.mktemp("talks")
    torch.set_num_threads(1)
    tokenizer = character_tokenizer("\n0123456789<=[]()adxy,", eos="\n", pad=None)
    tokenizer.chat_template = TEMPLATE
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = new_model({**SHAPE, **ids, "vocab_size": len(tokenizer)}, seed=0)
    save_pretrained_atomic(model, tokenizer, folder / "model")
    rows = [{"prompt": str(d), "answer": str(d), "fate": "raises" if d == 3 else "well"} for d in range(10)]
    write_rows(folder / "train.jsonl", rows)
    tree = {
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {"optim": {"lr": 3.0e-3}},
            "rollout": {"n": 4},
        },
        "algorithm": {"old_logprobs": "recompute"},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "train_batch_size": 8,
            "max_prompt_length": 8,
            "max_response_length": 40,
            "chat": True,
            "extra_keys": ["fate"],
        },
        "trainer": {"total_steps": 3, "output_dir": str(folder / "out"), "logger": []},
        "runtime": {"torch_threads": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"
