# main.py —— 真正的“胶水”代码，仅10行
from data_source import GSM8KDataSource
from trainer import HybridSFTTrainer
from tandem import load_config, load_model
from transformers import AutoTokenizer

config = load_config("sft_config.yaml")  # 加载YAML
tokenizer = AutoTokenizer.from_pretrained(config.model.path)
model = load_model(config.model.path)
data_source = GSM8KDataSource(
    train_file=config.data.train_files,
    val_file=config.data.val_files,
    tokenizer=tokenizer
)
trainer = HybridSFTTrainer(config, model, tokenizer)
trainer.fit(data_source)  # 一行启动，Hybrid自动调度数据加载、训练循环、保存
