"""Advice from measured runs: synthetic runs whose best setting is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tandem.base.errors import DataError
from tandem.cli.app import app
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.speed.advice import Advice, advise, resource_of
from tandem.speed.measured import read_measured, setting_of
from tandem.speed.step_bound import Bound
from tests.plan.folders import write_model

HALF = 'execution.resource={"actor":[1,4],"rollout":[1,4]}'
Run = Callable[..., Path]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config that plans without a problem, and the current one."""
    write_model(tmp_path / "model", max_position_embeddings=4096)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 100)
    tree = {
        "execution": {"mode": "hybrid", "resource": {"actor": [1, 4], "rollout": [1, 4]}},
        "actor_rollout_ref": {
            "model": {"path": str(tmp_path / "model")},
            "rollout": {"n": 4, "on_weight_update": "keep"},
        },
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "train_batch_size": 16, "max_response_length": 64},
        "trainer": {"total_steps": 20},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*words: str) -> Config:
    return load_words(["run.yaml", *words], Config)


@pytest.fixture
def run(place: Path) -> Run:
    """Writes the folder of a run: ``steps`` alike between those at its ends, which don't count."""

    def written(*words: str, steps: int = 10, **times: float) -> Path:
        folder = place / "measured"
        folder.mkdir(exist_ok=True)
        chosen = config(*words)
        document = chosen.model_dump(mode="json", by_alias=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        row = {key if "/" in key else f"time/{key}": value for key, value in times.items()}
        slow = {key: 50 * value for key, value in row.items()}
        ends = setting_of(chosen).staleness  # steps with nothing left to generate
        rows = [{"step": 0, "eval/reward": 0.5}, *[slow] * 2, *[row] * steps, *[{**row, "time/rollout": 0.0}] * ends]
        lines = (json.dumps({"step": number, **line}) for number, line in enumerate(rows))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return written


def advice(folder: Path, *words: str) -> Advice:
    return advise(config(*words), read_measured(folder))


def test_a_critic_is_a_part_of_the_forwards_and_of_training(run: Run) -> None:
    measured = read_measured(run(HALF, rollout=2.0, old=0.5, values=0.25, train_critic=0.5, train=1.0, step=3.0))
    assert (measured.parts.old, measured.parts.train) == (0.75 * 4, 1.5 * 4)
    assert measured.limit.seconds == pytest.approx(0.75 + 1.5)


def test_the_split_follows_the_work(run: Run) -> None:
    """48 device-seconds of rollout and 16 of the actor on 8 devices: 6 + 2 keeps both busy all the time."""
    folder = run(HALF, rollout=12.1, ref=1.0, train=3.0, publish=0.1, step=12.4)
    found = advice(folder)
    assert found.measured.parts.rollout == pytest.approx(48.0)  # while weights came it stood
    assert found.measured.parts.reference + found.measured.parts.train == 16.0
    assert found.now.limit.bound is Bound.ROLLOUT
    assert found.now.seconds == pytest.approx(12.4)
    best = found.best.setting
    assert (best.rollout, best.actor) == (6, 2)
    assert found.best.seconds == pytest.approx(8.1 + 0.3)  # the push, and what nothing explains, stay
    assert found.speedup == pytest.approx(12.4 / 8.4)
    assert resource_of(best, per_node=4) == {"rollout": (1, 6), "actor": (1, 2)}


def test_where_training_is_the_work_the_devices_go_there(run: Run) -> None:
    best = advice(run(HALF, rollout=4.0, train=12.0, step=12.0)).best
    assert (best.setting.rollout, best.setting.actor) == (2, 6)
    assert best.limit.seconds == pytest.approx(8.0)


def test_no_more_staleness_than_is_worth_it(run: Run) -> None:
    """Once both sides are busy, more staleness brings nothing."""
    found = advice(run(HALF, rollout=8.0, train=8.0, step=8.0), "execution.max_staleness=4")
    assert found.best.setting.staleness == 1
    assert found.best.seconds == pytest.approx(found.now.seconds)


def test_a_long_tail_is_hidden_by_staleness(run: Run) -> None:
    """The longest sample takes 24 s, each side is busy for 4: that takes five steps in flight and more."""
    times: dict[str, Any] = {"rollout": 4.0, "train": 4.0, "step": 14.0, "rollout/longest_s": 24.0}
    found = advice(run(HALF, **times))
    assert found.now.limit.bound is Bound.LATENCY
    assert found.now.limit.seconds == pytest.approx((24 + 4) / 2)
    assert found.best.setting.staleness == 4
    by_staleness = [choice.limit.seconds for choice in found.compared]
    assert by_staleness == sorted(by_staleness, reverse=True)


def test_draining_for_a_push_is_told_where_it_costs(run: Run) -> None:
    """With ``wait`` no step is shorter than its longest sample."""
    wait = "actor_rollout_ref.rollout.on_weight_update=wait"
    times: dict[str, Any] = {"rollout": 4.0, "train": 4.0, "step": 24.0, "rollout/longest_s": 24.0}
    found = advice(run(HALF, wait, **times), wait)
    assert found.best.limit.seconds == pytest.approx(24.0)
    assert any("on_weight_update=keep a step of 14 s is predicted" in note for note in found.notes)
    assert not advice(run(HALF, wait, rollout=4.0, train=4.0, step=4.0), wait).notes


def test_sub_batches_only_where_they_pay(run: Run) -> None:
    """At s = 0 forwards hide behind generation, in slices; without forwards there is nothing to slice."""
    fresh = "execution.max_staleness=0"
    with_ref = advice(run(HALF, fresh, rollout=8.0, ref=4.0, train=1.0, step=13.0), fresh)
    choice = with_ref.compared[0]
    assert choice.setting.staleness == 0
    assert choice.setting.sub_batches == 16
    without = advice(run(HALF, fresh, rollout=8.0, train=1.0, step=9.0), fresh)
    assert without.compared[0].setting.sub_batches == 1


def test_engines_and_model_copies_are_not_cut(run: Run) -> None:
    wide = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=4")
    found = advice(run(HALF, *wide, rollout=12.0, train=2.0, step=12.0), *wide)
    assert {choice.setting.rollout for choice in found.compared} == {4}


def test_from_a_colocate_run_to_two_groups(run: Run) -> None:
    """8 s of rollout and 8 of training in turn; turns that cost 3 s are worth avoiding."""
    shared = ("execution.mode=colocate", 'execution.resource={"actor":[1,8],"rollout":[1,8]}')
    folder = run(*shared, rollout=8.0, train=8.0, publish=3.0, step=19.5)
    found = advise(load_words(["run.yaml", *shared], Config), read_measured(folder))
    assert found.now.limit.bound is Bound.TURNS
    assert found.now.seconds == pytest.approx(19.5)
    assert found.best.setting.mode == "hybrid"
    assert (found.best.setting.rollout, found.best.setting.actor, found.best.setting.staleness) == (4, 4, 1)
    assert found.best.seconds == pytest.approx(16.5)
    assert any("unknown and left out" in note for note in found.notes)


def test_fully_async_deals_out_devices_by_work(run: Run) -> None:
    roles = '{"actor":[1,2],"rollout":[1,2],"advantages":[1,1],"reference":[1,2],"actor_fwd":[1,2]}'
    words = (
        "execution.mode=fully_async",
        f"execution.resource={roles}",
        "algorithm.kl.in=loss",
        "algorithm.kl.coef=0.1",
    )
    folder = run(*words, rollout=8.0, train=4.0, ref=2.0, old=2.0, step=8.5)
    best = advice(folder, *words).best.setting
    assert (best.rollout, best.actor, best.reference, best.actor_fwd) == (4, 2, 1, 1)


def test_a_folder_without_a_run_is_refused(place: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: holds no metrics\.jsonl with a config\.yaml beside it; name the"):
        read_measured(place / "nowhere")


def test_a_run_that_is_too_short_is_refused(run: Run) -> None:
    with pytest.raises(DataError, match=r"has 5 timed steps; .* are left out and 3 more make a mean: run at least 6"):
        read_measured(run(steps=2, rollout=1.0, train=1.0, step=2.0))


def test_a_run_without_its_parts_is_refused(run: Run) -> None:
    with pytest.raises(DataError, match="no step has 'time/rollout'"):
        read_measured(run(train=1.0, step=2.0))


def test_an_sft_run_is_refused(place: Path) -> None:
    (place / "sft").mkdir()
    (place / "sft" / "metrics.jsonl").write_text("{}\n")
    document = {"model": {"path": "model"}, "data": {"train_files": ["train.jsonl"], "response_key": "answer"}}
    (place / "sft" / "config.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(DataError, match="SFT run"):
        read_measured(place / "sft")


def tandem(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_says_what_to_set_how_fast_and_why(run: Run) -> None:
    folder = run(HALF, rollout=12.1, ref=1.0, train=3.0, publish=0.1, step=12.4)
    told = tandem("plan", "run.yaml", "--tune", folder)
    assert told.exit_code == 0, told.output
    for words in (
        "12.4 s a step, 0.98 of the best possible",
        "rollout-bound: rollout 12 + push 0.1 = 12.1 s",
        "8.4 s a step predicted, 1.48 times as fast",
        'execution.resource={"rollout":[1,6],"actor":[1,2]}',
        "execution.num_iters_per_train_update=1",
        "execution.max_staleness=1",
    ):
        assert words in told.stdout


def test_the_words_of_the_advice_are_a_config(run: Run) -> None:
    folder = run(HALF, rollout=12.1, ref=1.0, train=3.0, publish=0.1, step=12.4)
    told = json.loads(tandem("plan", "run.yaml", "--json", "--tune", folder).stdout)
    assert told["best"]["limit"]["seconds"] == pytest.approx(8.1)
    again = json.loads(tandem("plan", "run.yaml", "--json", "--tune", folder, *told["best"]["words"]).stdout)
    assert again["now"]["setting"] == told["best"]["setting"]
    assert again["speedup"] == pytest.approx(1.0)
    assert "this config is within 1 %" in tandem("plan", "run.yaml", "--tune", folder, *told["best"]["words"]).stdout


def test_a_config_with_problems_is_not_tuned(run: Run) -> None:
    folder = run(HALF, rollout=1.0, train=1.0, step=1.0)
    told = tandem("plan", "run.yaml", "--tune", folder, "execution.num_iters_per_train_update=5")
    assert told.exit_code == 2
    assert "can't be cut into so many equal sub-batches" in told.stdout


def test_a_missing_run_ends_with_a_message(place: Path) -> None:
    told = tandem("plan", "run.yaml", "--tune", "nowhere")
    assert told.exit_code == 2
    assert "nowhere: holds no metrics.jsonl" in told.stderr
