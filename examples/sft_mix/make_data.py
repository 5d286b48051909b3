"""Writes the data of the SFT example: ``python examples/sft_mix/make_data.py [FOLDER]``, by default ``runs/sft_data``.

``sums.jsonl``: prompt and response. ``chains.jsonl``: conversations in which the user goes on from the last sum.
``held_out.jsonl``: sums of which neither has an example.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def sums(pairs: list[tuple[int, int]]) -> Iterator[Row]:
    """``{"prompt": "3+45=", "response": "48"}``."""
    for x, y in pairs:
        yield {"prompt": f"{x}+{y}=", "response": str(x + y)}


def chains(pairs: list[tuple[int, int]], rng: random.Random) -> Iterator[Row]:
    """Two turns: ``3+45=`` ``48`` ``+7=`` ``55``; the second begins where the first ended."""
    for x, y in pairs:
        z = rng.randrange(10)
        asked = {f"{x}+{y}=": x + y, f"+{z}=": x + y + z}
        turns = [(("user", question), ("assistant", str(answer))) for question, answer in asked.items()]
        messages = [{"role": role, "content": content} for turn in turns for role, content in turn]
        yield {"messages": messages}


def main() -> None:
    """Write the three files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/sft_data")
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    pairs = [(x, y) for x in range(50) for y in range(50)]
    rng.shuffle(pairs)
    held_out, trained = pairs[:200], pairs[200:]
    for name, rows in (
        ("sums", sums(trained)),
        ("chains", chains(trained, rng)),
        ("held_out", sums(held_out)),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    print(folder)


if __name__ == "__main__":
    main()
