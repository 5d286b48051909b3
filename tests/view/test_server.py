"""What the page asks its server, and who may ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="tandem-rl[view] is not installed")
from starlette.testclient import TestClient

from tandem.view.document import FILES
from tandem.view.runs import find_runs
from tandem.view.server import build_app
from tests.view.runs import HOSTILE, append_line, make_run, spoil

ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", texts=HOSTILE, tokens=True)
    make_run(folder / "two", steps=4, lr=1e-4)
    return folder


@pytest.fixture
def client(runs: Path) -> TestClient:
    made = TestClient(build_app(find_runs([runs]), "token"), base_url=ADDRESS)
    assert made.get("/?token=token").status_code == 200
    return made


def samples(client: TestClient, **asked: Any) -> dict[str, Any]:
    where = json.dumps(asked.pop("where", []))
    answer = client.get("/api/samples", params={"run": "one", "where": where, **asked})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# --- who may ask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/api/runs", "/page/main.js", "/api/events", "/?token=wrong", "/?token="])
def test_nobody_is_let_in_without_the_token(runs: Path, path: str) -> None:
    assert TestClient(build_app(find_runs([runs]), "token"), base_url=ADDRESS).get(path).status_code == 403


def test_the_token_leaves_the_address_and_no_script_reads_it(runs: Path) -> None:
    client = TestClient(build_app(find_runs([runs]), "token"), base_url=ADDRESS, follow_redirects=False)
    answer = client.get("/?token=token")
    assert answer.headers["location"] == "/"
    assert "HttpOnly" in answer.headers["set-cookie"] and "samesite=strict" in answer.headers["set-cookie"].lower()


def test_another_name_for_this_machine_is_refused(client: TestClient) -> None:
    assert client.get("/api/runs", headers={"host": "evil.example:8000"}).status_code == 400


@pytest.mark.parametrize("name", ["../server.py", "..%2f..%2fserver.py", "index.html", "nothing.js"])
def test_only_files_of_the_page_are_sent(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_the_page_asks_no_other_host(client: TestClient) -> None:
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    own = [page.text, *(client.get(f"/page/{name}").text for name in sorted(FILES) if not name.startswith("uplot"))]
    assert not any("http://" in text or "https://" in text for text in own)


# --- runs and curves -------------------------------------------------------------------------------------------------


def test_runs_come_with_state_config_and_start_without_secrets(client: TestClient) -> None:
    one, two = client.get("/api/runs").json()
    assert (one["name"], two["name"]) == ("one", "two") and one["state"] == "finished"
    assert one["config"]["optim.lr"] == 1e-3 and two["config"]["optim.lr"] == 1e-4
    assert one["samples"]["train"] == [1, 2, 3, 4, 5, 6] and one["starts"][0]["host"]
    assert "hunter2" not in json.dumps(one)


def test_curves_are_columns(client: TestClient) -> None:
    found = client.get("/api/curves", params={"run": "two"}).json()
    assert found["columns"]["step"] == [1, 2, 3, 4] and found["rows"] == 4 and not found["thinned"]
    assert len(found["columns"]["reward/mean"]) == 4


def test_an_unknown_run_and_a_query_that_cannot_be_read_are_refused(client: TestClient) -> None:
    assert client.get("/api/curves", params={"run": "../one"}).status_code == 404
    wrong = {"where": '[["nothing", ">=", 1]]'}
    for asked in ({"where": "["}, wrong, {"sort": "prompt"}, {"kind": "x"}, {"offset": "a"}):
        assert client.get("/api/samples", params={"run": "one", **asked}).status_code == 400, asked


def test_findings_are_sent(client: TestClient) -> None:
    titles = [found["title"] for found in client.get("/api/findings", params={"run": "one"}).json()]
    assert "Scorings fail" in titles


# --- samples ---------------------------------------------------------------------------------------------------------


def test_pages_hold_all_samples_once(client: TestClient) -> None:
    pages = [samples(client, offset=offset, limit=30) for offset in (0, 30, 60)]
    rows = [row for page in pages for row in page["rows"]]
    assert pages[0]["total"] == pages[0]["of"] == 72 == len({(r["step"], r["group"], r["sample"]) for r in rows})
    assert [row["step"] for row in rows] == sorted((row["step"] for row in rows), reverse=True)


def test_samples_are_sorted_with_failures_last_either_way(client: TestClient) -> None:
    for sort, turn in (("reward", False), ("-reward", True)):
        rewards = [row["reward"] for row in samples(client, sort=sort, limit=100)["rows"]]
        assert rewards[-6:] == [None] * 6
        assert rewards[:-6] == sorted(rewards[:-6], reverse=turn)


def test_filters_hold_together(client: TestClient) -> None:
    where = [["step", ">=", 3], ["step", "<=", 4], ["reward", ">=", 0.4], ["uid", "=", "row0"]]
    rows = samples(client, where=where)["rows"]
    assert rows and {row["step"] for row in rows} <= {3, 4} and {row["uid"] for row in rows} == {"row0"}
    assert all(row["reward"] >= 0.4 for row in rows)
    failed = samples(client, where=[["failure", "=", "*"]])
    assert failed["total"] == 6 and all(row["failure"].startswith("ValueError") for row in failed["rows"])


def test_a_search_looks_into_all_texts_whatever_their_case(client: TestClient) -> None:
    assert [(r["step"], r["group"]) for r in samples(client, text="ANSWER 5.2.0")["rows"]] == [(5, 2)]
    assert samples(client, text="no number in it")["total"] == 6
    assert samples(client, text="question 1", where=[["step", "=", 2]] and [["step", "<=", 1]])["total"] == 4
    assert samples(client, text=".*")["total"] == 0


def test_long_texts_are_cut_in_lists_and_whole_in_groups(client: TestClient) -> None:
    row = next(row for row in samples(client, where=[["uid", "=", "row1"]])["rows"] if row["sample"] == 0)
    assert len(row["response"]) == 600 and row["cut"] == ["response"]
    group = client.get("/api/group", params={"run": "one", "step": 1, "group": 1}).json()
    assert group[0]["response"] == "x" * 100_000 and group[0]["tokens"][:2] == ["x", "x"]
    first = client.get("/api/group", params={"run": "one", "step": 1, "group": 0}).json()
    assert first[0]["notes"] == {"reply": "a judge's word"} and first[0]["response"] == HOSTILE[0]


def test_the_prompt_whose_reward_fell_comes_first(client: TestClient) -> None:
    first, *_, last = client.get("/api/prompts", params={"run": "one"}).json()
    assert first["uid"] == "row0" and first["change"] < -0.5 and last["change"] > 0.5
    over_time = client.get("/api/prompt", params={"run": "one", "uid": "row0"}).json()
    assert [row["step"] for row in over_time] == [1, 2, 3, 4, 5, 6]
    assert over_time[0]["reward_mean"] > over_time[-1]["reward_mean"]


def test_failures_are_counted_by_message(client: TestClient) -> None:
    found = client.get("/api/failures", params={"run": "one"}).json()
    assert found["failures"] == [{"failure": "ValueError: no number in it", "count": 6}]
    assert found["finish"] == ["stop"]


def test_steps_that_come_or_go_meanwhile_are_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    client = TestClient(build_app(find_runs([run]), "token"), base_url=ADDRESS)
    client.get("/?token=token")
    assert client.get("/api/samples", params={"run": "run"}).json()["of"] == 36
    (run / "samples" / "train-00000001.parquet").unlink()  # as thinning does
    (run / "samples" / "train-00000003.parquet").rename(run / "samples" / "train-00000007.parquet")
    append_line(run, {"step": 7, "reward/mean": 1.0})
    found = client.get("/api/samples", params={"run": "run"}).json()
    assert found["of"] == 24
    assert client.get("/api/curves", params={"run": "run"}).json()["columns"]["step"] == [1, 2, 3, 7]


def test_a_run_without_samples_or_metrics_is_shown(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "about.json").write_text("{}")
    client = TestClient(build_app(find_runs([tmp_path / "run"]), "token"), base_url=ADDRESS)
    client.get("/?token=token")
    (run,) = client.get("/api/runs").json()
    assert (run["state"], run["step"], run["samples"]) == ("unknown", 0, {})
    assert client.get("/api/samples", params={"run": "run"}).json() == {"total": 0, "of": 0, "rows": []}
    assert client.get("/api/prompts", params={"run": "run"}).json() == []


# --- what is not as runs write it ------------------------------------------------------------------------------------


def entered(*paths: Path) -> TestClient:
    client = TestClient(build_app(find_runs(paths), "token"), base_url=ADDRESS)
    client.get("/?token=token")
    return client


@pytest.mark.parametrize(
    "about", ['{"starts": [{}]}', '{"ended": "yes"}', '{"ended": {"outcome": []}}', '{"starts": 1}']
)
def test_a_run_of_odd_notes_is_unknown_and_hides_no_other(tmp_path: Path, about: str) -> None:
    make_run(tmp_path / "good", steps=1, groups=1)
    (make_run(tmp_path / "odd", steps=1, groups=1) / "about.json").write_text(about)
    states = {run["name"]: run["state"] for run in entered(tmp_path).get("/api/runs").json()}
    assert states == {"good": "finished", "odd": "unknown"}


def test_a_run_that_cannot_be_shown_ends_no_list(tmp_path: Path) -> None:
    make_run(tmp_path / "good", steps=1, groups=1)
    run = make_run(tmp_path / "odd", steps=1, groups=1)
    (run / "config.yaml").write_text("a: &a\n  b: *a\n")  # without an end
    good, odd = entered(tmp_path).get("/api/runs").json()
    assert good["state"] == "finished" and "can't be shown" in odd["words"]


def test_samples_of_another_run_in_the_folder_replace_those_before(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, groups=3)
    client = entered(run)
    asked = {"run": "run", "text": "answer 2.0", "sort": "reward"}
    assert client.get("/api/samples", params=asked).json()["total"] == 4
    make_run(tmp_path / "other", steps=2, groups=1, texts=["new"] * 4)
    for part in (tmp_path / "other" / "samples").iterdir():
        part.replace(run / "samples" / part.name)
    found = client.get("/api/samples", params=asked).json()
    assert (found["of"], found["total"], found["rows"]) == (8, 0, [])
    assert {row["response"] for row in client.get("/api/samples", params={"run": "run"}).json()["rows"]} == {"new"}


def test_files_of_samples_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    spoil(run)
    client = entered(run)
    assert client.get("/api/samples", params={"run": "run"}).json()["of"] == 12
    assert client.get("/api/samples", params={"run": "run", "text": "answer 4.1"}).json()["total"] == 4
    for step in (1, 2, 3):
        assert client.get("/api/group", params={"run": "run", "step": step}).json() == []
    (described,) = client.get("/api/runs").json()
    assert all(f"train-0000000{step}.parquet" in described["words"] for step in (1, 2, 3))


@pytest.mark.parametrize("asked", ["xx", "[1]", "[[1]]", "1", "[" * 5000, '[["one", 1e999, 0]]'])
def test_events_of_what_cannot_be_read_are_refused(client: TestClient, asked: str) -> None:
    assert client.get("/api/events", params={"have": asked}).status_code == 400


@pytest.mark.parametrize("where", ["[" * 5000, '[["uid", "=", "\\ud800"]]', '[["step", ">=", 1e999]]', "1"])
def test_filters_that_cannot_be_read_are_refused(client: TestClient, where: str) -> None:
    assert client.get("/api/samples", params={"run": "one", "where": where}).status_code == 400
    assert client.get("/api/samples", params={"run": "one", "offset": 10**30}).status_code == 400


def test_numbers_that_json_cannot_hold_are_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, groups=1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": NaN, "grad/norm": 1e999, "lag/mean": 0}\n{"step": 1e999}\n')
        file.write('{"step": 3, "lag/mean": 1' + "0" * 400 + "}\n")
    client = entered(run)
    found = client.get("/api/curves", params={"run": "run"}).json()["columns"]
    assert found["step"] == [1, 2, 3] and found["lag/mean"] == [None, 0, None] and "grad/norm" not in found
    for path in ("/api/runs", "/api/findings"):
        assert client.get(path, params={"run": "run"}).status_code == 200


def test_metrics_that_are_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    (described,) = entered(tmp_path).get("/api/runs").json()
    assert "metrics.jsonl (Is a directory)" in described["words"]
