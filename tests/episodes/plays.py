"""Episodes that tests play: good ones, and each way in which one goes wrong. Their prompts say which happens."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any


async def talk(task: Any, policy: Any, *, turns: int = 2, on_the_way: bool = True) -> float:
    """Some turns, whatever the model says; the reward is the number of different tokens that it sampled."""
    messages = list(task.messages)
    seen: set[int] = set()
    for turn in range(turns):
        answer = await policy.chat(messages)
        seen |= set(answer.token_ids)
        if on_the_way:
            policy.reward = float(len(seen))
        messages += [answer.message, {"role": "user", "content": str(turn)}]
    return float(len(seen))


async def tokens(task: Any, policy: Any, *, turns: int = 2) -> float:
    """The same in tokens: after each turn comes the first token of the prompt again."""
    ids = list(task.prompt_ids)
    for _ in range(turns):
        ids += (await policy.generate(ids)).token_ids
        ids.append(task.prompt_ids[0])
        policy.reward = float(len(ids))  # of an episode that a limit ends in the next turn
    return float(len(ids))


async def faulty(task: Any, policy: Any) -> Any:
    """What the prompt says: it raises, hangs, blocks, dies, returns nonsense, or changes what was said."""
    messages = list(task.messages)
    answer = await policy.chat(messages)
    await asyncio.sleep(0.01)
    match task.extra_info["fate"]:
        case "raises":
            raise ValueError("the wheel came off")
        case "exits":
            raise SystemExit(3)
        case "hangs":
            await asyncio.sleep(1000)
        case "refuses":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue
        case "blocks":
            time.sleep(1000)
        case "dies":
            os.kill(os.getpid(), 9)
        case "nonsense":
            return "very good"
        case "rewrites":
            messages[0] = {"role": "user", "content": "something else"}
            await policy.chat([*messages, answer.message, {"role": "user", "content": "go on"}])
        case "parallel":
            new = [*messages, answer.message, {"role": "user", "content": "go on"}]
            await asyncio.gather(policy.chat(new), policy.chat(new))
        case "silent":
            return None
    return 1.0


async def errands(task: Any, policy: Any, *, longest: float = 3.0) -> Any:
    """One to three turns, each followed by a tool that takes a lognormal time; then what the prompt says."""
    dice = random.Random(task.seed)
    messages = list(task.messages)
    for turn in range(dice.randint(1, 3)):
        answer = await policy.chat(messages)
        await asyncio.sleep(min(longest, longest / 4 * dice.lognormvariate(0.0, 1.0)))
        messages += [answer.message, {"role": "user", "content": str(turn)}]
    match task.extra_info["fate"]:
        case "raises":
            raise ValueError("the wheel came off")
        case "exits":
            raise SystemExit(3)
        case "hangs":
            await asyncio.sleep(1000)
        case "dies":
            os.kill(os.getpid(), 9)
        case "nonsense":
            return "very good"
    return 1.0


async def once(task: Any, policy: Any) -> None:
    """One turn, which the reward manager scores."""
    await policy.chat(task.messages)


async def chatter(task: Any, policy: Any, *, turns: int = 2) -> None:
    """Turns that the episode doesn't grade."""

    def named(role: str) -> str:
        return role

    messages = list(task.messages)
    for _ in range(turns):
        answer = await policy.chat(messages)
        messages += [answer.message, {"role": named("user"), "content": "go on"}]


async def forgetful(task: Any, policy: Any, *, turns: int = 2) -> float:
    """Turns that each begin with what the task says, and with the last answer in the words of a user."""
    seen: set[int] = set()
    said: list[dict[str, str]] = []
    for _ in range(turns):
        answer = await policy.chat([*task.messages, *said])
        seen |= set(answer.token_ids)
        policy.reward = float(len(seen))
        said = [{"role": "user", "content": answer.content[:3].replace("\n", "")}]
    return float(len(seen))


async def counted(task: Any, policy: Any) -> float:
    """What ``agent.py`` does, as a function."""
    messages, said = list(task.messages), 0
    for _ in range(2):
        answer = await policy.chat(messages)
        said += len(answer.content)
        messages += [answer.message, {"role": "user", "content": "12"}]
    return float(said)


async def cut_short(task: Any, policy: Any) -> float:
    """A turn that a text stops, one that its limit cuts, and a whole one."""
    messages = list(task.messages)
    for options in ({"stop": ["2"]}, {"max_tokens": 2}, {}):
        answer = await policy.ask({"op": "chat", "messages": messages, "tools": None, **options})
        messages += [answer.message, {"role": "user", "content": "is it"}]
    return 1.0


async def early(task: Any, policy: Any, *, odds: int = 0) -> float:
    """It raises before the model is asked anything: one time in ``odds``, or where the prompt says so."""
    if task.seed % odds == 0 if odds else task.extra_info["fate"] == "raises":
        raise ValueError("no wheels")
    return float(len(set((await policy.chat(task.messages)).token_ids)))


async def stepwise(task: Any, policy: Any, *, turns: int = 3, how: str = "call") -> Any:
    """Turns each of which is worth the number of its tokens; the whole is worth 1 besides."""
    messages, worth = list(task.messages), []
    for turn in range(turns):
        answer = await policy.chat(messages)
        worth.append(float(len(answer.token_ids)))
        if how == "call":
            policy.reward_turn(worth[-1] - 1)
            policy.reward_turn(1.0, turn + 1)
        messages += [answer.message, {"role": "user", "content": str(turn)}]
    match how:
        case "call":
            return 1.0
        case "short":
            return {"score": 1.0, "turn_rewards": worth[1:]}
        case "fails":
            return {"score": "much", "turn_rewards": worth}
    return {"score": 1.0, "turn_rewards": worth}


async def told(task: Any, policy: Any) -> dict[str, float]:
    """Two turns, and a further number beside the score."""
    first = await policy.chat(task.messages)
    await policy.chat([*task.messages, first.message, {"role": "tool", "content": "17"}])
    return {"score": float(len(set(first.token_ids))), "first_turn": float(len(first.token_ids))}


async def branching(task: Any, policy: Any, *, branches: int = 3, turns: int = 2, numbered: bool = True) -> Any:
    """Conversations side by side, each of some turns; the reward is the number of tokens that all of them sampled."""

    async def one(number: int) -> int:
        messages = [*task.messages[:-1], {"role": "user", "content": f"{task.messages[-1]['content']}{number}"}]
        sampled = 0
        for turn in range(turns):
            answer = await policy.chat(messages, **({"branch": number} if numbered else {}))
            sampled += len(answer.token_ids)
            if task.extra_info.get("rewards"):
                policy.reward_turn(10.0 * number + turn, branch=number)
            messages += [answer.message, {"role": "user", "content": str(turn)}]
            if answer.finish_reason == "length":
                break
        return sampled

    policy.reward = 0.0
    return float(sum(await asyncio.gather(*map(one, range(branches)))))
