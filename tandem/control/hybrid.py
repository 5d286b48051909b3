"""Hybrid: actor and rollout on separate devices, joined by a stream of sub-batches with bounded staleness."""

from __future__ import annotations

from tandem.roles.loss import Loss
from tandem.roles.update import in_canonical_order
from tandem.session.rollout import Workers
from tandem.session.session import PipelinedSession, Session
from tandem.stages import table as step


def train_hybrid(session: Session[Workers]) -> None:
    """Train on partitions whose parts are scored as they arrive, while the engines generate the next ones.

    Each step k consumes partition k in ``num_iters_per_train_update`` parts and produces weights version k + 1. It
    waits for groups that are generated and scored; what unblocks it are the rollout workers, who in turn wait for the
    gate, and the gate for the versions that are pushed here. A stall is warned of with its cause.
    """
    run, samples, stages, weights = session.run, session.samples, session.stages, session.weights
    with session.rollout.working(step.generate, step.score):  # beside this loop, in one of each worker's
        weights.push(run.step)
        run.evaluate_at_start()
        for k in run.steps():
            parts = [
                stages.forward(part, step.ref, step.teacher, step.old_logprobs, step.values)
                for part in samples.arriving(k)
            ]
            batch = stages.complete(in_canonical_order(parts), step.correction, step.advantages)
            batch = stages.update(batch, step.train_critic)
            with run.stage(step.train):
                update = session.actor.step(Loss(batch, session.objective))
            run.end_step(k, batch, update)
            with run.stage(step.push):
                weights.push(k + 1)


def train_hybrid_pipelined(session: PipelinedSession) -> None:
    """Do the same with ``train_pipelining``: each part is trained as it arrives, before the partition is complete.

    What each step consumes, produces and waits for, and what unblocks it, is as in ``train_hybrid``. The plan admits
    no stage that must see the whole partition, so that ``complete`` may see a part; weights between parts are never
    pushed.
    """
    run, samples, stages, weights = session.run, session.samples, session.stages, session.weights
    with session.rollout.working(step.generate, step.score):
        weights.push(run.step)
        run.evaluate_at_start()
        for k in run.steps():
            parts = []
            for arrived in samples.arriving(k):
                part = stages.forward(arrived, step.ref, step.teacher, step.old_logprobs)
                part = stages.complete(part, step.correction, step.advantages)
                with run.stage(step.train):
                    session.slices.train(part)
                parts.append(part)
            batch = in_canonical_order(parts)
            with run.stage(step.train):
                update = session.slices.finish(batch)
            run.end_step(k, batch, update)
            with run.stage(step.push):
                weights.push(k + 1)
