"""The reward of the peer benches: 1 if the answer occurs in the response."""


def contains(response: str, ground_truth: object) -> float:
    return float(str(ground_truth) in response)
