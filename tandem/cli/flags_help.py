"""The flags of a command in its ``--help``, by what they change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

from tandem.config.flags import MODE_FLAGS, SFT_FLAGS, TRAIN_FLAGS

_NESTED = "actor_rollout_ref"
"""A section whose parts are sections of their own."""


class WithFlags(TyperCommand):
    """``train``, ``plan`` or ``sft``, whose help ends with its flags: ``tandem.config`` reads them, typer does not."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write a list for each section of the config, each flag with its key and what that is."""
        for section, rows in _sections(self.name == "sft").items():
            with formatter.section(section):
                formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write_text("Every other key is a flag too, such as --trainer.samples.every 10: see docs/config.md.")


def _sections(sft: bool) -> dict[str, list[tuple[str, str]]]:
    """Return (flag, meaning) by section, in the order of the flags."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for section, flag, meaning in _flags(sft):
        sections.setdefault(section, []).append((flag, meaning))
    return sections


def _flags(sft: bool) -> Iterator[tuple[str, str, str]]:
    from tandem.config.schema import Config, SftConfig
    from tandem.config.tree import paths_of

    if not sft:
        modes = ", ".join(_spelt(mode) for mode in MODE_FLAGS)
        yield "execution", modes, "mode"
    fields = paths_of(SftConfig if sft else Config)
    for flag, path in (SFT_FLAGS if sft else TRAIN_FLAGS).items():
        depth = 2 if path.startswith(f"{_NESTED}.") else 1
        parts = path.split(".")
        section, key = ".".join(parts[:depth]), ".".join(parts[depth:]) or path
        words = " ".join((fields[path].info.description or "").split()) if path in fields else ""
        first = words.replace("``", "").split(". ")[0].rstrip(".")
        yield section, _spelt(flag), f"{key}: {first}" if first else key


def _spelt(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"
