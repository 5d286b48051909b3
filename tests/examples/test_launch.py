"""The launch scripts: their shell and YAML are right, and what they start is a run that plans."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.plan.plan import Plan, compile_plan

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
END = "end-of-call"
RUN = "examples/quickstart/hybrid.yaml"
STUBS = """
ray() {{ printf '%s\\0' ray "$@" {end} >> {log}; }}
srun() {{
    case "$*" in *"hostname --ip-address") echo 10.0.0.7 10.1.0.7; return;; esac
    printf '%s\\0' srun "$@" {end} >> {log}
}}
scontrol() {{ printf 'one\\ntwo\\nthree\\n'; }}
"""
"""Of the programs of a cluster, which note how they are called."""


def plan_of(words: list[str]) -> Plan:
    """What is started with these words, but for files that are elsewhere."""
    given = [RUN if word.endswith("run.yaml") else word for word in words]
    return compile_plan(load_words(given, Config))


def after_train(words: list[str]) -> list[str]:
    return words[words.index("train") + 1 :]


def launched(script: str, folder: Path, *words: str, **variables: str) -> list[list[str]]:
    """The calls of ``ray`` and ``srun`` that a script makes, in stubs of them."""
    log = folder / "calls"
    text = STUBS.format(log=shlex.quote(str(log)), end=END) + f'source {LAUNCH / script} "$@"'
    done = subprocess.run(
        ["bash", "-c", text, script, *words],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    calls = log.read_text().split(f"\0{END}\0")[:-1]
    return [call.split("\0") for call in calls]


@pytest.mark.parametrize("script", ["ray_job.sh", "slurm.sbatch"])
def test_the_shell_of_a_script_is_right(script: str) -> None:
    done = subprocess.run(["bash", "-n", LAUNCH / script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_ray_job_is_the_run_with_every_word_that_was_given(tmp_path: Path) -> None:
    (call,) = launched("ray_job.sh", tmp_path, "run.yaml", "data.system_prompt=be brief", DASHBOARD="http://head:1")
    assert call[:5] == ["ray", "job", "submit", "--address=http://head:1", "--working-dir"]
    assert after_train(call) == ["runtime.name=ray", "run.yaml", "data.system_prompt=be brief"]


def test_a_slurm_job_starts_a_node_each_and_the_run_on_the_first(tmp_path: Path) -> None:
    given = ("run.yaml", "--hybrid", "--resource", '{"actor":[1,2],"rollout":[1,2]}')
    job = {"SLURM_JOB_NODELIST": "one,two,three", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)}
    calls = launched("slurm.sbatch", tmp_path, *given, **job)
    nodes = {next(word for word in call if word.startswith("--nodelist")): call for call in calls}
    assert {*nodes} == {"--nodelist=one", "--nodelist=two,three"}
    (head,) = [call for call in calls if "--head" in call]
    assert "--node-ip-address=10.0.0.7" in head and "--nodelist=one" in head
    joining = nodes["--nodelist=two,three"]
    assert "--nodes=2" in joining and "ray start --address=10.0.0.7:6379" in joining[-1]
    (run,) = [call for call in calls if "train" in call]
    assert "--nodelist=one" in run and after_train(run)[-4:] == [*given]
    plan = plan_of(after_train(run))
    assert (plan.mode, plan.runtime, plan.devices) == ("hybrid", "ray", 4)
    assert not list(tmp_path.glob(".ray-token*"))


def test_a_job_of_kuberay_starts_a_run_on_what_it_reserves(tmp_path: Path) -> None:
    job: Any = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    plan = plan_of([*after_train(shlex.split(job["spec"]["entrypoint"])), f"trainer.output_dir={tmp_path / 'run'}"])
    assert {problem.key for problem in plan.problems} <= {"actor_rollout_ref.model.path"}
    assert (plan.mode, plan.runtime) == ("hybrid", "ray")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]
    containers = [container for pod in pods for container in pod["containers"]]
    gpus = int(containers[1]["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus * workers["replicas"] >= plan.devices
    for pod, container in zip(pods, containers, strict=True):
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
