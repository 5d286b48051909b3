"""Whether the hub answers: asked once, before its client tries again and again for more than a minute."""

from __future__ import annotations

from pathlib import Path

ANSWER_S = 5.0
TRIES = 2


def where_from(name: str | Path) -> dict[str, bool]:
    """Return what else a ``from_pretrained`` is told: to take the files of a hub id from the cache alone, where the hub
    can't be reached.

    Folders, and a hub that is turned off by ``HF_HUB_OFFLINE``, are not asked about. Whatever a hub answers, it can be
    reached; one that takes no connection within ``ANSWER_S`` seconds, ``TRIES`` times, can't.
    """
    if Path(name).expanduser().exists() or hub_answers():
        return {}
    return {"local_files_only": True}


def hub_answers() -> bool:
    """Return whether anything answers at the hub's address, by the client and the proxies that downloads use."""
    import httpx2
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled

    for _ in range(TRIES):
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
            return True
        except OfflineModeIsEnabled:
            return True  # its client refuses at once, with the reason
        except httpx2.ReadTimeout:
            return True  # somebody is there: whether it is too slow is for the client to find out
        except httpx2.TransportError:
            continue
    return False
