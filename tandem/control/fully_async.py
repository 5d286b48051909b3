"""Fully asynchronous: each role has its own weights and its own loop; columns stream between them."""

from __future__ import annotations

from tandem.roles.loss import Loss
from tandem.roles.serving import ServingRole
from tandem.session.serving import ServingRoles
from tandem.session.session import ServedSession
from tandem.stages import table as step


def train_fully_async(session: ServedSession) -> None:
    """Run the actor's loop in training where every role has a loop of its own.

    Each step k consumes the complete partition k (rewards, log-probs, advantages) and produces weights version k + 1,
    which is pushed to the rollout engines and to actor_fwd. It waits for the slowest role's columns; every wait is
    watched, and a stall is warned of with its cause.
    """
    run, samples, stages, weights = session.run, session.samples, session.stages, session.weights
    with (
        session.rollout.working(step.generate, step.score),
        session.roles.serving(
            serve, step.ref, step.teacher, step.old_logprobs, step.values, step.correction, step.advantages
        ),
    ):
        weights.push(run.step)
        run.evaluate_at_start()
        for k in run.steps():
            batch = stages.update(samples.complete(k), step.train_critic)
            with run.stage(step.train):
                update = session.actor.step(Loss(batch, session.objective))
            run.end_step(k, batch, update)
            with run.stage(step.push):
                weights.push(k + 1)


def serve(role: ServingRole, roles: ServingRoles) -> None:
    """Run the loop of reference, actor_fwd, teacher, critic or advantages, in a thread of its own.

    It consumes groups of partition k that have the columns it reads, ``role.groups`` at a time, and produces the
    columns it gives. It waits for the role before it in the chain, and at the start of a partition for weights that
    are new enough; the actor's pushes unblock it. The end of the run ends it.
    """
    for k in roles.partitions():
        role.begin(k)
        for lease, batch in roles.lend(role, k):
            for stage in role.stages:
                with roles.scoring(k, stage.name):
                    batch = stage(batch)
            roles.give(role, lease, batch)
