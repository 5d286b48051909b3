"""Small models and batches for the training tests, and ranks to run them on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.model import OptimConfig
from tandem.models.causal_lm import CausalLM
from tandem.models.loading import as_causal_lm, new_model
from tandem.train.engine import FsdpEngine
from tests import forked

VOCAB = 23
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}

MakeBatch = Callable[..., DataProto]
MakeEngine = Callable[..., FsdpEngine]


def build_batch(lengths: Sequence[int], group_size: int = 2, seed: int = 0, prompt_length: int = 4) -> DataProto:
    """Samples with responses of ``lengths`` in groups of ``group_size``; all response tokens are trained."""
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    groups = torch.arange(count) // group_size
    prompts = torch.randint(VOCAB, (int(groups.max()) + 1, prompt_length), generator=generator)[groups]
    total = sum(lengths)
    responses = Ragged.from_lengths(torch.randint(VOCAB, (total,), generator=generator), lengths)
    return DataProto(
        {
            "prompts": Ragged.from_lengths(prompts.flatten(), [prompt_length] * count),
            "responses": responses,
            "response_mask": responses.like(torch.ones(total, dtype=torch.bool)),
            "advantages": responses.like(torch.randn(count, generator=generator).repeat_interleave(responses.lengths)),
            "old_logprobs": responses.like(-3.1 + 0.3 * torch.randn(total, generator=generator)),
            "ref_logprobs": responses.like(-3.1 + 0.3 * torch.randn(total, generator=generator)),
            "group_ids": groups,
            "sample_index": torch.arange(count) % group_size,
        }
    )


def build_engine(
    shape: dict[str, Any] = LLAMA,
    *,
    seed: int = 0,
    double: bool = False,
    model: CausalLM | None = None,
    optim: OptimConfig | None = None,
    max_tokens: int = 10_000,
    **options: Any,
) -> FsdpEngine:
    """A small model under AdamW at lr 1e-3, unless the test says otherwise."""
    if model is None:
        plain = new_model(shape, seed=seed)
        model = as_causal_lm(plain.double() if double else plain)
    return FsdpEngine(
        model,
        optim=OptimConfig(lr=1e-3) if optim is None else optim,
        total_updates=100,
        max_tokens_per_micro_batch=max_tokens,
        **{"temperature": 1.0, **options},
    )


def gradients(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """What has been accumulated."""
    return {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    return build_batch


@pytest.fixture(scope="session")
def make_engine() -> MakeEngine:
    return build_engine


@pytest.fixture(scope="session")
def grads_of() -> Callable[[FsdpEngine], dict[str, torch.Tensor]]:
    return gradients


@pytest.fixture(scope="session")
def gpt2() -> dict[str, Any]:
    """LayerNorm computes in float64 where asked; Llama's norm doesn't."""
    return GPT2


def _rank(body: Callable[[DeviceMesh, int], None], rank: int, world: int, folder: str) -> None:
    try:
        dist.init_process_group(
            "gloo", f"file://{folder}/rendezvous", timedelta(seconds=60), world_size=world, rank=rank
        )
        body(init_device_mesh("cpu", (world,)), rank)
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error_{rank}").write_text(traceback.format_exc())
        raise


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[[int, Callable[[DeviceMesh, int], None]], None]:
    """Run a body on gloo ranks, each a forked process; fails with their tracebacks, also when one hangs."""

    def run(world: int, body: Callable[[DeviceMesh, int], None]) -> None:
        (folder := tmp_path / f"world_{world}").mkdir(exist_ok=True)
        ranks = [forked.start(partial(_rank, body), rank, world, str(folder)) for rank in range(world)]
        for process in ranks:
            process.join(90)
        alive = [i for i, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        errors = "\n".join(path.read_text() for path in sorted(folder.glob("error_*")))
        assert not alive, f"ranks {alive} never ended\n{errors}"
        assert all(process.exitcode == 0 for process in ranks), errors

    return run
