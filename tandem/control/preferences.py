"""Preference training: given answers are compared, nothing is generated."""

from __future__ import annotations

from tandem.roles.loss import Loss
from tandem.roles.preferences import as_groups
from tandem.session.preferences import PreferenceSession
from tandem.stages import table as step


def train_preferences(session: PreferenceSession) -> None:
    """Train on preferences: DPO and its kin.

    Each step k consumes the next P preferences, each a group of its answers, and produces weights version k + 1. It
    waits for nobody: answers are given.
    """
    run, stages = session.run, session.stages
    run.evaluate_at_start()
    for k in run.steps():
        batch = stages.forward(as_groups(session.source.take(session.prompts)), step.ref)
        batch = stages.complete(batch, step.reference_point)
        with run.stage(step.train):
            update = session.actor.step(Loss(batch, session.objective))
        run.end_step(k, batch, update)
