"""Fine-tuning asks its held-out prompts as it trains them, and names the row that it can't ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.base.errors import DataError
from tandem.config.schema import SftConfig
from tandem.plan.sft import compile_sft_plan
from tandem.session.sft import SftSession, build_sft_session
from tests.e2e.seven import write_rows


def session(task: Path, tmp_path: Path, held_out: list[dict[str, object]], *, chat: bool) -> SftSession:
    rows = [{"prompt": f"{d}>", "response": str(d) * 4} for d in range(8)]
    config = SftConfig.model_validate(
        {
            "model": {"path": str(task.parent / "model")},
            "data": {
                "train_files": [str(write_rows(tmp_path / "pairs.jsonl", rows))],
                "val_files": [str(write_rows(tmp_path / "val.jsonl", held_out))],
                "train_batch_size": 4,
                "chat": chat,
            },
            "evaluation": {"interval": 1},
            "trainer": {"total_steps": 1, "logger": [], "output_dir": str(tmp_path / "run")},
        }
    )
    return build_sft_session(config)


def test_a_held_out_question_goes_through_the_chat_template_too(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.session import sft

    loaded = sft.model_tokenizer

    def with_template(*configs: object) -> object:
        tokenizer = loaded(*configs)  # type: ignore[arg-type]
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m['role'] == 'user' %}0{{ m['content'] }}\n1"
            "{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}"
        )
        return tokenizer

    monkeypatch.setattr(sft, "model_tokenizer", with_template)
    made = session(task, tmp_path, [{"prompt": "9>", "response": "9999"}], chat=True)
    (question,) = made.tuner.questions
    assert made.tuner.tokenizer.decode(question.ids) == "09>\n1"
    assert question.answer == "9999"


@pytest.mark.parametrize(
    "row", [{"prompt": 5, "response": "7"}, {"prompt": "", "response": "7"}, {"prompt": "😀", "response": "7"}]
)
def test_a_held_out_row_that_can_not_be_asked_is_named(task: Path, tmp_path: Path, row: dict[str, object]) -> None:
    with pytest.raises(DataError, match=r"val\.jsonl, row 2"):
        session(task, tmp_path, [{"prompt": "9>", "response": "9"}, row], chat=False)


def test_the_training_file_is_not_held_out(task: Path, tmp_path: Path) -> None:
    file = str(write_rows(tmp_path / "pairs.jsonl", [{"prompt": "1>", "response": "1"}]))
    config = SftConfig.model_validate(
        {"model": {"path": str(task.parent / "model")}, "data": {"train_files": [file], "val_files": [file]}}
    )
    assert "data.val_files[0]" in [problem.key for problem in compile_sft_plan(config).problems]
