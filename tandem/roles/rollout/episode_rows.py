"""From the episodes of a group, once all have ended, to its columns and what is known of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.data.chat import Message
from tandem.episodes.process.pool import Ended
from tandem.episodes.trajectory import Trajectory
from tandem.reward.outcome import Outcome, Verdict, failed
from tandem.roles.rollout.making import Beginning, Made
from tandem.roles.rollout.talk import EpisodeRules, Talk


@dataclass
class Group:
    """The episodes of one prompt."""

    begun: Beginning
    plays: list[Play] = field(default_factory=list)


@dataclass
class Play:
    """One episode as the driver knows it. ``talks`` are its branches; ``own``: those that got their number here."""

    group: Group
    index: int
    talks: dict[int, Talk] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    engine_seconds: float = 0.0
    ended: Ended | None = None

    def begin_anew(self) -> None:
        """Forget what was done."""
        self.talks, self.own, self.engine_seconds = {}, set(), 0.0

    @property
    def cut(self) -> str:
        """The limit that has ended the episode, or one of its branches; empty for none."""
        return next((talk.cut for _, talk in _by_number(self.talks) if talk.cut), "")

    @property
    def answered(self) -> list[tuple[int, Talk]]:
        """The branches in which the model has answered, by their numbers, which is the order of a sample."""
        return [(number, talk) for number, talk in _by_number(self.talks) if talk.turns]

    @property
    def messages(self) -> list[Message] | None:
        """What was said, branch by branch: the messages of those beside the first have their number in ``branch``."""
        talks = self.answered or _by_number(self.talks)
        said = [(number, talk.messages) for number, talk in talks if talk.messages is not None]
        if not said:
            return None
        return [{**one, "branch": number} if number else one for number, messages in said for one in messages]

    def path(self) -> Trajectory:
        """Return all that was sampled as one trajectory, in which each branch but the first begins anew."""
        begun = [talk.trajectory for _, talk in _by_number(self.talks) if talk.trajectory is not None]
        answered = [path.until_sampled() for path in begun if path.turns]
        if answered:
            return Trajectory.joined(answered)
        return Trajectory(list(self.group.begun.prompt.prompt_ids)) if not begun else begun[0].until_sampled()


def _by_number(talks: Mapping[int, Talk]) -> list[tuple[int, Talk]]:
    return [(number, talks[number]) for number in sorted(talks)]


def as_made(group: Group, rules: EpisodeRules, tokenizer: Any, routes: int = 0) -> Made:
    """Return a whole group as columns, with the verdicts that its episodes brought. ``routes``: bytes of the record of
    a token.
    """
    begun, count = group.begun, len(group.plays)
    prompt = begun.prompt
    paths = [play.path() for play in group.plays]
    verdicts = [_verdict(play, path) for play, path in zip(group.plays, paths, strict=True)]
    rows = [path.columns(restarts=rules.restarts, routes=routes) for path in paths]
    facts = [_facts(play, path) for play, path in zip(group.plays, paths, strict=True)]
    if rules.turn_rewards:
        for play, path, verdict, row, fact in zip(group.plays, paths, verdicts, rows, facts, strict=True):
            fact["turn_rewards"] = _turn_rewards(play, path, verdict)
            row["token_rewards"] = path.rewards(fact["turn_rewards"])
    batch = DataProto(
        {
            "prompts": Ragged.from_rows([torch.tensor(path.prompt, dtype=torch.int64) for path in paths]),
            **{name: Ragged.from_rows([row[name] for row in rows]) for name in rows[0]},
            "group_ids": torch.full((count,), begun.group_id, dtype=torch.int64),
            "sample_index": torch.arange(count),
            "truncated": torch.tensor([bool(play.cut) for play in group.plays]),
        },
        {
            "uid": [prompt.uid] * count,
            "prompt_text": [prompt.text] * count,
            "ground_truth": [prompt.ground_truth] * count,
            "data_source": [prompt.data_source] * count,
            "extra_info": [prompt.extra_info] * count,
            "messages": [play.messages for play in group.plays],
            "answer_text": [_last_text(play, tokenizer) for play in group.plays],
            "episode": facts,
        },
        tokenizer=tokenizer,
    )
    return Made(begun.key, batch, tuple(verdicts))


def _last_text(play: Play, tokenizer: Any) -> str:
    """Return the text of the first branch's last turn, without special tokens: what a scorer scores."""
    if not play.answered:
        return str(tokenizer.decode([], skip_special_tokens=True))
    path = play.answered[0][1].trajectory
    assert path is not None
    path = path.until_sampled()
    return str(tokenizer.decode(path.ids[len(path.ids) - path.turns[-1] :], skip_special_tokens=True))


def _verdict(play: Play, path: Trajectory) -> Verdict | None:
    """Return the verdict that the episode brought; a failure where it said nothing, since there is nothing to score."""
    assert play.ended is not None
    if play.ended.verdict is None and not path.turns:
        return failed("the episode ended before the policy said anything")
    return play.ended.verdict


def _turn_rewards(play: Play, path: Trajectory, verdict: Verdict | None) -> list[float]:
    """Return a reward for each turn, branch by branch; none counts in an episode that failed."""
    assert play.ended is not None
    if verdict is not None and verdict.outcome is not Outcome.SCORED:
        return [0.0] * len(path.turns)
    given: Mapping[int, Sequence[float]] = play.ended.turn_rewards
    return [
        reward
        for number, talk in play.answered
        for reward in (*given.get(number, ()), *[0.0] * (talk.turns - len(given.get(number, ()))))
    ]


def _facts(play: Play, path: Trajectory) -> dict[str, Any]:
    """Return what is worth knowing of one episode."""
    assert play.ended is not None
    facts = dict.fromkeys(("tool_calls", "tool_errors", "unparsed", "tool_ms"), 0.0) | dict(play.ended.facts)
    return {
        "turns": len(path.turns),
        "tool_calls": facts["tool_calls"],
        "tool_errors": facts["tool_errors"],
        "unparsed": facts["unparsed"],
        "tool_seconds": facts["tool_ms"] / 1000,
        "engine_seconds": play.engine_seconds,
        "seconds": play.ended.seconds,
        "sampled": sum(path.turns),
        "cut": play.cut,
        "rewritten": sum(talk.rewritten for talk in play.talks.values()),
        "branches": max(1, len(play.answered)),
        "messages": play.messages,
    }
