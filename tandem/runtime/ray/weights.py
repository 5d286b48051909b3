"""Weights on their way to rollout engines in other actors: buckets in Ray's shared memory, put once for all of them.

Whoever drives the run passes references on; engines map the buckets, on other nodes after one transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch

from tandem.models.fingerprint import fingerprint
from tandem.remote.calls import Reply, import_ray
from tandem.remote.payload import pack, unpack

Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]
BucketRefs: TypeAlias = list[Any]
"""References of Ray's to packed lists of (Hugging Face name, tensor)."""

_FETCH_S = 300.0


class RemoteWeights:
    """(name, tensor) pairs that lie in Ray's shared memory, as ``refs`` to buckets. Iterating maps one after another.

    They are there for as long as a reference is held and the process that put them lives; if that has died, iterating
    raises ``DiedError``. The tensors are read only.
    """

    def __init__(self, refs: Sequence[Any]) -> None:
        self.refs = tuple(refs)

    @classmethod
    def put(cls, weights: Weights, bucket_bytes: int) -> RemoteWeights:
        """Copy ``weights`` into shared memory, in buckets of ``bucket_bytes`` or one tensor, if that is larger."""
        refs: BucketRefs = []
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in weights:
            if bucket and size + tensor.nbytes > bucket_bytes:
                refs += put_bucket(bucket)
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        return cls(refs + put_bucket(bucket))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, ref in enumerate(self.refs):
            what = f"bucket {i + 1} of {len(self.refs)} of the weights"
            yield from unpack(Reply(ref, what, "the process that put it").within(_FETCH_S))

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of all pairs, which never change: computed once, whoever asks."""
        return fingerprint(dict(self).items())

    def fetch(self) -> None:
        """Bring all buckets to this node, so that iterating doesn't wait."""
        import_ray().wait(list(self.refs), num_returns=len(self.refs), timeout=_FETCH_S, fetch_local=True)


def put_bucket(bucket: Sequence[tuple[str, torch.Tensor]]) -> BucketRefs:
    """Return one reference to the pairs, none for no pairs. This process owns them: they end with it."""
    return [import_ray().put(pack(list(bucket)))] if bucket else []
