"""A hub that can't be reached is asked no more, and the cache gives what it has; one that answers gets its client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import LlamaConfig

from tandem.base.errors import TandemError
from tandem.models.folder.hub import TRIES, where_from
from tandem.models.tokenizer import character_tokenizer, load_tokenizer


@contextmanager
def answering(words: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """The address of a server that says ``words`` to everybody and hangs up, and what it was asked."""
    callers = list[bytes]()

    def serve() -> None:
        while True:
            try:
                line, _ = listening.accept()
            except OSError:
                return
            with line:
                callers.append(line.recv(65536))
                line.sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", callers
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The hub's client as it is without HF_HUB_OFFLINE, which the tests set for all others."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return monkeypatch


def test_a_hub_that_hangs_up_is_not_asked_again_and_again(online: pytest.MonkeyPatch) -> None:
    with answering(b"") as (address, callers):
        online.setattr(constants, "ENDPOINT", address)
        with pytest.raises(TandemError, match="the hub gave none") as caught:
            load_tokenizer("someone/some-model")
        assert TRIES <= len(callers) <= TRIES + 1, callers  # a request of another of its callers may be among them
        assert "\n" not in str(caught.value)


def test_what_is_in_the_cache_needs_no_hub(online: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = tmp_path / "models--someone--some-model"
    character_tokenizer("ab").save_pretrained(kept / "snapshots" / ("1" * 40))
    LlamaConfig().save_pretrained(kept / "snapshots" / ("1" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("1" * 40)
    online.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with answering(b"") as (address, _):
        online.setattr(constants, "ENDPOINT", address)
        assert len(load_tokenizer("someone/some-model")) == 5


@pytest.mark.parametrize("status", ["200 OK", "401 Unauthorized", "503 Service Unavailable"])
def test_a_hub_that_answers_is_left_to_its_client(online: pytest.MonkeyPatch, status: str) -> None:
    with answering(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()) as (address, _):
        online.setattr(constants, "ENDPOINT", address)
        assert where_from("someone/some-model") == {}


def test_nobody_is_asked_for_a_folder_or_where_that_is_forbidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with answering(b"") as (address, callers):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert where_from(tmp_path) == where_from("someone/some-model") == {}
        assert callers == []
