"""What a test's Ray cluster starts as Python: workers are forked from the server, everything else is Python as ever.

Run by the small program that ``warm_workers`` writes: ``python -I -S ray_worker.py SOCKET PYTHON WORDS…``.
"""

from __future__ import annotations

import json
import os
import socket
import sys

_WORKER = "/default_worker.py"


def main(path: str, python: str, words: list[str]) -> None:
    """Ask the server for the worker, which tells Ray its own process id, and end; become anything else."""
    if not words[0].endswith(_WORKER):
        os.execv(python, [python, *words])
    request = {
        "words": words,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "files": [0, 1, 2],
        "session": True,
        "adopted": False,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(path)
        socket.send_fds(asking, [json.dumps(request).encode()], [0, 1, 2])
        asking.recv(64)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
