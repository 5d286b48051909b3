"""Records what a terminal shows of commands, and draws it as a moving SVG: ``docs/images/quickstart.svg``.

Run as ``python tools/recording.py record FILE.json COMMAND...`` (again with the same file: the next command below the
first), then ``python tools/recording.py draw FILE.json PICTURE.svg``. The picture has no script and asks for no font;
what takes longer than ``LONGEST_S`` is shown in less, in proportion, and it says so.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLUMNS, ROWS = 100, 40
LONGEST_S, HELD_S, FRAME_S = 20.0, 6.0, 0.4
"""Seconds: the moving part of the picture, its last frame, the least between two frames."""
LETTER, ROW, EDGE = 7.25, 18, 14
"""Pixels: a letter's width, a row's height, the margin."""
_CODE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b\][^\x07]*\x07")

STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre }
rect { fill: #f6f8fa; stroke: #d1d9e0 } .typed { font-weight: 700 } .gone { visibility: hidden }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } rect { fill: #151b23; stroke: #3d444d } }
"""


@dataclass(frozen=True)
class Line:
    """A row of the screen that shows ``text`` from ``start`` to ``end``, in seconds; None: to the end."""

    row: int
    text: str
    start: float
    end: float | None


def record(command: list[str]) -> tuple[int, list[tuple[float, str]]]:
    """Run a command in a terminal of its own; its exit code, and what it wrote with the seconds since its start."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], command, os.environ | {"TERM": "xterm-256color", "NO_COLOR": "1"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began, written = time.monotonic(), list[tuple[float, str]]()
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not data:
            break
        written.append((round(time.monotonic() - began, 3), data.decode("utf-8", "replace")))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), written


def screens(written: Iterable[tuple[float, str]]) -> Iterator[tuple[float, list[str]]]:
    """Yield what a screen of ``COLUMNS`` shows after each piece; it is as high as it needs to be."""
    rows, row, column = [""], 0, 0
    for at, piece in written:
        place = 0
        while place < len(piece):
            code = _CODE.match(piece, place)
            if code:
                place = code.end()
                count = int(code[1]) if code[1] and code[1].isdigit() else 1
                if code[2] == "A":
                    row = max(0, row - count)
                elif code[2] == "K":
                    rows[row] = "" if code[1] == "2" else rows[row][:column]
                continue
            letter, place = piece[place], place + 1
            if letter == "\n":
                row += 1
            elif letter == "\r":
                column = 0
            elif letter.isprintable():
                if column == COLUMNS:
                    row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
                rows[row] = rows[row][:column].ljust(column) + letter + rows[row][column + 1 :]
                column += 1
            rows += [""] * (row + 1 - len(rows))
        yield at, [line.rstrip() for line in rows]


def lines_of(commands: list[dict[str, Any]]) -> list[Line]:
    """Return each text of each row with its time, for commands below one another that follow at once."""
    written, begun = list[tuple[float, str]](), 0.0
    for command in commands:
        pieces = [(begun + at, text) for at, text in command["written"]]
        written += [(begun, f"$ {command['command']}\r\n"), *pieces]
        begun = max([begun, *(at for at, _ in pieces)]) + 1.0
    found, shown, last = list[Line](), dict[int, tuple[str, float]](), -FRAME_S
    pace = max(1.0, begun / LONGEST_S)
    frames = list(screens(written))
    for i, (at, rows) in enumerate(frames):
        if i + 1 < len(frames) and frames[i + 1][0] - last * pace < FRAME_S * pace:
            continue  # a newer one comes before the next frame
        last = at / pace
        for row in range(max(len(rows), len(shown))):
            text = rows[row] if row < len(rows) else ""
            before, since = shown.get(row, ("", 0.0))
            if text != before:
                found += [Line(row, before, since, last)] if before else []
                shown[row] = (text, last)
    return found + [Line(row, text, since, None) for row, (text, since) in shown.items() if text]


def draw(commands: list[dict[str, Any]]) -> str:
    """Return the picture."""
    lines = lines_of(commands)
    took = sum(float(command["seconds"]) for command in commands)
    whole = max(max(line.start, line.end or 0.0) for line in lines) + HELD_S
    rows = max(line.row for line in lines) + 3
    width, height = 2 * EDGE + LETTER * COLUMNS, 2 * EDGE + ROW * rows
    title = " and ".join(str(command["command"]) for command in commands)
    note = f"{took / 60:.1f} minutes, shown in {whole - HELD_S:.0f} s"
    style, marks = [STYLE], list[str]()
    for i, line in enumerate(lines):
        begin, end = 100 * line.start / whole, 100 * (line.end if line.end is not None else whole) / whole
        style.append(
            f"@keyframes k{i} {{ 0%, {begin:.2f}% {{ visibility: hidden }} {begin + 0.01:.2f}%, {end:.2f}% "
            f"{{ visibility: visible }} {min(100.0, end + 0.01):.2f}%, 100% {{ visibility: "
            f"{'visible' if line.end is None else 'hidden'} }} }}\n"
        )
        kind = ("typed " if line.text.startswith("$ ") else "") + ("gone" if line.end is not None else "")
        y = EDGE + ROW * (line.row + 0.75)
        marks.append(f'<text class="{kind.strip()}" id="t{i}" x="{EDGE}" y="{y:g}">{escape(line.text)}</text>')
    moving = "".join(f"#t{i} {{ animation: k{i} {whole:.1f}s step-end infinite }}\n" for i in range(len(lines)))
    style.append(f"@media not (prefers-reduced-motion: reduce) {{\n{moving}}}\n")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
            f'aria-label="{escape(title)}">',
            f"<style>{''.join(style)}</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="6"/>',
            *marks,
            f'<text x="{width - EDGE:g}" y="{height - EDGE:g}" text-anchor="end">{note}</text>',
            "</svg>",
            "",
        ]
    )


def main(words: list[str]) -> int:
    """Record or draw; return the exit code."""
    kind, kept = words[0], Path(words[1])
    commands = json.loads(kept.read_text("utf-8")) if kept.exists() else []
    if kind == "record":
        code, written = record(words[2:])
        commands.append({"command": " ".join(words[2:]), "seconds": written[-1][0], "written": written})
        kept.write_text(json.dumps(commands), "utf-8")
        return code
    Path(words[2]).write_text(draw(commands), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
