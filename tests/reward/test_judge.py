"""A judge behind a real address on this machine: grades, failures, retries, secrets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tandem.base.deadline import Deadline
from tandem.base.errors import RewardError
from tandem.reward.outcome import Outcome, Sample
from tandem.reward.process.pool import ScoringPool
from tandem.reward.resolve import problems, resolve
from tandem.reward.scorers import judge as judge_module
from tandem.reward.scorers.judge import Judge

KEY = "sk-very-secret"
Reply = tuple[int, dict[str, str], bytes]


def graded(text: str) -> Reply:
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@dataclass
class Service:
    """What the server was asked, and what it answers: ``answer`` gets the number of the request and its content."""

    url: str = ""
    answer: Callable[[int, str], Reply] = lambda number, content: graded("Grade: 10")
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    at_once: int = 0
    connections: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            with made.lock:
                made.connections += 1
            super().setup()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with made.lock:
                made.bodies.append(body)
                made.headers.append(dict(self.headers))
                made.paths.append(self.path)
                number = len(made.bodies)
                made.at_once += 1
                made.most_at_once = max(made.most_at_once, made.at_once)
            status, headers, content = made.answer(number, body["messages"][0]["content"])
            with made.lock:
                made.at_once -= 1
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A judge that has left."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("JUDGE_KEY", KEY)


def ask(judge: Judge, response: str = "7", prompt: str = "3+4=", truth: object = "7") -> dict[str, float]:
    return asyncio.run(judge(response, prompt, truth))


def test_a_judge_may_see_all_that_was_said(service: Service) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    episode = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "it is 2"},
    ]
    judge = Judge(base_url=service.url, model="m", template="{conversation}")
    asyncio.run(judge("it is 2", "1+1?", None, episode))
    asyncio.run(judge("it is 2", "1+1?", None, episode[:1]))
    asyncio.run(judge("it is 2", "1+1?"))
    whole, *plain = (body["messages"][0]["content"] for body in service.bodies)
    said = 'user: 1+1?\n\nassistant: {"name": "add", "arguments": {"x": 1}}\n\ntool: 2\n\nassistant: it is 2'
    assert whole == said
    assert plain == ["user: 1+1?\n\nassistant: it is 2"] * 2


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Fine.\nGrade: 10", 1.0),
        ("grade = 2.5", 0.25),
        ("**Grade:** **4**", 0.4),
        ("Grade: 9, no: Grade: 0", 0.0),
    ],
)
def test_the_last_grade_of_the_reply_counts(service: Service, reply: str, score: float) -> None:
    service.answer = lambda number, content: graded(reply)
    assert ask(Judge(base_url=service.url, model="m"))["score"] == pytest.approx(score)


def test_the_request_is_a_chat_completion(service: Service) -> None:
    judge = Judge(base_url=service.url + "/", model="big", api_key_env="JUDGE_KEY", temperature=0.5, max_tokens=9)
    ask(judge, response="so {prompt}", prompt="3+4=")
    assert service.paths == ["/v1/chat/completions"]
    assert service.headers[0]["Authorization"] == f"Bearer {KEY}"
    (body,) = service.bodies
    assert {key: body[key] for key in ("model", "temperature", "max_tokens")} == {
        "model": "big",
        "temperature": 0.5,
        "max_tokens": 9,
    }
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert "<answer>\nso {prompt}\n</answer>" in message["content"]
    assert "3+4=" in message["content"]


def test_template_grade_and_range_are_the_users(service: Service) -> None:
    service.answer = lambda number, content: graded(f"[[{content}]]")
    judge = Judge(base_url=service.url, model="m", template="{response}", grade=r"\[\[(.*)\]\]", lowest=-1, highest=1)
    assert ask(judge, response="0.5") == {"score": 0.75, "grade": 0.5, "reply": "[[0.5]]"}
    for reply, reason in (("2", "is not within -1 to 1"), ("x", "'x' is no number"), ("nan", "is not within")):
        with pytest.raises(RewardError, match=reason):
            ask(judge, response=reply)
    service.answer = lambda number, content: graded("no grade here")
    with pytest.raises(RewardError, match="reply has no grade: 'no grade here'"):
        ask(judge)


@pytest.mark.parametrize("status", [429, 500, 503, 408])
def test_what_may_pass_is_tried_again(service: Service, status: int) -> None:
    service.answer = lambda number, content: (status, {}, b"busy") if number < 3 else graded("Grade: 5")
    assert ask(Judge(base_url=service.url, model="m"))["score"] == 0.5
    assert len(service.bodies) == 3


@pytest.mark.parametrize(
    "reply", [b"[" * 200_000, b"<html>", b"{}", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}']
)
def test_a_reply_that_is_none_is_tried_again(service: Service, reply: bytes) -> None:
    service.answer = lambda number, content: (200, {}, reply) if number == 1 else graded("Grade: 5")
    assert ask(Judge(base_url=service.url, model="m"))["score"] == 0.5


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_a_refusal_is_final_and_hides_the_key(service: Service, status: int) -> None:
    headers = {"Location": service.url} if status == 302 else {}
    service.answer = lambda number, content: (status, headers, f"wrong key {KEY}".encode())
    with pytest.raises(RewardError, match=rf"refuses: status {status}: wrong key \*\*\*$"):
        ask(Judge(base_url=service.url, model="m", api_key_env="JUDGE_KEY"))
    assert len(service.bodies) == 1


def test_attempts_end(service: Service) -> None:
    service.answer = lambda number, content: (503, {}, b"down")
    with pytest.raises(RewardError, match="failed 2 times, the last time by status 503: down"):
        ask(Judge(base_url=service.url, model="m", attempts=2))
    service.answer = lambda number, content: (429, {"Retry-After": "3600"}, b"later")
    with pytest.raises(RewardError, match="failed once, the last time by status 429"):
        ask(Judge(base_url=service.url, model="m"))
    with pytest.raises(RewardError, match=r"failed 2 times, the last time by ConnectError"):
        ask(Judge(base_url="http://127.0.0.1:9/v1", model="m", attempts=2))


def test_a_judge_that_says_nothing_is_left(service: Service) -> None:
    gone = threading.Event()
    service.answer = lambda number, content: graded(str(gone.wait(30)))
    try:
        with pytest.raises(RewardError, match=r"failed 2 times, the last time by .*timed out"):
            ask(Judge(base_url=service.url, model="m", call_s=0.1, attempts=2))
        with pytest.raises(RewardError, match=r"no grade within 0\.2 s|failed once"):
            ask(Judge(base_url=service.url, model="m", total_s=0.2))
    finally:
        gone.set()


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: "])
def test_a_judge_that_says_little_at_a_time_is_left_and_its_connection_closed(start: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        calls: list[socket.socket] = []
        ended: list[bool] = []

        def serve() -> None:
            call = server.accept()[0]
            calls.append(call)
            with contextlib.suppress(OSError):
                call.sendall(start)
                for _ in range(1000):
                    call.sendall(b"x")
                    time.sleep(0.02)
                return
            ended.append(True)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        judge = Judge(base_url=f"http://127.0.0.1:{server.getsockname()[1]}/v1", model="m", call_s=0.2, attempts=1)
        with pytest.raises(RewardError, match="timed out"):
            ask(judge)
        thread.join(10)
        assert ended == [True]  # the connection is closed
        calls[0].close()


def test_so_many_are_under_way_at_once(service: Service) -> None:
    def slow(number: int, content: str) -> Reply:
        time.sleep(0.05)
        return graded("Grade: 1")

    service.answer = slow
    judge = Judge(base_url=service.url, model="m", concurrency=3)

    async def many() -> list[dict[str, float]]:
        return await asyncio.gather(*(judge("7", "3+4=") for _ in range(9)))

    assert len(asyncio.run(many())) == 9
    assert service.most_at_once == 3


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"base_url": "localhost:8000"}, "is no address"),
        ({"api_key_env": "NO_SUCH_KEY"}, "no such environment variable"),
        ({"template": "{prompt}"}, "shows no answer"),
        ({"grade": "("}, "no regular expression"),
        ({"grade": "[0-9]"}, "has no group"),
        ({"lowest": 1, "highest": 1}, "higher one"),
        ({"attempts": 0}, "1 or more"),
    ],
)
def test_wrong_parameters_are_told_before_anything_is_asked(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        Judge(**{"base_url": "http://localhost/v1", "model": "m", **parameters})


def test_in_processes_a_sample_without_a_grade_has_no_reward_and_the_others_have(service: Service) -> None:
    service.answer = lambda number, content: graded("Grade: 5") if "good" in content else (401, {}, KEY.encode())
    parameters = {"base_url": service.url, "model": "m", "api_key_env": "JUDGE_KEY"}
    with ScoringPool(resolve("judge", None, parameters), deadline_s=30.0) as pool:
        scores = pool.collect(pool.submit([Sample("good"), Sample("bad"), Sample("good")]), Deadline(60))
    assert scores.rewards[::2] == (0.5, 0.5)
    assert scores.outcomes[1] is Outcome.FAILED
    assert "refuses: status 401: ***" in scores.reasons[1]
    assert scores.report()["grade"] == 5.0
    assert KEY not in repr(scores)


def test_the_plan_knows_its_parameters() -> None:
    assert problems("judge", None, {"base_url": "http://localhost/v1", "model": "m"}) == []
    keys = [found.key for found in problems("judge", None, {"api_key": KEY, "model": "m"})]
    assert keys == ["reward_manager.api_key", "reward_manager.base_url"]


def test_connections_are_kept_from_batch_to_batch(service: Service) -> None:
    judge = Judge(base_url=service.url, model="m", concurrency=2)

    async def batch() -> list[dict[str, float | str]]:
        return await asyncio.gather(*(judge("7", "3+4=") for _ in range(6)))

    for _ in range(3):
        assert len(asyncio.run(batch())) == 6
    assert len(service.bodies) == 18 and service.connections <= 2
