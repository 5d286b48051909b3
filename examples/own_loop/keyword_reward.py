import torch

from tandem import DataProto


class KeywordRewardManager:
    def __init__(self, keyword="正确"):
        self.keyword = keyword

    def __call__(self, data: DataProto):
        rewards = torch.zeros(len(data), dtype=torch.float32)
        for i, item in enumerate(data):
            response_str = item.tokenizer.decode(item.batch["responses"])
            rewards[i] = 1.0 if self.keyword in response_str else 0.0
        return rewards
