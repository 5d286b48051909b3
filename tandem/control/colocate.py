"""Colocate: actor and rollout take turns on the same devices, one partition after the other."""

from __future__ import annotations

from tandem.session.session import Session


def train(session: Session) -> None:
    """Synchronous training.

    Each step k consumes P tickets of partition k and produces weights version k + 1. It waits for generation and
    scoring, which have deadlines of their own; the gate admits partition k once version k is published, which the step
    before did.
    """
    session.publish(session.progress.step)
    if session.config.evaluation.at_start and session.progress.step == 0:
        session.evaluate(0)
    for k in session.steps():
        with session.generating(), session.run("rollout", "reward"):
            session.fill(k)
        batch = session.take(k)
        for stage in session.stages:
            with session.run(stage.name):
                batch = stage(batch)
        with session.run("train"):
            update = session.train(batch)
        with session.run("publish"):
            session.publish(k + 1)
        session.end_step(k, batch, update)
