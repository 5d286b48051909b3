"""Preference training: given answers are compared, nothing is generated."""

from __future__ import annotations

from tandem.session.preference_session import PreferenceSession


def train(session: PreferenceSession) -> None:
    """DPO and its kin.

    Each step k consumes the next P preferences and produces weights version k + 1. It waits for nothing.
    """
    if session.config.evaluation.at_start and session.progress.step == 0:
        session.evaluate(0)
    for k in session.steps():
        batch = session.draw()
        for stage in session.stages:
            with session.run(stage.name):
                batch = stage(batch)
        with session.run("train"):
            update = session.train(batch)
        session.end_step(k, batch, update)
