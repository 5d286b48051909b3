"""The OpenAI-compatible address, asked by the real client: synchronous, asynchronous, streaming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest

from tandem.episodes.address.server import LOOPBACK, Address, Seat, listening, serve
from tandem.episodes.policy import Answer, EpisodeOver, PolicyError

CALLS = [{"id": "000100000", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
TALK: Any = [{"role": "user", "content": "hello"}]


def answer(content: str = "well, 12", calls: Any = (), **changed: Any) -> Answer:
    message = {"role": "assistant", "content": content}
    told = {"prompt_tokens": 3, "prompt_ids": [7, 8, 9], "logprobs": [-0.5, -1.0], "texts": ["well,", " 12"]}
    given = {"errors": [], "token_ids": [4, 5], "finish_reason": "stop", "details": told, **changed}
    return Answer(message, content, list(calls), **given)


class Policy:
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self, answers: Any = answer) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = answers

    async def ask(self, question: dict[str, Any], *hear: Any) -> Answer:
        self.asked.append(question)
        await asyncio.sleep(0)
        found: Answer = self._answers() if callable(self._answers) else self._answers
        return found


def at_address(policy: Any, talk: Callable[[str, str], Awaitable[Any]], **options: Any) -> Any:
    """What ``talk`` (base URL, key) makes of an address at which ``policy`` sits."""

    async def run() -> Any:
        address, at = Address({"temperature": 1.0, "top_p": 1.0}), listening()
        server, task = serve(address, at)
        try:
            with address.seated(Seat(policy.ask, **options)) as key:
                return await talk(f"http://{LOOPBACK}:{at.getsockname()[1]}/v1", key)
        finally:
            server.should_exit = True
            await task

    return asyncio.run(run())


def ask(policy: Any, **request: Any) -> Any:
    """The answer to one chat, by the asynchronous client."""

    async def talk(url: str, key: str) -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            return await client.chat.completions.create(**{"model": "policy", "messages": TALK, **request})

    return at_address(policy, talk)


def test_a_chat_is_answered_with_everything_that_was_asked_for() -> None:
    policy = Policy()
    found = ask(
        policy,
        stop=["\n"],
        seed=5,
        max_completion_tokens=9,
        logprobs=True,
        temperature=1,
        extra_body={"return_token_ids": True},
    )
    (choice,) = found.choices
    assert (choice.message.content, choice.finish_reason, choice.message.role) == ("well, 12", "stop", "assistant")
    assert [(one.token, one.logprob) for one in choice.logprobs.content] == [("well,", -0.5), (" 12", -1.0)]
    assert (choice.token_ids, found.prompt_token_ids) == ([4, 5], [7, 8, 9])
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 2)
    (asked,) = policy.asked
    assert asked["messages"] == TALK and asked["tools"] is None and asked["details"]
    assert (asked["stop"], asked["seed"], asked["max_tokens"]) == (["\n"], [5], 9)


def test_calls_come_and_go_in_openais_form() -> None:
    policy = Policy(lambda: answer("", CALLS))
    found = ask(policy, tools=[{"type": "function", "function": {"name": "add", "parameters": {}}}])
    message = found.choices[0].message
    assert found.choices[0].finish_reason == "tool_calls" and message.content is None
    assert json.loads(message.tool_calls[0].function.arguments) == {"x": 1}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "2"}]}
    ask(policy, messages=[*TALK, message, result])
    assert policy.asked[1]["messages"] == [
        *TALK,
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "000100000", "content": "2"},
    ]


def test_each_of_several_choices_has_a_seed_of_its_own() -> None:
    policy = Policy()
    assert [choice.index for choice in ask(policy, n=3, seed=5).choices] == [0, 1, 2]
    assert [asked["seed"] for asked in policy.asked] == [[5], [5, 1], [5, 2]]
    ask(policy, n=2)
    assert [asked["seed"] for asked in policy.asked[3:]] == [None, None]


def test_a_stream_says_what_the_whole_answer_says() -> None:
    async def talk(url: str, key: str) -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            options = {"include_usage": True}
            stream = await client.chat.completions.create(
                model="policy", messages=TALK, n=2, stream=True, stream_options=options
            )
            return [chunk async for chunk in stream]

    chunks = at_address(Policy(lambda: answer("so", CALLS)), talk)
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in own) == "so"
        assert own[0].delta.tool_calls[0].function.name == "add"
        assert [choice.finish_reason for choice in own] == [None, "tool_calls"]
    assert chunks[-1].usage.completion_tokens == 4


class Drawing(Policy):
    """Tells its answer token by token, each once it is told to go on."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.told = 0
        self.go = asyncio.Semaphore(0)
        self._fails = fails

    async def ask(self, question: dict[str, Any], *hear: Any) -> Answer:
        parts = [("well,", 4, -0.5), (" 1", 5, -1.0), ("2", 6, -2.0)]
        for text, token, logprob in parts[:2]:
            await self.go.acquire()
            self.told += 1
            detail = {"token_ids": [token], "logprobs": [logprob], "texts": [text]} if question["details"] else {}
            hear[0]({"text": text, **detail})
        await self.go.acquire()
        if self._fails:
            raise PolicyError("the wheel came off")
        texts, ids, logprobs = ([part[i] for part in parts] for i in range(3))
        told = {"prompt_tokens": 3, "prompt_ids": [7, 8, 9], "logprobs": logprobs, "texts": texts}
        return answer("well, 12", token_ids=ids, details=told)


def test_a_stream_brings_every_token_when_it_is_drawn() -> None:
    policy = Drawing()
    seen: list[Any] = []

    async def talk(url: str, key: str) -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            policy.go.release()
            more: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
            stream = await client.chat.completions.create(model="policy", messages=TALK, stream=True, **more)
            async for chunk in stream:
                seen.append((chunk.choices[0], policy.told))
                policy.go.release()

    at_address(policy, talk)
    assert [(choice.delta.content, told) for choice, told in seen] == [("well,", 1), (" 1", 2), ("2", 2), (None, 2)]
    assert [choice.delta.role for choice, _ in seen] == ["assistant", None, None, None]
    assert [choice.token_ids for choice, _ in seen[:3]] == [[4], [5], [6]]
    assert [[one.logprob for one in choice.logprobs.content] for choice, _ in seen[:3]] == [[-0.5], [-1.0], [-2.0]]
    assert [choice.finish_reason for choice, _ in seen] == [None, None, None, "stop"]


def test_the_synchronous_client_reads_a_text_while_it_is_drawn() -> None:
    policy = Drawing()

    async def talk(url: str, key: str) -> Any:
        loop = asyncio.get_running_loop()

        def run() -> Any:
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                loop.call_soon_threadsafe(policy.go.release)
                found = []
                for chunk in client.completions.create(model="policy", prompt="once", stream=True, logprobs=1):
                    found.append((chunk.choices[0], policy.told))
                    loop.call_soon_threadsafe(policy.go.release)
                return found

        return await asyncio.to_thread(run)

    found = at_address(policy, talk)
    assert [(choice.text, told) for choice, told in found] == [("well,", 1), (" 1", 2), ("2", 2), ("", 2)]
    assert [choice.logprobs.text_offset for choice, _ in found[:3]] == [[0], [5], [7]]


def test_what_goes_wrong_within_a_stream_is_told_in_it() -> None:
    policy = Drawing(fails=True)

    async def talk(url: str, key: str) -> Any:
        policy.go.release()
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            async for _ in await client.chat.completions.create(model="policy", messages=TALK, stream=True):
                policy.go.release()

    with pytest.raises(openai.APIError, match="the wheel came off"):
        at_address(policy, talk)


def test_a_question_whose_client_has_gone_keeps_its_place_until_it_is_answered() -> None:
    policy = Drawing()

    async def talk(url: str, key: str) -> Any:
        body: Any = {"model": "policy", "messages": TALK, "stream": True}
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=30) as client:
            policy.go.release()
            async with client.stream("POST", f"{url}/chat/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    break  # and away
            turned_away = await client.post(f"{url}/chat/completions", json=body)
            for _ in range(5):
                policy.go.release()
            while True:  # the first one is answered, and there is a place again
                async with client.stream("POST", f"{url}/chat/completions", json=body) as answered:
                    if answered.status_code == 200:
                        return turned_away.status_code, answered.status_code
                await asyncio.sleep(0.01)

    assert at_address(policy, talk, waiting=0) == (429, 200)
    assert len(policy.asked) == 0 and policy.told >= 3


def test_the_synchronous_client_completes_texts_and_tokens() -> None:
    policy = Policy()

    async def talk(url: str, key: str) -> Any:
        def run() -> Any:
            with openai.OpenAI(base_url=url, api_key=key) as client:
                models = [model.id for model in client.models.list()]
                text = client.completions.create(model="policy", prompt="once", logprobs=1)
                ids = client.completions.create(model="policy", prompt=[1, 2], stream=True)
                return models, text, "".join(chunk.choices[0].text for chunk in ids)

        return await asyncio.to_thread(run)

    models, text, streamed = at_address(policy, talk)
    assert models == ["policy"] and text.choices[0].text == streamed == "well, 12"
    assert text.choices[0].logprobs.token_logprobs == [-0.5, -1.0] and text.choices[0].logprobs.text_offset == [0, 5]
    assert [(one["op"], one.get("text"), one.get("token_ids")) for one in policy.asked] == [
        ("complete", "once", None),
        ("generate", None, [1, 2]),
    ]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"frequency_penalty": 1.5}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ],
)
def test_what_can_not_be_done_is_refused_by_its_name(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(Policy(), **request_)
    assert refused.value.param == field and field in str(refused.value)  # type: ignore[attr-defined]


def test_what_changes_no_token_is_taken() -> None:
    assert ask(Policy(), user="me", frequency_penalty=0, top_p=1, tool_choice="auto").choices


def test_the_policys_own_refusal_is_told() -> None:
    async def refuse(question: Any, *hear: Any) -> Answer:
        raise PolicyError("the chat template refuses messages")

    policy = Policy()
    policy.ask = refuse  # type: ignore[method-assign]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="template refuses"):
            ask(policy, stream=stream)


def test_the_end_of_an_episode_is_told() -> None:
    async def end(question: Any, *hear: Any) -> Answer:
        raise EpisodeOver("turns")

    policy = Policy()
    policy.ask = end  # type: ignore[method-assign]
    with pytest.raises(openai.BadRequestError, match="limit of turns") as refused:
        ask(policy)
    assert refused.value.code == "episode_over"  # type: ignore[attr-defined]


def test_only_who_has_a_key_is_answered() -> None:
    async def talk(url: str, key: str) -> Any:
        async with httpx2.AsyncClient() as client:
            statuses = [(await client.get(url.replace("/v1", "/health"))).status_code]
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {key}"}):
                statuses.append((await client.get(f"{url}/models", headers=headers)).status_code)
            statuses.append((await client.post(f"{url}/chat/completions", json={})).status_code)
            return statuses

    assert at_address(Policy(), talk) == [200, 401, 401, 200, 401]


class Slow(Policy):
    """Answers once it is told to go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def ask(self, question: dict[str, Any], *hear: Any) -> Answer:
        await self.go.wait()
        return await super().ask(question)


def crowd(count: int, **options: Any) -> tuple[Any, list[int], Slow]:
    """The first response of so many requests at once, the statuses of the others, and who was asked."""
    policy = Slow()

    async def talk(url: str, key: str) -> Any:
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=30) as client:

            def send() -> asyncio.Task[Any]:
                body = {"model": "policy", "messages": TALK}
                return asyncio.ensure_future(client.post(f"{url}/chat/completions", json=body))

            sent = [send() for _ in range(count)]
            done, held = await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
            (first,) = [task.result() for task in done]
            policy.go.set()
            return first, [(await task).status_code for task in held]

    first, others = at_address(policy, talk, **options)
    return first, others, policy


def test_an_exact_run_takes_one_question_at_a_time() -> None:
    refused, others, _ = crowd(2, in_turn=True)
    assert (refused.status_code, others) == (400, [200])
    assert "one thing at a time" in refused.json()["error"]["message"]


def test_more_questions_than_may_wait_are_turned_away_with_a_time_to_come_back() -> None:
    refused, others, policy = crowd(3, waiting=1)  # one is under way, one waits
    assert (refused.status_code, refused.headers["retry-after"], others) == (429, "1", [200, 200])
    assert len(policy.asked) == 2
