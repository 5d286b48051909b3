"""The examples of agents: what their traces show, that the games are fair, and a shortened run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from tandem.base.user_code import load_class
from tandem.cli.app import app
from tandem.config.load import load_words
from tandem.config.schema import Config, SftConfig
from tandem.episodes.address.server import LOOPBACK, Address, Seat, listening, serve
from tandem.episodes.built_in import find_episode
from tandem.episodes.parsers import parse_pythonic
from tandem.episodes.tools import load_tools
from tandem.models.tokenizer import load_tokenizer
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.plan.plan import compile_plan
from tandem.runtime.build.finished import Served, model_at_desk

AGENTS = Path("examples/agents")
VARIED = {"type": "vowels", "file": str(Path(__file__).with_name("vowels.py"))}


def source(name: str, type_: str, **parameters: Any) -> Any:
    return load_class(str(AGENTS / name), type_, parameters, key="data.source")


@pytest.mark.parametrize("name", ["calculator", "guess"])
def test_only_the_warmed_up_model_must_be_there(name: str) -> None:
    config = load_words([f"{AGENTS}/{name}/grpo.yaml"], Config)
    made = load_words([f"{AGENTS}/{name}/sft.yaml"], SftConfig)
    assert config.actor_rollout_ref.model.path == f"{made.trainer.output_dir}/final"
    assert config.execution.mode == "hybrid"
    missing = load_words([f"{AGENTS}/{name}/grpo.yaml", "actor_rollout_ref.model.path=nowhere"], Config)
    assert [problem.key for problem in compile_plan(missing).problems] == ["actor_rollout_ref.model.path"]


def test_half_of_the_traces_call_the_calculator_and_those_alone_are_right() -> None:
    traces = source("calculator/sums.py", "Traces").get_train_dataset()
    tools, right = load_tools(str(AGENTS / "calculator/calculator.py")), 0
    for trace in (one["messages"] for one in traces):
        x, y = map(int, trace[0]["content"].rstrip("=").split("+"))
        calls = parse_pythonic(trace[1]["content"]).calls
        right += trace[-1]["content"] == str(x + y)
        assert bool(calls) == (trace[-1]["content"] == str(x + y))
        if calls:
            assert (calls[0].name, calls[0].arguments) == ("add", {"x": x, "y": y})
            assert trace[2] == {"role": "tool", "content": str(tools["add"].function(**calls[0].arguments))}
    assert (len(traces), right) == (400, 200)


def test_no_sum_is_both_shown_trained_and_asked() -> None:
    sums = source("calculator/sums.py", "Sums")
    parts = [set(part) for part in (sums.held_out, sums.trained, sums.shown)]
    assert [len(part) for part in parts[:2]] == [256, 6000] and len(parts[2]) >= 400
    assert len(set.union(*parts)) == sum(map(len, parts))


class Player:
    """A policy that guesses by a rule."""

    def __init__(self, rule: Any) -> None:
        self.reward: Any = None
        self._rule = rule

    async def chat(self, messages: list[dict[str, str]]) -> Any:
        said = str(self._rule(messages))
        return SimpleNamespace(content=said, message={"role": "assistant", "content": said})


def halving(messages: list[dict[str, str]]) -> int:
    """The middle of what the hints leave."""
    low, high = 1, 7
    for turn, hint in zip(messages[1::2], messages[2::2], strict=True):
        low, high = (int(turn["content"]) + 1, high) if hint["content"] == ">" else (low, int(turn["content"]) - 1)
    return (low + high) // 2


def test_halving_solves_every_game_in_three_turns_and_nonsense_none() -> None:
    guess = find_episode("guess", str(AGENTS / "guess/guess.py"))
    rows = source("guess/games.py", "Numbers").get_train_dataset()

    def play(rule: Any) -> list[Any]:
        tasks = [SimpleNamespace(ground_truth=r["answer"], messages=[{"role": "user", "content": "?"}]) for r in rows]
        return [asyncio.run(guess(task, Player(rule))) for task in tasks]  # type: ignore[arg-type]

    assert [found["guesses"] for found in play(halving)] == [3, 2, 3, 1, 3, 2, 3]
    assert {found["solved"] for found in play(lambda messages: "well")} == {0.0}


def test_the_games_of_the_warm_up_have_true_hints_that_nobody_heeds() -> None:
    games = [one["messages"] for one in source("guess/games.py", "RandomGames").get_train_dataset()]
    heeded = 0
    for game in games:
        said = [int(turn["content"]) for turn in game[1::2]]
        above = [guess for guess, hint in zip(said, game[2::2], strict=False) if hint["content"] == ">"]
        below = [guess for guess, hint in zip(said, game[2::2], strict=False) if hint["content"] == "<"]
        assert len(said) == 8 and max(above, default=0) < min(below, default=8)
        heeded += all(
            (b > a) == (hint["content"] == ">") for a, b, hint in zip(said, said[1:], game[2::2], strict=False)
        )
    assert heeded < len(games) / 20


def run(command: str, *words: str) -> list[dict[str, Any]]:
    """Run a command; return the lines of its metrics."""
    result = CliRunner().invoke(app, [command, *words])
    assert result.exit_code == 0, result.output
    out = next(word.partition("=")[2] for word in words if word.startswith("trainer.output_dir"))
    return read_rows(Path(out) / METRICS_FILE)


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a shortened warm-up of a tiny model: it begins to call, and its calls can't be read."""
    folder = tmp_path_factory.mktemp("calculator") / "sft"
    tiny = ["model.new.hidden_size=16", "model.new.num_layers=1", "optim.lr=0.03"]
    short = ["data.train_batch_size=16", "trainer.total_steps=20"]
    run("sft", f"{AGENTS}/calculator/sft.yaml", f"trainer.output_dir={folder}", *short, *tiny)
    return folder


def test_the_calculator_runs_shortened_and_its_turns_are_trained_as_they_were_drawn(
    warmed_up: Path, tmp_path: Path
) -> None:
    rows = run(
        "train",
        f"{AGENTS}/calculator/grpo.yaml",
        f"trainer.output_dir={tmp_path / 'grpo'}",
        f"actor_rollout_ref.model.path={warmed_up / 'final'}",
        f"reward_manager={json.dumps(VARIED)}",
        "algorithm.old_logprobs=recompute",
        "execution.max_staleness=0",
        "runtime.threads=true",
        "evaluation.interval=0",
        "evaluation.at_start=false",
        "data.max_response_length=200",  # what the model is told of a call that can't be read
        "data.train_batch_size=4",
        "trainer.total_steps=2",
    )
    trained = [row for row in rows if "reward/mean" in row]
    assert len(trained) == 2 and all(row["episode/turns"] > 1 for row in trained)
    assert all(row["mismatch/abs"] <= 1e-5 for row in trained)


TRACE = source("calculator/sums.py", "Traces").get_train_dataset()[1]["messages"]
ADD = [tool.definition for tool in load_tools(str(AGENTS / "calculator/calculator.py")).values()]


def asked(warmed_up: Path, *words: str) -> Any:
    """The answer to the question, the call and the result of a trace, in the forms of OpenAI's client."""
    (call,) = parse_pythonic(TRACE[1]["content"]).calls
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    called = {"role": "assistant", "tool_calls": [{"id": "call0", "type": "function", "function": function}]}
    messages: Any = [TRACE[0], called, {**TRACE[2], "tool_call_id": "call0"}]

    async def ask(served: Served) -> Any:
        address, at = Address(served.sampling, served.name), listening()
        server, task = serve(address, at)
        with address.seated(Seat(served.desk.ask), "secret") as key:
            url = f"http://{LOOPBACK}:{at.getsockname()[1]}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                chat = client.chat.completions.create
                ids = {"return_token_ids": True}
                try:
                    return await chat(model="sft", messages=messages, tools=ADD, max_tokens=9, extra_body=ids)  # type: ignore[call-overload]
                finally:
                    server.should_exit = True
                    await task

    with model_at_desk(str(warmed_up), words) as served:
        return asyncio.run(ask(served))


def test_the_served_calculator_sees_the_call_and_its_result_as_in_a_trace(warmed_up: Path) -> None:
    answer = asked(warmed_up, "actor_rollout_ref.rollout.episode.tool_format=pythonic")
    tokenizer = load_tokenizer(warmed_up / "final")
    seen = "".join([TRACE[0]["content"], TRACE[1]["content"], "\n", TRACE[2]["content"], ">"])
    assert tokenizer.decode(answer.model_extra["prompt_token_ids"]) == seen
    assert answer.choices[0].model_extra["token_ids"]


def test_a_served_model_whose_calls_can_not_be_read_tells_what_to_write(warmed_up: Path) -> None:
    with pytest.raises(openai.BadRequestError, match=r"write actor_rollout_ref\.rollout\.episode\.tool_format"):
        asked(warmed_up)
