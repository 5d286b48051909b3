from tandem import BaseTrainer
from tandem import get_lora_model

class HybridSFTTrainer(BaseTrainer):
    def __init__(self, config, model, tokenizer):
        super().__init__(config)
        self.model = get_lora_model(model, config.model.lora_rank)  # LoRA可插拔
        self.tokenizer = tokenizer

    def compute_loss(self, batch):
        # 输入batch已由DataSource预处理好，含input_ids和labels
        outputs = self.model(
            input_ids=batch["input_ids"],
            labels=batch["labels"]
        )
        return outputs.loss
