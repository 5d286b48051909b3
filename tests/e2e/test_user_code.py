"""Files of the user's that fail: the run ends with the cause and never as a success."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.base.errors import ConfigError, DataError
from tests.e2e.seven import prepare, train

SOURCE = "from tandem import BaseDataSource\n\nclass Rows(BaseDataSource):\n"
GET = "    def get_train_dataset(self):\n        return []\n\n"
BROKEN = {
    "exits": (SOURCE + "    pass\n\nraise SystemExit(0)\n", "SystemExit"),
    "abstract": (SOURCE + "    pass\n", "abstract"),
    "constructor": (
        SOURCE + GET + "    def __init__(self):\n        raise ValueError('no rows today')\n",
        "no rows today",
    ),
    "rows": (SOURCE + "    def get_train_dataset(self):\n        raise OSError('disk gone')\n", "disk gone"),
    "exits late": (SOURCE + "    def get_train_dataset(self):\n        raise SystemExit(0)\n", "SystemExit"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_data_source_that_fails_is_told_with_its_error(task: Path, tmp_path: Path, kind: str) -> None:
    text, cause = BROKEN[kind]
    file = tmp_path / "rows.py"
    file.write_text(text)
    with pytest.raises((ConfigError, DataError), match=cause):
        prepare(task, f"data.source={{file: {file}, type: Rows}}", "data.train_files=[]")


@pytest.mark.parametrize("place", ["reward", "plugin"])
def test_a_module_that_exits_is_no_success(
    task: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"leaving_{place}.py").write_text("def leaving(response):\n    return 1.0\n\nraise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = {
        "reward": f"reward_manager={{type: leaving, file: {tmp_path / 'leaving_reward.py'}}}",
        "plugin": "plugins=[leaving_plugin]",
    }
    with pytest.raises(ConfigError, match="SystemExit"):
        prepare(task, words[place])


def test_another_batch_size_is_refused_on_resume(task: Path, tmp_path: Path) -> None:
    words = (task, f"trainer.output_dir={tmp_path}", "data.train_batch_size=4", "trainer.save_interval=2")
    train(*words, "trainer.total_steps=2")
    with pytest.raises(ConfigError, match=r"data\.train_batch_size = 8: the saved run has 4"):
        prepare(*words, "trainer.total_steps=4", "trainer.resume=auto", "data.train_batch_size=8")


def test_a_source_that_splits_by_chance_is_asked_once(task: Path, tmp_path: Path) -> None:
    file = tmp_path / "split.py"
    file.write_text(
        "import random\n\nfrom tandem import BaseDataSource\n\n\n"
        "class Split(BaseDataSource):\n"
        "    def __init__(self):\n"
        "        digits = random.SystemRandom().sample(range(10), 10)\n"
        "        rows = [{'prompt': f'{d}>', 'answer': str(d) * 4} for d in digits]\n"
        "        self.train, self.val = rows[:6], rows[6:]\n\n"
        "    def get_train_dataset(self):\n        return self.train\n\n"
        "    def get_val_dataset(self):\n        return self.val\n"
    )
    session = prepare(
        task, f"trainer.output_dir={tmp_path / 'run'}", f"data.source={{file: {file}, type: Split}}",
        "data.train_files=[]", "evaluation.interval=5", "data.train_batch_size=6",
    )  # fmt: skip
    session.rewards.close()
    assert session.evaluator is not None
    held_out = {prompt.text for prompt in session.evaluator._prompts}
    trained = {prompt.text for prompt in session.source.items}
    assert (len(held_out), len(trained)) == (4, 6) and not held_out & trained
