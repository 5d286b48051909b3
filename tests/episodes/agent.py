"""An outside program that talks to the policy. It needs nothing but Python; its argument says how it treats answers."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request


def ask(messages: list[dict], **more: object) -> urllib.request.Request:
    return urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, **more}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )


def chat(messages: list[dict], **more: object) -> dict:
    """The message of the policy's answer."""
    with urllib.request.urlopen(ask(messages, **more)) as response:
        return json.load(response)["choices"][0]["message"]


def streamed(messages: list[dict]) -> tuple[dict, int]:
    """The same, put together from a stream; and from how many parts of its text."""
    parts = []
    with urllib.request.urlopen(ask(messages, stream=True)) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                parts += [choice["delta"].get("content") for choice in json.loads(data)["choices"]]
    texts = [part for part in parts if part]
    return {"role": "assistant", "content": "".join(texts)}, len(texts)


def treated(message: dict, how: str) -> dict:
    """The message as a client of that kind keeps it."""
    if how == "trims":
        return message | {"content": message["content"].strip()}
    if how == "drops_reasoning":
        return message | {"content": message["content"].partition("</think>")[2]}
    if how == "reorders":
        calls = [call | {"function": reordered(call["function"])} for call in message["tool_calls"]]
        return message | {"tool_calls": calls, "content": None}
    return message


def reordered(function: dict) -> dict:
    """The same call, spelt in another way."""
    arguments = json.loads(function["arguments"])
    return {"arguments": json.dumps(dict(reversed(arguments.items())), indent=1), "name": function["name"]}


def main() -> None:
    """Two turns; the reward is the length of what was said."""
    task, how = json.load(sys.stdin), sys.argv[1]
    if how == "fails":
        sys.exit("out of patience")
    if how == "hangs":
        with open(sys.argv[2], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    if how == "babbles":
        print("very good")
        return
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}] if how == "reorders" else None
    messages, said, parts = task["messages"], 0, 0
    for _ in range(30 if how == "endless" else 2):
        if how == "streams":
            message, count = streamed(messages)
            parts += count
        else:
            message = chat(messages, tools=tools)
        said += len(message["content"] or "")
        said += len(message.get("tool_calls") or ())
        messages = [*messages, treated(message, how), {"role": "user", "content": "12"}]
    print("some words first")
    print(json.dumps({"score": said, "turns_seen": 2, "parts": parts}))


main()
