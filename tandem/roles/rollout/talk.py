"""One branch of an episode as the driver knows it: what was said, what was sampled, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tandem.base.errors import DataError
from tandem.data.chat import Message, encode_chat_prompt
from tandem.data.prompts import Prompt
from tandem.data.tools import Tools
from tandem.episodes.conversation import checked_new
from tandem.episodes.past import Added, Past, after_ids, after_messages, after_text, check_ids, check_offer, plain
from tandem.episodes.replies import reply_of
from tandem.episodes.trajectory import Trajectory
from tandem.rollout.protocol import SampleOutput


class Over(Exception):
    """A limit is reached; its text is which one."""


@dataclass(frozen=True)
class EpisodeRules:
    """What holds for all episodes: at most ``max_turns`` with ``max_sampled`` tokens, ``max_prompt`` before the first.

    ``tools`` are on offer, and calls of them are written as ``tool_format`` says. ``past``: see there.
    ``turn_rewards``: groups have the column ``token_rewards``. ``streams``: a turn may be told while it is drawn,
    since no new weights make it begin anew. ``branches`` may go on side by side, each with ``max_turns`` of its own and
    an equal share of the tokens, so that none has less because another was faster.
    """

    max_turns: int
    max_prompt: int
    tools: Tools | None
    tool_format: str | None
    past: Past = "fixed"
    turn_rewards: bool = False
    streams: bool = True
    max_sampled: int | None = None
    branches: int = 1

    @property
    def restarts(self) -> bool:
        """Whether a context may begin anew within a sample."""
        return self.past != "fixed" or self.branches > 1


@dataclass
class Talk:
    """A branch. ``messages`` None: nothing was said yet, or it talks in tokens. ``open``: it awaits an answer.

    ``beside`` others: its prompt stands among the responses and takes room there. ``cut`` is the limit that ended it.
    """

    beside: bool = False

    trajectory: Trajectory | None = None
    messages: list[Message] | None = None
    tools: Tools | None = None
    rewritten: int = 0
    open: bool = False
    cut: str = ""

    @property
    def turns(self) -> int:
        """How often the model has answered here."""
        return 0 if self.trajectory is None else len(self.trajectory.turns)

    def goes_on(self, question: Mapping[str, Any]) -> int:
        """Return how much of what stands here ``question`` begins with: all of it, else 0."""
        if question["op"] == "chat" and self.messages is not None and isinstance(question["messages"], list):
            known, given = self.messages, question["messages"]
            same = len(given) > len(known) and [*map(_plain, given[: len(known)])] == [*map(_plain, known)]
            return len(known) if same else 0
        if question["op"] == "generate" and self.trajectory is not None:
            context = self.trajectory.context
            return len(context) if question["token_ids"][: len(context)] == context else 0
        return 0

    def ask(
        self,
        question: Mapping[str, Any],
        prompt: Prompt,
        rules: EpisodeRules,
        tokenizer: Any,
        ends: Sequence[int],
        most: int,
    ) -> int:
        """Take a question as what is said; return how many tokens its answer may have, of ``most`` for all turns.

        Raises ``Over`` beyond a limit, ``DataError`` for what can't be asked.
        """
        trajectory, turn = self.trajectory, self.turns
        talk = self.messages is not None or trajectory is None
        if (question["op"] == "chat") != talk and turn and rules.past == "fixed":
            raise DataError("an episode talks in messages or in tokens, and not in both: keep to chat(), or generate()")
        if question["op"] == "chat":
            added = self._chat(question, prompt, rules, tokenizer, ends)
        else:
            added = self._generate(question, rules, tokenizer)
        if turn == rules.max_turns:
            raise Over("turns")
        if trajectory is None and len(added.ids) > rules.max_prompt:
            raise DataError(
                f"it begins with {len(added.ids)} tokens, more than data.max_prompt_length = {rules.max_prompt}"
            )
        left = most - (0 if trajectory is None else len(trajectory.ids) + len(added.ids))
        if self.beside:
            left -= len(added.ids if trajectory is None else trajectory.prompt)
        if rules.max_sampled is not None:
            sampled = 0 if trajectory is None else sum(trajectory.turns)
            left = min(left, rules.max_sampled // rules.branches - sampled)
        if left < 1:
            raise Over("tokens")
        if trajectory is None:
            self.trajectory = Trajectory(list(added.ids))
        else:
            trajectory.insert(added.ids, anew=added.anew)
            self.rewritten += added.anew
        return min(left, question.get("max_tokens") or left)

    def tool_format(self, rules: EpisodeRules) -> str | None:
        """Return how calls in the next turn are written, where it may have some."""
        return rules.tool_format if self.messages is not None and self.tools else None

    def _chat(
        self, question: Mapping[str, Any], prompt: Prompt, rules: EpisodeRules, tokenizer: Any, ends: Sequence[int]
    ) -> Added:
        """Return what messages add, and take them as what is said; at first they are the prompt."""
        given, tools = question["messages"], rules.tools
        if question["tools"] is not None:
            tools = question["tools"]
            check_offer(tokenizer, tools, rules.tool_format)
        if self.trajectory is None:
            messages = checked_new([], given)
            if question["tools"] is None and prompt.messages is not None and messages == list(prompt.messages):
                added = Added(list(prompt.prompt_ids))
            else:
                added = Added(encode_chat_prompt(tokenizer, messages, tools=tools)[1])
            self.tools = tools
        else:
            past = rules.past
            if past != "fixed" and tools != self.tools:  # what is offered stands before all else
                self.tools, self.messages = tools, None
            context = self.trajectory.context
            added = after_messages(tokenizer, context, self.messages, given, ends=ends, tools=self.tools, past=past)
        self.messages = list(given)
        return added

    def _generate(self, question: Mapping[str, Any], rules: EpisodeRules, tokenizer: Any) -> Added:
        """Return what tokens or a text add."""
        context = [] if self.trajectory is None else self.trajectory.context
        self.messages = None
        if question["op"] == "complete":
            return after_text(tokenizer, context, question["text"], past=rules.past)
        ids: list[int] = question["token_ids"]
        check_ids(tokenizer, ids)
        return after_ids(context, ids, past=rules.past)

    def hear(
        self,
        question: Mapping[str, Any],
        sample: SampleOutput,
        context_routes: torch.Tensor | None,
        stop: str,
        rules: EpisodeRules,
        tokenizer: Any,
        ends: Sequence[int],
    ) -> dict[str, Any]:
        """Take a sampled turn, which ``stop`` has ended; return it as the episode sees it. A chat goes on with its
        message.
        """
        assert self.trajectory is not None
        context = self.trajectory.context
        self.trajectory.sample(sample, context_routes)
        reply = reply_of(
            tokenizer,
            sample,
            ends,
            context,
            tool_format=self.tool_format(rules),
            stop=stop,
            turn=self.turns,
            details=bool(question.get("details")),
        )
        if self.messages is not None:
            self.messages.append(reply["message"])
        return reply


def _plain(message: Any) -> Any:
    """Return what a message says; what is none as it is."""
    try:
        return plain(message)
    except (AttributeError, KeyError, TypeError):
        return message
