"""Keys of the items of a list."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from tandem.base.errors import ConfigError
from tandem.config.load import load_words
from tandem.config.schema import Config, SftConfig


@pytest.mark.parametrize(
    ("kind", "words", "key", "meant"),
    [
        (SftConfig, "data.mix=[{files: a.jsonl}, {files: b.jsonl, wieght: 2}]", "data.mix[1].wieght", "weight"),
        (
            Config,
            "algorithm.rollout_correction.reject=[{by: token_k1, hihg: 2.0}]",
            "algorithm.rollout_correction.reject[0].hihg",
            "high",
        ),
    ],
)
def test_a_misspelt_key_is_compared_with_those_of_its_item(
    kind: type[BaseModel], words: str, key: str, meant: str
) -> None:
    model = "model.path=m" if kind is SftConfig else "actor_rollout_ref.model.path=m"
    with pytest.raises(ConfigError) as caught:
        load_words([model, words], kind)
    (problem,) = caught.value.problems
    place, _, name = key.rpartition(".")
    assert problem.key == key
    assert problem.reason == f"unknown key {name!r} in {place}"
    assert problem.remedy == f"Did you mean {meant!r}?"
