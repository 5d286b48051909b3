"""``trainer.exact`` on every processor: bits depend on values and shapes, never on where a tensor lies in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tandem.base.errors import ConfigError
from tandem.base.exact_mode import SETTING, ask_for_exact_mode
from tandem.models import numerics
from tandem.models.numerics import prepare_process
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import Sampling
from tandem.train.objective import PolicyObjective
from tests.e2e.seven import make_task
from tests.rollout.tiny_models import lm, requests
from tests.train.conftest import build_batch, build_engine

ROOT = Path(__file__).parents[2]


class Elsewhere(TorchDispatchMode):
    """Does every operation twice, the second time on tensors a few bytes beside a multiple of 64, and compares bits."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = offset
        self.done: Counter[str] = Counter()
        self.differ: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moved_args, moved_kwargs = tree_map(self._moved, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        leaves = tree_leaves((args, kwargs))
        # What is not initialised has no value, and a draw is another one the second time.
        if "empty" in name or not any(map(_plain, leaves)) or any(isinstance(x, torch.Generator) for x in leaves):
            return out
        self.done[name] += 1
        again = func(*moved_args, **moved_kwargs)
        here, there = tree_leaves((out, args, kwargs)), tree_leaves((again, moved_args, moved_kwargs))
        for one, other in zip(here, there, strict=True):
            if _plain(one) and not torch.equal(_bits(one), _bits(other)):
                self.differ[name] += 1
        return out

    def _moved(self, leaf: Any) -> Any:
        """A copy with the same strides."""
        if not _plain(leaf):
            return leaf
        size = leaf.element_size()
        extent = 1 + sum((n - 1) * stride for n, stride in zip(leaf.shape, leaf.stride(), strict=True))
        room = torch.empty(max(extent, 0) + 64 // size + self.offset, dtype=leaf.dtype)
        first = -(room.data_ptr() // size) % (64 // size) + self.offset
        return room.as_strided(leaf.shape, leaf.stride(), first).copy_(leaf)


def _plain(leaf: Any) -> bool:
    dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    return dense and leaf.numel() > 0 and 0 not in leaf.stride()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


@pytest.fixture(autouse=True)
def exact_mode() -> None:
    prepare_process(threads=1, exact=True)


@pytest.mark.parametrize("offset", [1, 4])
def test_each_operation_of_a_training_step_gives_the_same_bits_wherever_its_tensors_lie(offset: int) -> None:
    engine = build_engine(exact=True)
    batch = build_batch([1, 5, 8, 3, 2, 2, 7, 1], group_size=4)
    objective = PolicyObjective(kl_coef=0.1, entropy_coef=0.01)
    with Elsewhere(offset) as watched:
        engine.forward(batch, ["logprobs", "entropies", "sum_pi_squared"])
        for _ in range(2):
            engine.forward_backward(batch, objective)
            engine.optim_step(29.0)
    assert not watched.differ
    assert watched.done["aten::mm"] > 50 and watched.done["aten::_fused_adamw_"] == 4


@pytest.mark.parametrize("offset", [1, 4])
def test_each_operation_of_generation_gives_the_same_bits_wherever_its_tensors_lie(offset: int) -> None:
    engine = HfEngine(lm(), exact=True)
    with Elsewhere(offset) as watched:
        list(engine.generate(requests(2, n=2), Sampling(n=2, max_tokens=5, stop_token_ids=(0,))))
    assert not watched.differ
    assert watched.done["aten::mm"] > 50


def test_a_process_that_computed_in_another_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_equal_wherever_placed", lambda: iter([True, False]))
    prepare_process(threads=None, exact=False)
    with pytest.raises(ConfigError, match=r"trainer\.exact = True: products round by .* Start Python with MKL_CBWR="):
        prepare_process(threads=None, exact=True)


def test_the_mode_leaves_a_lower_one_of_the_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    ask_for_exact_mode()
    assert os.environ["ATEN_CPU_CAPABILITY"] == "default"
    assert os.environ["MKL_CBWR"] == SETTING["MKL_CBWR"]


PLUGIN = """
import os, sys
import torch
from tandem.models.numerics import _equal_wherever_placed
equal = all(_equal_wherever_placed())  # a product, at once
with open(os.environ["NOTES"], "a") as file:
    file.write(f"{'engine' if 'tandem.rollout.host' in sys.orig_argv else 'driver'} {equal} "
               f"{torch.backends.cpu.get_cpu_capability()}\\n")
"""


@pytest.mark.long
def test_the_mode_is_there_in_each_process_before_its_first_product(tmp_path: Path) -> None:
    (tmp_path / "computing_plugin.py").write_text(PLUGIN)
    others = {name: value for name, value in os.environ.items() if name not in SETTING}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tandem", "train", str(make_task(tmp_path)), "trainer.exact=true"),
            *("execution={mode: hybrid}", "plugins=[computing_plugin]", "runtime.threads=false"),
            *("trainer.total_steps=1", "data.train_batch_size=2", "reward_manager.workers=1"),
        ],
        env=others | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "NOTES": str(tmp_path / "notes")},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    assert {who for who, *_ in notes} == {"driver", "engine"}
    assert all(equal == "True" and capability != "AVX512" for _, equal, capability in notes)
