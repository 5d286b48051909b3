"""Colocate: actor and rollout take turns on the same devices, one partition after the other."""

from __future__ import annotations

from tandem.roles.loss import Loss
from tandem.session.session import Session, TimeShared
from tandem.stages import table as step


def train_colocate(session: Session[TimeShared]) -> None:
    """Train synchronously: actor and rollout take turns on the same devices.

    Each step k consumes the P tickets of partition k and produces weights version k + 1. It waits for generation and
    scoring, which have deadlines of their own; the gate admits partition k once version k is pushed, which the step
    before did.
    """
    run, samples, stages, weights = session.run, session.samples, session.stages, session.weights
    weights.push(run.step)
    run.evaluate_at_start()
    for k in run.steps():
        with session.rollout.generating(), run.stage(step.generate, step.score):
            session.rollout.fill(k)
        batch = stages.forward(samples.complete(k), step.ref, step.teacher, step.old_logprobs, step.values)
        batch = stages.complete(batch, step.correction, step.advantages)
        batch = stages.update(batch, step.train_critic)
        with run.stage(step.train):
            update = session.actor.step(Loss(batch, session.objective))
        run.end_step(k, batch, update)
        with run.stage(step.push):
            weights.push(k + 1)
