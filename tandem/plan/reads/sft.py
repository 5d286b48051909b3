"""Which keys of supervised fine-tuning are read only in some configurations, and in which."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.schema import SftConfig
from tandem.data.examples import ExampleColumns
from tandem.plan.files.mix import example_columns
from tandem.plan.reads.form import Reads, adapter_reads, checkpoint_reads, file_reads, schedule_reads, template_reads


@dataclass(frozen=True)
class SftSetting:
    """A config of fine-tuning, with what the table of reads asks about it."""

    config: SftConfig

    @property
    def columns(self) -> tuple[ExampleColumns, ...]:
        """The columns that make an example, of each data set."""
        data = self.config.data
        return tuple(example_columns(data, part) for part in data.mix) or (example_columns(data),)

    @property
    def pairs(self) -> bool:
        """Whether some data set has rows of a prompt and a response."""
        return any(columns.messages_key is None for columns in self.columns)


_NEW = "model.new makes the model and its tokenizer: in float32, and nothing of it is loaded"
_CONVERSATIONS = "rows are conversations: data.messages_key names them"

READS: tuple[Reads[SftSetting], ...] = (
    *schedule_reads("optim", lambda s: s.config.optim.schedule),
    *adapter_reads("model", lambda s: s.config.model),
    Reads(
        ("trainer.export_dtype",),
        lambda s: s.config.trainer.export == "merged",
        "trainer.export is adapter, and an adapter stays in float32",
        "Leave it out, or write trainer.export: merged",
    ),
    Reads(
        ("model.dtype", "model.tokenizer_path", "model.trust_remote_code"),
        lambda s: s.config.model.new is None,
        _NEW,
    ),
    Reads(
        ("data.prompt_key", "data.response_key", "data.chat", "data.add_eos"),
        lambda s: s.pairs,
        _CONVERSATIONS,
        noted=True,
    ),
    Reads(
        ("data.add_eos",),
        lambda s: any(columns.messages_key is None and not columns.chat for columns in s.columns),
        "with data.chat the chat template ends an answer",
    ),
    Reads(
        ("data.tools_key",),
        lambda s: any(columns.messages_key is not None or columns.chat for columns in s.columns),
        "only a chat template has a place for tools, and prompt and response are plain text",
        "Write data.chat: true or data.messages_key, or leave it out",
    ),
    template_reads(lambda s: any(columns.messages_key is not None or columns.chat for columns in s.columns)),
    file_reads(lambda s: s.config.data),
    Reads(
        ("data.val_files",),
        lambda s: s.config.evaluation.interval > 0,
        "nothing is evaluated: evaluation.interval is 0",
        noted=True,
    ),
    Reads(
        ("evaluation.max_new_tokens",),
        lambda s: s.config.evaluation.interval > 0 and s.config.data.messages_key is None,
        lambda s: _CONVERSATIONS if s.config.evaluation.interval else "nothing is evaluated: evaluation.interval is 0",
        noted=True,
    ),
    checkpoint_reads(lambda s: s.config.trainer),
    Reads(
        ("trainer.exact",),
        lambda s: False,
        "fine-tuning has no rollouts whose bits a batch could change",
    ),
    Reads(
        ("trainer.rollouts_per_step", "trainer.samples", "runtime.name", "runtime.threads"),
        lambda s: False,
        "fine-tuning runs in this process and samples nothing",
        noted=True,
    ),
)
