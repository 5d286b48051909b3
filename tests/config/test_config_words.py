"""Words of a command line that are nearly what they were meant to be."""

from __future__ import annotations

import pytest

from tandem.base.errors import ConfigError
from tandem.config.load import load_words
from tandem.config.schema import Config


@pytest.mark.parametrize(
    ("word", "reason", "remedy"),
    [
        ("", "an empty word, as a variable that isn't set", "Leave it out"),
        ("-n=4", "no flag: one begins with two hyphens", "Write --n=4"),
        ("—use-tis", "no flag", "Write --use-tis"),
        ("trainer.seed = 4", "no key=value, though it looks like one", "Write trainer.seed=4"),
        ("trainer.seed＝4", "no key=value, though it looks like one", "Write trainer.seed=4"),
        ("\ufefftrainer.se\u200bed=4", "no key=value, though it looks like one", "Write trainer.seed=4"),
        ("data.train_files[0]=a", "'data.train_files[0]' is no key", "key=[a, b]"),
        ("trainer..seed=4", "'trainer..seed' is no key", "key=value"),
    ],
)
def test_a_word_that_is_nearly_one_says_what_is_meant(word: str, reason: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_words(["actor_rollout_ref.model.path=m", word], Config)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("arguments", word)
    assert reason in problem.reason and remedy in problem.remedy
