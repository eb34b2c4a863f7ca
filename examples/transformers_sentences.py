"""Hugging Face: train a tiny transformer on synthetic text for macro F1, in micro-batches.

python examples/transformers_sentences.py
"""

import random
import tempfile
from functools import partial

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from evalign import MetricLoss
from evalign.annealing import Geometric
from evalign.integrations.transformers import MetricTrainer

WORDS = {
    "praise": ["good", "great", "lovely", "fine"],
    "blame": ["bad", "poor", "awful", "dull"],
    "question": ["why", "when", "who", "how"],
}
FILLING = ["the", "a", "film", "was", "and", "it", "so", "very"]
VOCABULARY = ["[PAD]", *FILLING, *(word for words in WORDS.values() for word in words)]


class Reviews(Dataset[dict[str, torch.Tensor]]):
    """Sentences of eight words, two of which determine the class; questions are rare."""

    def __init__(self, n: int, seed: int) -> None:
        draw = random.Random(seed)
        self.rows = []
        for _ in range(n):
            label = draw.choices(range(3), weights=[60, 35, 5])[0]
            words = draw.choices(FILLING, k=6) + draw.choices(WORDS[list(WORDS)[label]], k=2)
            draw.shuffle(words)
            self.rows.append((" ".join(words), label))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text, label = self.rows[index]
        ids = [VOCABULARY.index(word) for word in text.split()]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(label)}


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=8,
    )  # fmt: skip
    config.num_labels = 3
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=32, gradient_accumulation_steps=2, num_train_epochs=12,
            learning_rate=3e-3, eval_strategy="epoch", save_strategy="no", logging_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = MetricTrainer(
            BertForSequenceClassification(config),  # type: ignore[no-untyped-call]
            arguments, train_dataset=Reviews(800, 0),
            eval_dataset=Reviews(200, 1), metric_loss=MetricLoss("f1", anchor=1.0, memory="auto"),
            schedule=partial(Geometric, patience=2),
        )  # fmt: skip
        trainer.train()
        scores = trainer.evaluate()
    for name in ("eval_f1", "eval_soft_f1", "eval_loss"):
        print(f"{name:12} {scores[name]:.3f}")


if __name__ == "__main__":
    main()
