"""What training engines have in common: batches cut into packed micro-batches, what is read of them, and their sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tandem.algorithms.distillation import AT_CANDIDATES, CANDIDATES
from tandem.base.errors import ContractError
from tandem.columns.images import IMAGES, Images
from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.models.causal_lm import CausalLM
from tandem.models.device import give_back
from tandem.models.head.logprobs import sum_pi_squared, token_logprobs, top_logprobs
from tandem.models.head.projection import Head
from tandem.models.layouts.packing import PackedSamples, pack_samples
from tandem.train.limits import check_lengths, check_tokens
from tandem.train.micro_batches import canonical_order, group_by_group, token_budgeted
from tandem.train.objective import LossSum, Objective
from tandem.train.protocol import Exported, StepResult, TopTokens, Wanted
from tandem.train.routing import BALANCE, Routing, observed
from tandem.train.shard_batch import forward_columns, objective_columns
from tandem.train.updater import Updater

Found = dict[str, torch.Tensor]
Reading = Callable[[torch.Tensor, torch.Tensor, Head], Found]
"""What is found at hidden states (N, d) and targets (N, ...) by the head."""


class PackedEngine(ABC):
    """A ``TrainEngine`` around a model that runs packed rows; who inherits says how weights lie on ranks.

    ``data_group`` are the ranks that have samples of their own; None: this one alone. ``temperature`` divides the
    logits in every log-prob, as in sampling. With ``exact`` each group is a micro-batch of its own, in canonical order:
    bit-equal results whatever the batch came in with.
    """

    _updater: Updater

    def __init__(
        self,
        model: CausalLM,
        *,
        max_tokens_per_micro_batch: int,
        temperature: float,
        max_samples_per_micro_batch: int | None,
        exact: bool,
        data_group: dist.ProcessGroup | None,
        device: torch.device | str,
    ) -> None:
        self.model, self.device = model, torch.device(device)
        self._max_tokens, self._max_samples = max_tokens_per_micro_batch, max_samples_per_micro_batch
        self._temperature, self._exact, self._group = temperature, exact, data_group

    @property
    def updates(self) -> int:
        """The number of optimizer steps that were applied."""
        return self._updater.updates

    @property
    def skipped(self) -> int:
        """Optimizer steps that were not."""
        return self._updater.skipped

    # --- the nine methods --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: DataProto, want: Sequence[Wanted]) -> dict[str, Ragged]:
        """Return per-token results without gradient: packed in a canonical order, given in the batch's own."""
        responses = batch.ragged("responses")
        results = _results(want, len(responses.values))
        order = canonical_order(batch)
        ordered = batch.select(*forward_columns(batch)).reorder(order)
        token = responses.like(torch.arange(len(responses.values))).take(order)
        rows = self._micro_batches(ordered)
        fillers = self._missing(len(rows))
        for part in rows:
            samples = self._pack(ordered[part])
            found = self._look(samples, want)
            place = token[part].padded().flatten()[samples.slots.cpu()]
            for name, total in results.items():
                total[place] = found[name].to(total.dtype).cpu()
        for _ in range(fillers):
            self._run_filler()
        return {name: responses.like(values) for name, values in results.items()}

    def forward_backward(self, batch: DataProto, objective: Objective) -> LossSum:
        """Add the gradient of the objective's sum over the batch, one packed micro-batch after the other."""
        needed = objective_columns(objective, batch)
        chosen = batch.select(*dict.fromkeys([*forward_columns(batch), *needed]))
        ordered = chosen.reorder(canonical_order(chosen))
        total = LossSum(torch.zeros((), device=self.device))
        rows = self._micro_batches(ordered, objective.whole_groups)
        fillers = self._missing(len(rows))
        idle = self._idle_images(chosen)
        left = len(rows) + fillers
        for part in rows:
            left -= 1
            micro = ordered[part]
            samples = self._pack(micro, idle)
            columns = {name: _dense(micro, name).to(self.device) for name in needed}
            candidates = samples.chosen(columns[CANDIDATES]).long() if CANDIDATES in columns else None
            found = self._run(
                samples,
                want_entropy=objective.wants_entropy,
                entropy_grad=objective.needs_entropy,
                also=candidates,
                watched=True,
            )
            logprobs, entropies = found["logprobs"], found.get("entropies")
            if objective.router_coef:
                columns[BALANCE] = self._balance(found)
            if candidates is not None:
                columns[AT_CANDIDATES], logprobs = samples.padded(logprobs[:, 1:]), logprobs[:, 0]
            padded = None if entropies is None else samples.padded(entropies)
            result = objective.numerator(columns, samples.padded(logprobs), padded)
            self._before_backward(left)
            self._backward(result.loss)
            total += replace(
                result, loss=result.loss.detach(), routing=self._routing(found, samples.routes is not None)
            )
        total = replace(total, routing=None if total.routing is None else total.routing.cpu())
        for behind in reversed(range(fillers)):
            self._before_backward(behind)
            self._backward(self._run_filler(idle).sum() * 0.0)
        return self._over_ranks(total)

    def optim_step(self, denominator: float) -> StepResult:
        """Divide the accumulated gradient once, clip it, update the parameters, and clear it."""
        return self._updater.step(denominator)

    @abstractmethod
    def shards(self) -> dict[str, torch.Tensor]:
        """Return the local shards of the trained parameters, live: copy out of and into them in place."""

    @abstractmethod
    def export(self, part: Exported = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) of ``part``, one at a time; with several ranks all of them must ask."""

    def sleep(self) -> None:
        """Let the gradients go, and move the moments from an accelerator to the host."""
        self._updater.clear()
        if self.device.type != "cpu":
            self._updater.park_moments()
        give_back(self.device)

    def wake(self) -> None:
        """Move the moments back to the accelerator."""
        self._updater.fetch_moments(self.device)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and progress as sharded tensors and numbers."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, which an engine with the same model gave."""

    # --- what a rank asks beside them --------------------------------------------------------------------------------

    @abstractmethod
    def beside(self, model: CausalLM) -> PackedEngine:
        """Return an engine for forwards of another model on the same ranks, at the same temperature and token
        budget.
        """

    @property
    @abstractmethod
    def has_adapters(self) -> bool:
        """Whether adapters are what is trained."""

    @abstractmethod
    def base_fingerprint(self) -> str:
        """Return the fingerprint of all weights that are never trained. A meeting of all ranks the first time."""

    @abstractmethod
    def without_adapters(self) -> AbstractContextManager[None]:
        """Let forwards in this block be the base model's."""

    @abstractmethod
    def shards_of(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's parts of whole tensors by the names of ``shards()``; others are left aside."""

    @abstractmethod
    def as_sharded(self, copies: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the copies of ``shards()`` as parts of whole tensors, which any number of ranks can load; shares their
        memory.
        """

    # --- one micro-batch ---------------------------------------------------------------------------------------------

    def _micro_batches(self, ordered: DataProto, whole_groups: bool = False) -> list[slice]:
        if len(ordered) == 0:
            return []
        check_lengths(ordered, self.model.context)
        check_tokens(ordered, self.model.tokens)
        if self._exact and "group_ids" in ordered.batch:
            return list(group_by_group(ordered))
        return list(
            token_budgeted(
                ordered,
                self._max_tokens,
                max_samples=self._max_samples,
                whole_groups=whole_groups,
                padded=self.model.route == "rows",
            )
        )

    def _pack(self, micro: DataProto, idle: Images | None = None) -> PackedSamples:
        """Return the samples of a micro-batch in one row; ``idle`` go through the image tower where it shows none."""
        prompts, responses, mask = (micro.ragged(name) for name in ("prompts", "responses", "response_mask"))
        restarts = micro.ragged("restarts") if "restarts" in micro.batch else None
        shown = _shown(micro)
        seen = self.model.seeing.see(prompts, shown) if any(shown) else None
        routes = (micro.ragged("prompt_routes"), micro.ragged("routes")) if "routes" in micro.batch else None
        samples = self._packed(prompts, responses, mask, restarts=restarts, seen=seen, routes=routes)
        return samples if seen is not None else replace(samples, images=idle)

    def _packed(self, prompts: Ragged, responses: Ragged, mask: Ragged, **further: Any) -> PackedSamples:
        model, given = self.model, (prompts, responses, mask)
        how: Any = {"share_prompts": model.shares_prompts, "device": self.device, "layout": model.layout, **further}
        return pack_samples(*given, **how)

    def _look(self, samples: PackedSamples, want: Sequence[Wanted]) -> Found:
        """Return what is wanted of the N trained tokens, (N, ...) each."""
        top = next((asked for asked in want if isinstance(asked, TopTokens)), None)

        def of(chosen: torch.Tensor, targets: torch.Tensor, head: Head) -> Found:
            found = Found()
            if top is not None:
                found["top_logprobs"], found["top_ids"] = top_logprobs(
                    chosen, head, top.count, below=top.below, temperature=top.temperature or self._temperature
                )
                if len(want) == 1:
                    return found
            found["logprobs"], entropies = token_logprobs(
                chosen, head, targets, temperature=self._temperature, want_entropy="entropies" in want
            )
            if entropies is not None:
                found["entropies"] = entropies
            if "sum_pi_squared" in want:
                found["sum_pi_squared"] = sum_pi_squared(chosen, head, temperature=self._temperature)
            return found

        return self._read(samples, samples.targets, of)

    def _run(
        self,
        samples: PackedSamples,
        *,
        want_entropy: bool,
        entropy_grad: bool,
        also: torch.Tensor | None = None,
        watched: bool = False,
    ) -> Found:
        """Return the log-probs and entropies of the N trained tokens, (N,) each.

        With ``also`` (N, k), further tokens in each place, log-probs are (N, 1 + k). ``watched``: also what known
        routers did, ``balance`` and ``routing`` as ``observed`` gives them.
        """
        wanted = samples.targets if also is None else torch.cat([samples.targets[:, None], also], dim=1)

        def of(chosen: torch.Tensor, targets: torch.Tensor, head: Head) -> Found:
            logprobs, entropies = token_logprobs(
                chosen,
                head,
                targets,
                temperature=self._temperature,
                want_entropy=want_entropy,
                entropy_grad=entropy_grad,
            )
            return {"logprobs": logprobs} if entropies is None else {"logprobs": logprobs, "entropies": entropies}

        return self._read(samples, wanted, of, watched)

    def _read(self, samples: PackedSamples, targets: torch.Tensor, of: Reading, watched: bool = False) -> Found:
        """Run the model, and return what ``of`` says of the states before the N trained tokens: where ranks share a
        row, each reads off its own part.
        """
        share = self.model.share
        if share is None:
            return self._at(samples, samples.read, targets, of, watched)
        mine, places = share.own(samples.read, len(samples.input_ids))
        found = self._at(samples, places, targets[mine], of)
        return {name: share.joined(values, mine, len(targets)) for name, values in found.items()}

    def _at(
        self, samples: PackedSamples, places: torch.Tensor, targets: torch.Tensor, of: Reading, watched: bool = False
    ) -> Found:
        routers = self.model.routers if watched and self.model.route == "packed" else None

        def read(hidden: torch.Tensor, head: Head) -> Found:
            found = of(nn.functional.embedding(places, hidden), targets, head)
            if routers is not None and (choices := routers.take()):
                found["balance"], found["routing"] = observed(routers, choices, samples)
            return found

        given = (samples.input_ids, samples.positions, samples.layout, read, samples.images, samples.routes)
        result: Found = self.model(*given, watched=routers is not None)
        return result

    def _balance(self, found: Found) -> torch.Tensor:
        if "balance" not in found:
            raise ContractError(
                f"the routers of the family {self.model.family!r} are not known here, so that they can't be balanced: "
                "write actor_rollout_ref.actor.router_aux_loss_coef: 0"
            )
        return found["balance"]

    def _routing(self, found: Found, replays: bool) -> Routing | None:
        routers = self.model.routers
        if routers is None or "routing" not in found:
            return None
        return Routing(routers.layers, routers.experts, found["routing"], replays)

    def _before_backward(self, left: int) -> None:
        """Note that a backward of ``forward_backward`` comes, and ``left`` more after it, on every rank as many."""
        del left

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    # --- ranks -------------------------------------------------------------------------------------------------------

    def _missing(self, count: int) -> int:
        """Return the micro-batches of zero weight that this rank adds, so that all ranks gather and reduce as often.

        Itself a meeting of all ranks, so it comes before the first micro-batch.
        """
        if self._group is None:
            return 0
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, self._group)
        return int(most) - count

    def _idle_images(self, batch: DataProto) -> Images | None:
        """Return what this rank's micro-batches without images show to nobody; None where no rank's batch has some.

        Gradients of the image tower are summed over ranks, and so must be there on all of them if on one: zeros of an
        image that no token stands for. Itself a meeting of all ranks.
        """
        vision = self.model.vision
        if self._group is None or vision is None or not vision.trained(self.model.model):
            return None
        some = torch.tensor(int(any(_shown(batch))), device=self.device)
        dist.all_reduce(some, dist.ReduceOp.MAX, self._group)
        return vision.smallest(self.model.model) if bool(some) else None

    def _run_filler(self, idle: Images | None = None) -> torch.Tensor:
        """Run a forward over the smallest possible sample; its log-probs, to be weighted with 0."""
        token = Ragged.from_lengths(torch.zeros(1, dtype=torch.int64), [1])
        samples = self._packed(token, token, token.like(torch.ones(1, dtype=torch.bool)))
        return self._run(replace(samples, images=idle), want_entropy=False, entropy_grad=False)["logprobs"]

    def _over_ranks(self, total: LossSum) -> LossSum:
        """Return the sum over all ranks, which may have seen different metrics."""
        if self._group is None:
            return total
        parts: list[LossSum | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(parts, total, self._group)
        every = [part for part in parts if part is not None]
        return sum(every[1:], every[0])


def _results(want: Sequence[Wanted], tokens: int) -> Found:
    """Return zeros for everything that is wanted."""
    results: Found = {}
    for asked in want:
        if isinstance(asked, TopTokens):
            results["top_logprobs"] = torch.zeros(tokens, asked.count)
            results["top_ids"] = torch.zeros(tokens, asked.count, dtype=torch.int32)
        else:
            results[asked] = torch.zeros(tokens)
    return results


def _shown(batch: DataProto) -> Sequence[Images | None]:
    """Return the images of each row; nothing where the batch has no column of them."""
    return batch.non_tensor_batch[IMAGES] if IMAGES in batch.non_tensor_batch else ()  # noqa: SIM401


def _dense(batch: DataProto, name: str) -> torch.Tensor:
    """Return a ragged column right-padded to (b, L), a row column as it is."""
    column = batch.batch[name]
    return column.padded() if isinstance(column, Ragged) else column
