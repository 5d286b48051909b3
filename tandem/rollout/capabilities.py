"""What a rollout engine can do, as data that a plan reads before anything starts. Importing this costs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.specifiers import SpecifierSet

from tandem.base.errors import TandemError
from tandem.rollout.protocol import KeepKV

Ownership = Literal["shared", "own"]
Distribution = Literal["sampled", "full", "raw"]
InFlight = Literal["abort", "keep"]
ANY_DEVICE = "any"


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities:
    """What an engine declares where it is registered. Every default is the least: it is asked for nothing else.

    Weights
        ``weights``: ``shared``, it generates with the trainer's own parameters, in the trainer's process; ``own``,
        ``load`` takes weights over, and it can live in another process. ``wants`` is what its factory gets: the loaded
        ``model`` (a ``CausalLM``), or the ``path`` of its folder. ``proof`` shows that it generates with what it was
        sent: the ``fingerprint`` that ``load`` answers is of what it has then; or, where it can only be of what came, a
        ``probe`` compares its log-probs with the trainer's at every push. ``adapters``: where adapters are trained,
        ``load`` takes those alone.
    Where and how
        ``devices`` on which it computes, ``cpu`` or ``cuda``; ``any``: those of torch. ``tensor_parallel``: one engine
        on several of them; ``chunked_prefill``: a prompt may be longer than the token budget of a prefill. ``frees``:
        what ``sleep`` gives up.
    While new weights come
        ``in_flight``: what running generations can do instead of being finished first. ``abort``: ``pause(abort=True)``
        ends them where they are, and a request that has them among ``begun`` goes on; ``keep``: they go on over a
        ``load``, their keys and values as ``keep_kv`` says. ``cancel``: single groups can be ended, see ``Cancelling``.
    Samples
        ``logprobs``: the distributions whose log-probs it can give. ``sampled``, that a token was drawn from; ``full``,
        that before top-k and top-p; ``raw``, the model's own, at temperature 1. ``seeds``: a sample's random stream is
        a function of its seed alone. ``lowest_temperature`` at which it draws, beside greedy answers. ``exact``: with
        that setting its tokens are bit-equal whatever else is in flight. ``images``: a request may bring some.
        ``routes``: it records the experts that tokens of a mixture of experts go to, where the sampling asks for it.
    Package
        ``package`` that its factory imports, of a version in the range ``versions`` (as pip writes it). ``builds``:
        names under which pip knows other builds of it.
    """

    weights: tuple[Ownership, ...]
    wants: Literal["model", "path"] = "model"
    proof: Literal["fingerprint", "probe"] = "fingerprint"
    adapters: bool = False
    devices: tuple[str, ...] = ("cpu",)
    tensor_parallel: bool = False
    chunked_prefill: bool = False
    frees: tuple[Literal["kv_cache", "weights"], ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    keep_kv: tuple[KeepKV, ...] = ("old",)
    cancel: bool = False
    logprobs: tuple[Distribution, ...] = ("sampled",)
    seeds: bool = False
    lowest_temperature: float = 0.0
    exact: bool = False
    images: bool = False
    routes: bool = False
    package: str | None = None
    versions: str = ""
    builds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.weights:
            raise TandemError("capabilities.weights is empty: write ('own',), ('shared',), or both")
        if "shared" in self.weights and self.wants == "path":
            raise TandemError(
                "capabilities: an engine that wants a path has no parameters in common with the trainer: write "
                "weights=('own',), or wants='model'"
            )
        if self.versions and self.package is None:
            raise TandemError(f"capabilities.versions is {self.versions!r}: write the package that it is about")
        SpecifierSet(self.versions)  # raises ``InvalidSpecifier`` for what is no range

    @property
    def requirement(self) -> str:
        """The package and its range, as pip takes them."""
        return f"{self.package}{self.versions}"

    def lacks_package(self) -> str | None:
        """Return why its package can't be used in this environment; None where it can, or none is needed."""
        if self.package is None:
            return None
        found = next(filter(None, map(_installed, (self.package, *self.builds))), None)
        if found is None:
            return f"needs the package {self.requirement}, which is not installed here"
        if SpecifierSet(self.versions).contains(found, prereleases=True):
            return None
        return f"needs the package {self.requirement}, and {found} is installed here"


def _installed(package: str) -> str | None:
    """Return the version of the package that is installed here; None without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
