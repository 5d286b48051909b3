"""Scorers that behave as scorers in the field do, for processes of a pool to run. The response says how."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time


def obedient(response: str, ground_truth: str = "") -> object:
    """Does what the response says."""
    print("scorers may print", flush=True)
    match response.split():
        case ["sleep", *seconds]:
            time.sleep(float(seconds[0]) if seconds else 3600)
        case ["exit", status]:
            os._exit(int(status))
        case ["quit"]:
            sys.exit(3)
        case ["segfault"]:
            ctypes.string_at(0)
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["raise"]:
            raise ValueError(ground_truth)
        case ["regex"]:
            re.match(r"(a+)+$", "a" * 60 + "b")
        case ["child", file]:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            with open(file, "w") as f:
                f.write(f"{os.getpid()} {child.pid}")
            time.sleep(3600)
        case ["none"]:
            return None
        case ["text"]:
            return "1.0"
        case ["nan"]:
            return float("nan")
        case ["lambda"]:
            return lambda: 1
        case ["pid"]:
            return os.getpid()
        case ["torch"]:
            return "torch" in sys.modules
    return float(response) if response.replace(".", "").isdigit() else 1.0


async def awaiting(response: str) -> float:
    """Waits together with its neighbours, hangs politely or blocks the loop."""
    if response == "block":
        time.sleep(3600)
    await asyncio.sleep(3600 if response == "hang" else 0.3)
    return float(len(response))


class DecodingManager:
    """A batch scorer in the style of the field."""

    def __init__(self, keyword: str = "7") -> None:
        self.keyword = keyword

    def __call__(self, data):
        import torch

        rewards = torch.zeros(len(data), dtype=torch.float32)
        for i, item in enumerate(data):
            text = item.tokenizer.decode(item.batch["responses"])
            if text == "hang":
                time.sleep(3600)
            rewards[i] = float("nan") if text == "nan" else float(self.keyword in text)
        return rewards[:-1] if len(data) == 3 else rewards


class Unmakeable:
    """Its constructor refuses."""

    def __init__(self) -> None:
        raise OSError("no such judge")

    def __call__(self, data):
        return []


class Dying:
    """Its constructor ends the process."""

    def __init__(self) -> None:
        os._exit(9)

    def __call__(self, data):
        return []
