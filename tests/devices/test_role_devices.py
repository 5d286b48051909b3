"""Every role computes on the device that the plan gives it, in this process and in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.base.device_kinds import shown_alone
from tandem.base.errors import ConfigError, TandemError
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.models.loading import save_pretrained_atomic
from tandem.plan.plan import compile_plan
from tandem.rollout.hf import HfEngine
from tandem.rollout.process import ProcessEngine
from tandem.rollout.protocol import Sampling
from tandem.rollout.spec import EngineSpec
from tandem.runtime.build.engine_specs import role_devices
from tests.devices import sim
from tests.e2e.seven import train, training_engine
from tests.rollout.tiny_models import lm, requests, tokens
from tests.warm.start import warm_workers

ON_SIM = ("plugins=[tests.devices.sim]", "runtime.device=sim", "trainer.total_steps=2")
KL = "algorithm.kl={in: loss, type: k3, coef: 0.01}"


def devices_of(session: Any) -> dict[str, str]:
    """Where each model of a run in this process is."""
    engines = {"actor": training_engine(session)}
    composite = session.composite
    engines |= {model.name: model._scorer._engine for model in composite.models}
    found = {role: {str(p.device) for p in engine.model.parameters()} for role, engine in engines.items()}
    found["rollout"] = {str(composite.engine.engines["rollout-0"]._model.model.device)}
    return {role: " ".join(devices) for role, devices in found.items()}


@pytest.mark.parametrize(
    ("mode", "planned"),
    [
        ("hybrid", {"actor": "sim:0", "rollout": "sim:1"}),
        ("fully_async", {"actor": "sim:0", "rollout": "sim:1", "reference": "sim:2", "actor_fwd": "sim:3"}),
    ],
)
def test_roles_of_separate_groups_have_a_device_each(
    task: Path, tmp_path: Path, mode: str, planned: dict[str, str]
) -> None:
    run = train(task, *ON_SIM, f"execution.mode={mode}", KL, f"trainer.output_dir={tmp_path / 'run'}")
    assert devices_of(run.session) == planned
    for device in planned.values():
        assert sim.accounts[int(device[-1])].peak > 0
    assert [row["version"] for row in run.rows] == [1.0, 2.0]


def test_roles_that_take_turns_share_one_device(task: Path, tmp_path: Path) -> None:
    others = sim.accounts[1:]
    before = [account.peak for account in others]  # what an earlier test left there may be freed meanwhile
    run = train(task, *ON_SIM, KL, f"trainer.output_dir={tmp_path / 'run'}")
    assert str(training_engine(run.session).device) == "sim:0"
    assert [account.peak for account in others] == before


def test_a_machine_with_fewer_devices_than_groups_is_refused(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "COUNT", 1)
    config = load_words([str(task), *ON_SIM, "execution.mode=hybrid"], Config)
    with pytest.raises(ConfigError, match="actor, rollout have a device each, and this machine has 1 of sim"):
        role_devices(config, compile_plan(config).placements)


def spec(folder: Path, engine: str) -> EngineSpec:
    save_pretrained_atomic(lm(), None, folder)
    plugins = ("tests.devices.sim", "tests.devices.strays")
    return EngineSpec(model=str(folder), engine=engine, device="sim:1", plugins=plugins, threads=1)


def test_an_engine_in_a_process_of_its_own_computes_on_its_device(tmp_path: Path) -> None:
    sampling, asked = Sampling(n=2, max_tokens=6), requests(3)
    with ProcessEngine("rollout-0", spec(tmp_path / "model", "hf"), start_s=120) as engine:
        assert tokens(list(engine.generate(asked, sampling))) == tokens(list(HfEngine(lm()).generate(asked, sampling)))


def test_an_engine_that_computes_elsewhere_than_planned_ends_the_run(tmp_path: Path) -> None:
    with (
        ProcessEngine("rollout-0", spec(tmp_path / "model", "strays"), start_s=120) as engine,
        pytest.raises(TandemError, match=r"engine 'strays' was to compute on sim:1, and its weight .* is on cpu"),
    ):
        engine.wait_until_ready()


def test_a_process_is_shown_its_gpu_alone() -> None:
    assert shown_alone("cuda:1", {}) == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"})
    assert shown_alone("cuda:1", {"CUDA_VISIBLE_DEVICES": "4, 6"}) == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "6"})
    assert shown_alone("sim:1", {}) == ("sim:1", {})
    assert shown_alone("cpu", {}) == ("cpu", {})


@pytest.mark.long
@pytest.mark.ray
def test_ranks_and_engines_on_ray_compute_on_the_devices_of_their_slots(task: Path, tmp_path: Path) -> None:
    """Each process refuses a model that is elsewhere; that there is one on its device is seen in what it is told."""
    pytest.importorskip("ray")
    words = ("execution.mode=hybrid", "runtime.name=ray", "runtime.threads=false")
    with warm_workers():
        run = train(task, *ON_SIM, *words, f"trainer.output_dir={tmp_path / 'run'}")
    assert [row["version"] for row in run.rows] == [1.0, 2.0]
