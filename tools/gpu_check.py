"""What ``gpu_check.sh`` asks of a device: each check compares it with the CPU, or with what was planned, and says so.

Run as ``python -m tools.gpu_check CHECK FOLDER``. Only ``cuda`` is looked for; tests call the checks with a simulated
device.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.config.load import load_words
from tandem.config.model import OptimConfig
from tandem.config.schema import Config
from tandem.control.entry import run_train
from tandem.models.layouts.packing import causal_attention, windowed_attention
from tandem.models.loading import load_causal_lm
from tandem.plan.plan import compile_plan
from tandem.roles.train_rank import TrainRank
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupRequest, Sampling
from tandem.train.engine import FsdpEngine
from tandem.train.objective import SftObjective
from tandem.train.packed_engine import PackedEngine

NOT_THERE = "not there"
LENGTH = 4096
"""Tokens of the document that attention is tried with."""


class Wrong(Exception):
    """Another number than there should be."""


def train(folder: str, device: str) -> str:
    """Train one step on both: the weights end up at the same place, measured by how far they went."""
    start = dict(load_causal_lm(folder).model.state_dict())
    ends = []
    for place in ("cpu", device):
        # So wide an eps makes the step the gradient: Adam's own takes a whole step by one that is rounding.
        engine = _engine(folder, place, OptimConfig(lr=1.0, eps=1.0))
        _step(engine)
        ends.append({name: weight.detach().cpu() for name, weight in engine.export()})
    apart = sum(float((ends[1][name] - weight).abs().sum()) for name, weight in ends[0].items())
    went = sum(float((weight - start[name]).abs().sum()) for name, weight in ends[0].items() if name in start)
    return _at_most(apart / went, 0.01, "of the way that the weights went")


def generate(folder: str, device: str) -> str:
    """Generate greedily on both: the first log-probs agree; later tokens may differ where rounding flips one."""
    asked, sampling = _requests(folder), Sampling(n=1, max_tokens=16, greedy=True)
    found = []
    for place in ("cpu", device):
        model = load_causal_lm(folder).to(place)
        outputs = HfEngine(model, max_num_seqs=8).generate(asked, sampling)
        answers = {output.request.key: output.samples[0] for output in outputs}
        found.append([answers[request.key] for request in asked])
    gaps = [abs(float(a.logprobs[0] - b.logprobs[0])) for a, b in zip(*found, strict=True)]
    return _at_most(max(gaps), 1e-3, "difference of first log-probs")


def bfloat16(folder: str, device: str) -> str:
    """Compare log-probs in bfloat16 with those in float32."""
    batch = _batch(folder)
    exact, coarse = _engine(folder, device), _engine(folder, device)
    coarse.model.compute_dtype = torch.bfloat16
    values = [engine.forward(batch, ["logprobs"])["logprobs"].values for engine in (exact, coarse)]
    return _at_most(float((values[0] - values[1]).abs().mean()), 0.1, "mean difference of log-probs to float32")


def sleep(folder: str, device: str) -> str:
    """Measure what a sleeping train engine keeps: its weights; and a rollout engine: nothing."""
    engine = _engine(folder, device)
    weights = sum(parameter.nbytes for parameter in engine.model.parameters())
    _step(engine)
    engine.sleep()
    asleep = _allocated(device) / weights
    engine.wake()
    awake = _allocated(device) / weights
    del engine
    rollout = HfEngine(load_causal_lm(folder).to(device))
    rollout.sleep()
    text = f"asleep, of the weights ({awake:.2f} awake, {_allocated(device) / weights:.2f} a sleeping rollout engine)"
    return _at_most(asleep, 1.2, text)


def tags(folder: str, device: str) -> str:
    """Keep a copy of the weights in the host's memory: it takes none of the device's, and comes back bit by bit."""
    rank, batch = TrainRank(_engine(folder, device), tag_device="cpu"), _batch(folder)
    before = _allocated(device)
    rank.save_tag("ref")
    taken = _allocated(device) - before
    first = rank.forward(batch, ["logprobs"])["logprobs"].values
    _step(rank.engine)
    again = rank.forward(batch, ["logprobs"], tag="ref")["logprobs"].values
    difference = float((first - again).abs().max())
    return _at_most(difference + taken, 0.0, f"difference, {taken} bytes taken,")


def attention(folder: str, device: str) -> str:
    """Attend with grouped heads in float32, and behind a window: the memory stays far below a table of all scores."""
    del folder
    heads, kind = 8, torch.get_device_module(torch.device(device).type)
    query, key, value = (torch.randn(1, count, LENGTH, 64, device=device) for count in (heads, 2, 2))
    before = _allocated(device)
    kind.reset_peak_memory_stats(device)
    causal_attention(query, key, value, 0.125, None)
    windowed_attention(query, key, value, 0.125, LENGTH // 8)
    peak = int(kind.max_memory_allocated(torch.device(device).index)) - before
    return _at_most(peak / (4 * heads * LENGTH**2), 0.25, "of a table of all scores")


def colocate(folder: str, device: str) -> str:
    """Train two steps; the peak of memory is at most 1.5 times the plan's."""
    planned = _run(folder, device, "execution.mode=colocate")
    peak = int(torch.get_device_module(torch.device(device).type).max_memory_allocated(0))
    return _at_most(peak / planned, 1.5, "times the planned memory at the peak")


def hybrid(folder: str, device: str) -> str:
    """Train two steps with the rollout engine on a second device."""
    if torch.get_device_module(torch.device(device).type).device_count() < 2:
        return f"{NOT_THERE}: needs two devices"
    _run(folder, device, "execution.mode=hybrid")
    return "works"


def package(name: str) -> Callable[[str, str], str]:
    """Make the check that a package can be imported; ``make test-vllm`` and the like run it."""

    def check(folder: str, device: str) -> str:
        found = find_spec(name) is not None
        return f"works: the package is there, run `make test-{name}`" if found else f"{NOT_THERE}: no package {name}"

    return check


CHECKS: dict[str, Callable[[str, str], str]] = {
    "train": train,
    "generate": generate,
    "bfloat16": bfloat16,
    "sleep": sleep,
    "tags": tags,
    "attention": attention,
    "colocate": colocate,
    "hybrid": hybrid,
    "vllm": package("vllm"),
    "sglang": package("sglang"),
}


def main(name: str, folder: str) -> int:
    """Print what the check ``name`` finds on ``cuda:0``; 1 if it is wrong."""
    if not torch.cuda.is_available():
        print(f"{name}: {NOT_THERE}: this torch finds no CUDA device")
        return 0
    try:
        print(f"{name}: {CHECKS[name](folder, 'cuda:0')}", flush=True)
    except Exception as error:  # whatever it is, the next check runs
        print(f"{name}: wrong: {'' if isinstance(error, Wrong) else type(error).__name__ + ': '}{error}", flush=True)
        return 1
    return 0


def _at_most(found: float, most: float, what: str) -> str:
    if not found <= most:
        raise Wrong(f"{found:.4g} {what}, at most {most:.4g} was expected")
    return f"works: {found:.4g} {what}"


def _allocated(device: str) -> int:
    gc.collect()
    return int(torch.get_device_module(torch.device(device).type).memory_allocated(torch.device(device).index))


def _engine(folder: str, device: str, optim: OptimConfig | None = None) -> FsdpEngine:
    return FsdpEngine(
        load_causal_lm(folder),
        optim=OptimConfig() if optim is None else optim,
        total_updates=9,
        max_tokens_per_micro_batch=512,
        temperature=1.0,
        device=device,
    )


def _step(engine: PackedEngine) -> None:
    batch, objective = _batch_of(engine.model.head.size), SftObjective()
    engine.forward_backward(batch, objective)
    engine.optim_step(objective.denominator(batch))


def _batch(folder: str) -> DataProto:
    return _batch_of(json.loads((Path(folder) / "config.json").read_text("utf-8"))["vocab_size"])


def _batch_of(vocabulary: int) -> DataProto:
    """Make eight samples of 8 + 24 random tokens."""
    noise = torch.Generator().manual_seed(0)
    prompts, answers = (torch.randint(vocabulary, (8 * length,), generator=noise) for length in (8, 24))
    responses = Ragged.from_lengths(answers, [24] * 8)
    return DataProto(
        {
            "prompts": Ragged.from_lengths(prompts, [8] * 8),
            "responses": responses,
            "response_mask": responses.like(torch.ones(len(answers), dtype=torch.bool)),
        }
    )


def _requests(folder: str) -> list[GroupRequest]:
    prompts = _batch(folder).ragged("prompts")
    return [GroupRequest(i, prompts[i], (i,)) for i in range(len(prompts))]


def _run(folder: str, device: str, *words: str) -> int:
    """Train two steps; returns the bytes that the plan has for the fullest device."""
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "train.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"{n}{n}", "answer": str(n)}) + "\n" for n in range(8)))
        config = load_words(
            [
                f"actor_rollout_ref.model.path={folder}",
                f"data.train_files=[{data}]",
                "data.train_batch_size=4",
                "data.max_prompt_length=16",
                "data.max_response_length=16",
                "actor_rollout_ref.rollout.n=4",
                "reward_manager.type=match_fraction",
                f"runtime.device={torch.device(device).type}",
                "runtime.threads=true",
                "trainer.total_steps=2",
                "trainer.max_idle_steps=9",
                "trainer.logger=[]",
                f"trainer.output_dir={scratch}/run",
                *words,
            ],
            Config,
        )
        plan = compile_plan(config)
        if plan.problems:
            raise Wrong(str(plan.problems[0]))
        if run_train(config, plan):
            raise Wrong("the run failed")
        return max((memory.total for memory in plan.memory), default=0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
