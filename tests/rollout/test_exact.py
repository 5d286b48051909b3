"""``exact``: a group's numbers don't depend, in a single bit, on what else is in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem.columns.images import Images
from tandem.models.causal_lm import CausalLM
from tandem.models.head.projection import Head
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import Sampling
from tests.rollout.tiny_models import bits, lm, requests


class Recorder(CausalLM):
    """Keeps the bits of all logits that are read."""

    def __init__(self, inner: CausalLM) -> None:
        super().__init__(inner.model, inner.compute_dtype)
        self.seen: list[bytes] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: Any,
        read: Callable[[torch.Tensor, Head], Any],
        images: Images | None = None,
        **routing: Any,
    ) -> Any:
        def spy(hidden: torch.Tensor, head: Head) -> Any:
            self.seen.append(head.logits(hidden).numpy().tobytes())
            return read(hidden, head)

        return super().forward(input_ids, positions, layout, spy, images, **routing)


SAMPLING = Sampling(n=4, max_tokens=12, stop_token_ids=(0, 1, 2))


def test_tokens_logprobs_and_logits_are_bit_equal_with_1_3_and_8_groups_in_flight() -> None:
    wanted = requests(8, n=4)
    results = []
    for groups in (1, 3, 8):
        model = Recorder(lm())
        engine = HfEngine(model, exact=True, max_num_seqs=4 * groups)
        results.append((bits(list(engine.generate(wanted, SAMPLING))), sorted(model.seen)))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("others", [[], [1, 2], [7, 3, 5]])
def test_a_group_is_bit_equal_beside_any_others_in_any_order(others: list[int]) -> None:
    wanted = requests(8, n=4)
    alone = bits(list(HfEngine(lm(), exact=True).generate([wanted[4]], SAMPLING)))
    mixed = [wanted[i] for i in others] + [wanted[4]]
    assert bits(list(HfEngine(lm(), exact=True).generate(mixed, SAMPLING)))[4] == alone[4]


def test_a_second_run_of_the_same_engine_is_bit_equal() -> None:
    engine = HfEngine(lm(), exact=True, max_num_seqs=12)
    first, second = (bits(list(engine.generate(requests(5, n=4), SAMPLING))) for _ in range(2))
    assert first == second
