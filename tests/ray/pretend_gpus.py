"""Two roles on four GPUs that Ray is told of and that aren't there: prints which of them each rank was given."""

from __future__ import annotations

import ray

from tandem.runtime.ray.cluster import reserve
from tandem.runtime.ray.devices import Share


@ray.remote
class Rank:
    def gpus(self) -> list[int]:
        return list(ray.get_gpu_ids())


if __name__ == "__main__":
    ray.init("local", num_gpus=4, include_dashboard=False, log_to_driver=False)
    slots = reserve([Share("shared", ("actor", "rollout"), 1, 4)])["shared"]
    roles = [[Rank.options(**slot.options(0.5)).remote() for slot in slots] for _ in range(2)]
    for ranks in roles:
        print(*(gpu for found in ray.get([rank.gpus.remote() for rank in ranks]) for gpu in found))
