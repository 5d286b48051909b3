"""Fully asynchronous: each role has its own weights and its own loop; columns stream between them."""

from __future__ import annotations

from tandem.roles.serving import ServingRole
from tandem.session.async_session import AsyncSession


def train(session: AsyncSession) -> None:
    """The actor's loop.

    Each step k consumes the complete partition k (rewards, log-probs, advantages) and produces weights version k + 1,
    which is broadcast to the rollout engines and to actor_fwd; a critic is trained first. It waits for the slowest
    role's columns; every wait is watched, and a stall is told with its cause.
    """
    with session.serving(serve):
        session.publish(session.progress.step)
        if session.config.evaluation.at_start and session.progress.step == 0:
            session.evaluate(0)
        for k in session.steps():
            batch = session.complete(k)
            for stage in session.before_training:
                with session.run(stage.name):
                    batch = stage(batch)
            with session.run("train"):
                update = session.train(batch)
            session.end_step(k, batch, update)
            with session.run("publish"):
                session.publish(k + 1)


def serve(role: ServingRole, session: AsyncSession) -> None:
    """The loop of reference, actor_fwd, critic or advantages, in a thread of its own.

    It consumes groups of partition k that have the columns it reads, ``role.groups`` at a time, and produces the
    columns it gives. It waits for the role before it in the chain, and at the start of a partition for weights that
    are new enough; the actor's publications unblock it. The end of the run ends it.
    """
    for k in session.partitions():
        role.begin(k)
        for lease, batch in session.lend(role, k):
            for stage in role.stages:
                with session.scoring(k, stage.name):
                    batch = stage(batch)
            session.give(role, lease, batch)
