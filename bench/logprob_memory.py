"""Peak memory of log-probs with gradient, chunked over tokens against all logits at once.

Each way runs in a process of its own; what counts is how far the peak resident memory rises above inputs and weights.
Prints JSON: megabytes and processor seconds of both, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time


def measure(tokens: int, vocabulary: int, size: int, chunked: bool) -> dict[str, float]:
    """Forward and backward of ``token_logprobs`` in this process."""
    import torch

    from tandem.models.head.logprobs import CHUNK_ELEMENTS, token_logprobs
    from tandem.models.head.projection import Head

    torch.set_num_threads(1)
    head = Head(torch.randn(vocabulary, size).mul_(size**-0.5).requires_grad_())
    hidden = torch.randn(tokens, size, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    warm = token_logprobs(hidden[:8], head, targets[:8], chunk_elements=4 * vocabulary)[0]  # loads the libraries
    torch.autograd.grad(warm.sum(), hidden)
    before, start = peak_megabytes(), time.process_time()
    budget = CHUNK_ELEMENTS if chunked else tokens * vocabulary
    logprobs, _ = token_logprobs(hidden, head, targets, chunk_elements=budget)
    logprobs.sum().backward()
    return {"megabytes": peak_megabytes() - before, "seconds": time.process_time() - start}


def peak_megabytes() -> float:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--size", type=int, default=576)
    parser.add_argument("--only", choices=["chunked", "full"])
    arguments = parser.parse_args()
    if arguments.only:
        chunked = arguments.only == "chunked"
        print(json.dumps(measure(arguments.tokens, arguments.vocabulary, arguments.size, chunked)))
        return
    results = {}
    for way in ("chunked", "full"):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", way]
        results[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ratios = {name: results["chunked"][name] / results["full"][name] for name in ("megabytes", "seconds")}
    print(json.dumps({**results, "ratio": ratios}, indent=2))


if __name__ == "__main__":
    main()
