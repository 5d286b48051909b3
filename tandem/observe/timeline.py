"""Where the time of a step goes: named parts for ``time/*`` and ``cpu/*``, and a timeline for trace viewers."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.base.phases import phase


class Trace:
    """A Chrome trace (open it in ui.perfetto.dev): a row per process and, inside it, a lane per thread or named lane.

    Events are written as they end, so a crashed run leaves a file that viewers still open; ``close`` makes it whole
    JSON. Times are wall-clock microseconds, so that the files of several processes line up.
    """

    def __init__(self, path: Path, *, process: str = "tandem") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._lock = threading.Lock()
        self._lanes: dict[str, int] = {}
        # The wall clock may jump, the performance counter may not: the offset between them is taken once.
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._write({"ph": "M", "name": "process_name", "pid": os.getpid(), "args": {"name": process}}, first=True)

    def add(self, name: str, begin_ns: int, end_ns: int, lane: str) -> None:
        """Add one event between two readings of ``time.perf_counter_ns``."""
        with self._lock:
            if self._file.closed:
                return
            if lane not in self._lanes:
                self._lanes[lane] = len(self._lanes) + 1
                row = {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": self._lanes[lane]}
                self._write({**row, "args": {"name": lane}})
            begin_us = (begin_ns + self._offset_ns) / 1000
            duration_us = (end_ns - begin_ns) / 1000
            place = {"pid": os.getpid(), "tid": self._lanes[lane]}
            self._write({"ph": "X", "name": name, **place, "ts": begin_us, "dur": duration_us})

    def close(self) -> None:
        """End the file; later events are ignored."""
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()

    def _write(self, event: dict[str, object], *, first: bool = False) -> None:
        self._file.write(("" if first else ",\n") + json.dumps(event))
        self._file.flush()


class Stopwatch:
    """Adds up wall and processor seconds per named part; parts may nest, repeat and run in several threads.

    Processor seconds are those of the whole process while the part ran, all its threads together.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._wall: defaultdict[str, float] = defaultdict(float)
        self._cpu: defaultdict[str, float] = defaultdict(float)
        self._open: dict[object, tuple[str, int]] = {}

    @contextmanager
    def timed(self, part: str, *, lane: str | None = None) -> Iterator[None]:
        """Count what happens inside, an error too, under ``part``; ``lane`` names its row of the trace (default: the
        thread's name)."""
        begin_ns, cpu_begin = time.perf_counter_ns(), time.process_time()
        with self._lock:
            self._open[own := object()] = part, begin_ns
        try:
            with phase(part):
                yield
        finally:
            end_ns, cpu_end = time.perf_counter_ns(), time.process_time()
            with self._lock:
                del self._open[own]
                self._wall[part] += (end_ns - begin_ns) / 1e9
                self._cpu[part] += cpu_end - cpu_begin
            if self._trace is not None:
                self._trace.add(part, begin_ns, end_ns, lane or threading.current_thread().name)

    def open_parts(self) -> list[tuple[str, float]]:
        """Return the parts that go on at this moment, the first to begin first, and the seconds of each so far."""
        with self._lock:
            now = time.perf_counter_ns()
            return [(part, (now - begun) / 1e9) for part, begun in self._open.values()]

    def drain(self) -> dict[str, float]:
        """Return the seconds since the last drain as ``time/PART`` and ``cpu/PART``; the counts start again at zero."""
        with self._lock:
            parts = {f"time/{part}": seconds for part, seconds in self._wall.items()}
            parts |= {f"cpu/{part}": seconds for part, seconds in self._cpu.items()}
            self._wall.clear()
            self._cpu.clear()
        return parts
