"""The config reference, generated from the schema: ``python -m tandem.config.reference`` writes ``docs/config.md``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from tandem.config.flags import MODE_FLAGS, SFT_FLAGS, TRAIN_FLAGS
from tandem.config.schema import Config, SftConfig
from tandem.config.suggest import MODES
from tandem.config.tree import Field, default_text, keys_of, type_text, walk

TARGET = Path("docs/config.md")

HEAD = """\
# Config reference

Generated from the schema by `python -m tandem.config.reference`: change the schema, not this page.

A config is a YAML file, words on the command line, or both. Later words win:

    tandem train run.yaml actor_rollout_ref.rollout.n=16 --lr 1e-5

Every key is written as `key=value` or as `--key value`; the value is YAML. A key that isn't here is refused. A text is
no number: `n: "2"` is refused. `tandem plan run.yaml` prints what a config means and everything that is wrong with it.
"""


def reference() -> str:
    """Return the text of ``docs/config.md``."""
    parts = [HEAD, "## A training run: `tandem train`\n", *_sections(Config)]
    parts += ["## Supervised fine-tuning: `tandem sft`\n", *_sections(SftConfig), *_flags()]
    return "\n".join(parts)


def _sections(root: type[BaseModel]) -> Iterator[str]:
    """Yield a table for each node that has leaves of its own, in order of declaration."""
    leaves: dict[str, list[Field]] = {}
    titles: dict[str, str] = {"": ""}
    for field in walk(root):
        if field.nodes:
            titles.setdefault(field.path, _meaning(field.nodes[0]) if len(field.nodes) == 1 else "")
        if not field.nodes or not _is_plain_node(field):
            leaves.setdefault(field.path.rpartition(".")[0], []).append(field)
    for section, fields in leaves.items():
        rows: dict[str, str] = {}
        for field in fields:
            rows.setdefault(field.path, _row(field))
        title = f"### `{section}`\n" if section else "### At the top\n"
        text = titles.get(section, "")
        body = "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows.values()])
        yield "\n".join([title, *([f"{text}\n"] if text else []), body, ""])


def _is_plain_node(field: Field) -> bool:
    """Return whether the field is a mapping and nothing else, so that its keys say all."""
    return type_text(field.annotation) == "mapping"


def _row(field: Field) -> str:
    default = f"`{default_text(field)}`" if default_text(field) else "required"
    meaning = " ".join((field.info.description or "").split()).replace("``", "`").replace("|", "\\|")
    modes = [name for name, node in MODES.items() if field.key in keys_of(node)]
    if field.owner in MODES.values() and field.key == "mode":
        return f"| `{field.path}` | {' or '.join(f'`{name}`' for name in MODES)} | {default} | Who shares devices. |"
    if field.owner in MODES.values() and len(modes) < len(MODES):
        meaning += f" Only in {' and '.join(modes)}."
    kind = type_text(field.annotation, field.info.metadata).replace("|", "\\|")
    return f"| `{field.path}` | {kind} | {default} | {meaning} |"


def _meaning(node: type[BaseModel]) -> str:
    return (inspect.getdoc(node) or "").replace("``", "`").split("\n\n")[0]


def _flags() -> Iterator[str]:
    yield "## Short flags\n"
    modes = ", ".join(f"`--{mode.replace('_', '-')}`" for mode in MODE_FLAGS)
    yield f"{modes} choose `execution.mode`; `--hybrid` stands for the other two together."
    yield "`--no-NAME` turns a switch off.\n"
    for title, flags in (("tandem train", TRAIN_FLAGS), ("tandem sft", SFT_FLAGS)):
        rows = [f"| `--{name.replace('_', '-')}` | `{path}` |" for name, path in flags.items()]
        yield "\n".join([f"| `{title}` | key |", "| --- | --- |", *rows, ""])


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(reference(), "utf-8")
