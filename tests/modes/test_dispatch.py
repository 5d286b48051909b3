"""In the second epoch the prompts with the longest answers of the first are begun first, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

from tandem.control.entry import LOOPS
from tandem.dataflow.gate import Closed
from tandem.dataflow.tickets import Ticket
from tests.e2e.seven import prepare

STEPS, PROMPTS = 4, 5  # of 10 prompts: two epochs


def begun(task: Path, folder: Path, dispatch: str) -> tuple[list[Ticket], list[int], list[list[str]]]:
    """The tickets as they were given, the longest answer to each, the prompts of each step in ticket order."""
    session = prepare(
        task,
        f"trainer.output_dir={folder}",
        "execution={mode: hybrid, max_staleness: 0}",
        f"actor_rollout_ref.rollout.dispatch={dispatch}",
        f"trainer.total_steps={STEPS}",
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.rollout.n=2",
    )
    gate, given = session.rollout.gate, list[Ticket]()
    admit, end_step = gate.admit, session.run.end_step
    longest: list[int] = []
    prompts: list[list[str]] = []

    def watched(engine: str) -> Ticket | Closed:
        answer = admit(engine)
        if isinstance(answer, Ticket):
            given.append(answer)
        return answer

    def ended(step: int, batch, update) -> None:  # type: ignore[no-untyped-def]
        longest.extend(batch.ragged("responses").lengths.reshape(PROMPTS, 2).amax(1).tolist())
        prompts.append(list(batch.non_tensor_batch["prompt_text"])[::2])
        end_step(step, batch, update)

    gate.admit = watched
    object.__setattr__(session.run, "end_step", ended)
    with session.run.running():
        LOOPS["hybrid"](session)
    return given, longest, prompts


def test_the_longest_answers_of_the_last_epoch_are_begun_first(task: Path, tmp_path: Path) -> None:
    given, longest, prompts = begun(task, tmp_path / "ordered", "longest_first")
    assert [(t.partition, t.place) for t in given[:10]] == [(k, place) for k in range(2) for place in range(PROMPTS)]
    seen = dict(zip((p for step in prompts[:2] for p in step), longest[:10], strict=True))
    for step in (2, 3):
        places = [ticket.place for ticket in given if ticket.partition == step]
        expected = [seen[prompts[step][place]] for place in places]
        assert sorted(places) == list(range(PROMPTS))
        assert expected == sorted(expected, reverse=True)
    in_order, _, same = begun(task, tmp_path / "plain", "in_order")
    assert same == prompts
    assert in_order == [Ticket(k, place) for k in range(STEPS) for place in range(PROMPTS)]
