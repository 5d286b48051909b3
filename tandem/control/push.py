"""``tandem push``: the model of a finished run goes to a hub, with a card that says how it was trained."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tandem.base.errors import DataError, TandemError
from tandem.base.hidden import hide_in
from tandem.base.run_folder import CONFIG_FILE, FINAL_FOLDER, METRICS_FILE
from tandem.observe.card import card_of, config_in
from tandem.observe.metrics import read_rows

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"


def run_push(
    run: Path, repo: str, say: Callable[[str], None], *, private: bool = False, dry_run: Path | None = None
) -> None:
    """Send the model, tokenizer, card, config and metrics of ``run`` to the model repository ``repo``.

    With ``dry_run`` they are written to that folder, and nothing is sent. The repository is made where there is none.
    Samples are never sent. Raises ``TandemError`` in one line for whatever keeps it from being there.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise DataError(f"{repo!r} is no name of a repository: write NAME, or USER/NAME ({_line(error)})") from None
    if not (run / FINAL_FOLDER).is_dir():
        raise DataError(f"{run} holds no {FINAL_FOLDER}, which a run writes at its end. Name a finished run's folder")
    if dry_run is not None:
        if dry_run.exists():
            raise DataError(f"{dry_run} exists: choose another folder, or remove it")
        write_folder(run, repo, dry_run)
        say(f"{dry_run} is what would be pushed to {repo}; its card: {dry_run / CARD}")
        return
    with tempfile.TemporaryDirectory(prefix="tandem-push-") as scratch:
        folder = Path(scratch) / "model"
        write_folder(run, repo, folder)
        say(_upload(folder, repo, private))


def write_folder(run: Path, repo: str, out: Path) -> None:
    """Write what is pushed to ``out``: the model that the run trained, its card, and what it was trained by."""
    card, config = card_of(run, repo), config_in(run)
    shutil.copytree(run / FINAL_FOLDER, out)
    training = out / "training"
    training.mkdir()
    (training / CONFIG_FILE).write_text(yaml.safe_dump(hide_in(config), sort_keys=False, allow_unicode=True), "utf-8")
    rows = (json.dumps(row, ensure_ascii=False) for row in read_rows(run / METRICS_FILE))
    (training / METRICS_FILE).write_text("".join(f"{row}\n" for row in rows), "utf-8")
    (out / CARD).write_text(card, "utf-8")


def _upload(folder: Path, repo: str, private: bool) -> str:
    """Send the folder; return the address of the repository."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Trained with Tandem")
        return str(made)
    except OfflineModeIsEnabled:
        raise TandemError(
            "HF_HUB_OFFLINE is set, so that no hub is asked: unset it, or look first: --dry-run"
        ) from None
    except LocalTokenNotFoundError:
        raise TandemError(_unknown(api)) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status == 401:
            raise TandemError(_unknown(api)) from None
        why = "its token may not write there" if status == 403 else _line(error)
        raise TandemError(f"{api.endpoint} refuses {repo} (status {status}): {why}") from None
    except (httpx2.TransportError, OSError) as error:
        raise TandemError(
            f"{api.endpoint} can't be reached ({_line(error)}): nothing was pushed. Push again where it can be, or "
            "look first: --dry-run FOLDER"
        ) from None


def _unknown(api: HfApi) -> str:
    return (
        f"{api.endpoint} doesn't know who asks: log in with `hf auth login`, or set HF_TOKEN to a token that may write"
    )


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
