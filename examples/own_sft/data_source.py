from datasets import load_dataset
from tandem import BaseDataSource

class GSM8KDataSource(BaseDataSource):
    def __init__(self, train_file, val_file, tokenizer):
        self.train_file = train_file
        self.val_file = val_file
        self.tokenizer = tokenizer

    def get_train_dataset(self):
        ds = load_dataset("parquet", data_files=self.train_file)
        return ds.map(lambda x: self._preprocess(x), batched=True)

    def _preprocess(self, examples):
        # 统一预处理：拼接prompt+response，添加eos
        texts = [f"{q} {a}" for q, a in zip(examples["question"], examples["answer"])]
        return self.tokenizer(texts, truncation=True, max_length=1024)
