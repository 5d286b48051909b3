"""Hybrid: actor and rollout on separate devices, joined by a stream of sub-batches with bounded staleness."""

from __future__ import annotations

from tandem.session.streaming import StreamingSession


def train(session: StreamingSession) -> None:
    """Train on sub-batches as they arrive while the engines generate the next ones.

    Each step k consumes partition k in ``num_iters_per_train_update`` sub-batches and produces weights version k + 1.
    It waits for groups that are generated and scored; what unblocks it are the rollout loops, which in turn wait for
    the gate, and the gate for the versions that are published here. A stall is told with its cause.
    """
    with session.streaming():
        session.publish(session.progress.step)
        if session.config.evaluation.at_start and session.progress.step == 0:
            session.evaluate(0)
        for k in session.steps():
            update = session.begin_update()
            for sub_batch in session.arriving(k, session.order):
                for stage in session.forwards:
                    with session.run(stage.name):
                        sub_batch = stage(sub_batch)
                update.add(sub_batch)
            batch, metrics = update.finish()
            session.end_step(k, batch, metrics)
            with session.run("publish"):
                session.publish(k + 1)
