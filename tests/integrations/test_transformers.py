"""Hugging Face's Trainer with a tiny random transformer: exact accumulation, evaluation, resume."""

import json
import os
from functools import partial

import pytest
import torch
from sklearn.metrics import f1_score
from torch.utils.data import Dataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    Trainer,
    TrainingArguments,
)

from evalign import MetricLoss
from evalign.annealing import Geometric
from evalign.integrations.transformers import MetricTrainer, loss_function
from schedules import Linear

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
WORDS, LENGTH, CLASSES = 20, 6, 3


class Sentences(Dataset):
    """Words at random; the label is the kind of word that comes most often, and the last kind is rare."""

    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, WORDS, (n, LENGTH), generator=generator)
        self.labels = (self.words > 16).sum(1).clamp(max=CLASSES - 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.labels[i]}


def model(dropout=0.0):
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=LENGTH, num_labels=CLASSES, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, classifier_dropout=dropout,
        )
    ).double()  # fmt: skip


def arguments(folder, batch, steps=1, epochs=1, **options):
    return TrainingArguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=steps, num_train_epochs=epochs,
        per_device_eval_batch_size=7, learning_rate=0.01, max_grad_norm=0.0, report_to=[], disable_tqdm=True,
        use_cpu=True, save_strategy="no", logging_strategy="epoch", seed=3, **options,
    )  # fmt: skip


def trained(folder, batch, steps, kind=MetricTrainer, rows=40, **options):
    network = model()
    loss = MetricLoss("f1", anchor=0.5, memory="auto")
    if kind is MetricTrainer:
        options["metric_loss"] = loss
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    trainer = kind(
        network, arguments(folder, batch, steps, epochs=2), train_dataset=Sentences(rows, 0),
        optimizers=(optimiser, torch.optim.lr_scheduler.ConstantLR(optimiser, factor=1.0)), **options,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_micro_batches_train_as_one_large_batch(tmp_path):
    # 40 rows: two full groups of 16 and a last one of 8, in 4, 4 and 2 micro-batches
    whole, parts = trained(tmp_path, 16, 1), trained(tmp_path, 4, 4)
    assert whole.state.global_step == parts.state.global_step == 6
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict())
    torch.testing.assert_close(parts.metric_loss.state_dict(), whole.metric_loss.state_dict())
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    start = model().state_dict()
    assert any(not torch.equal(start[name], value) for name, value in whole.model.state_dict().items())


def test_the_loss_function_is_divided_as_the_trainer_expects(tmp_path):
    class MeanOfParts(Trainer):
        loss_is_scaled_for_ga = False  # the Trainer divides; equal micro-batches make that the mean

        def compute_loss(self, network, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            return MetricLoss("f1", anchor=0.5)(network(**inputs).logits, labels)

    expected = trained(tmp_path, 4, 4, kind=MeanOfParts)
    got = trained(tmp_path, 4, 4, kind=Trainer, compute_loss_func=loss_function(MetricLoss("f1", anchor=0.5)))
    torch.testing.assert_close(got.model.state_dict(), expected.model.state_dict())
    loss = MetricLoss("f1", anchor=0.5)
    trap = trained(
        tmp_path, 4, 4, kind=Trainer, compute_loss_func=lambda o, y, num_items_in_batch: loss(o["logits"], y)
    )
    name = "classifier.weight"  # what a plain function gets: steps that are four times as long
    assert not torch.allclose(trap.model.state_dict()[name], expected.model.state_dict()[name], rtol=0.05)


def test_dropout_is_the_same_in_both_passes(tmp_path):
    network, seen = model(dropout=0.3), []
    network.classifier.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    trainer = MetricTrainer(
        network, arguments(tmp_path, 4, 4), train_dataset=Sentences(16, 0), metric_loss=MetricLoss("f1")
    )
    trainer.train()
    assert len(seen) == 8
    torch.testing.assert_close(torch.cat(seen[:4]), torch.cat(seen[4:]))
    assert not torch.equal(seen[0], seen[1])


def test_evaluation_has_the_metric_of_all_rows(tmp_path):
    trainer = MetricTrainer(
        model(), arguments(tmp_path, 8), eval_dataset=(rows := Sentences(45, 1)), metric_loss=MetricLoss("f1")
    )
    scores = trainer.evaluate()
    with torch.no_grad():
        logits = trainer.model.eval()(rows.words).logits
    assert scores["eval_f1"] == pytest.approx(f1_score(rows.labels, logits.argmax(1), average="macro"))
    assert scores["eval_loss"] == pytest.approx(MetricLoss("f1")(logits, rows.labels).item())
    assert scores["eval_soft_f1"] == pytest.approx(1 - scores["eval_loss"])


def test_a_checkpoint_resumes_temperature_memory_and_schedule(tmp_path):
    def run(folder, epochs, resume=None):
        options = arguments(folder, 8, 2, epochs=epochs, eval_strategy="epoch", lr_scheduler_type="constant")
        options.save_strategy = "epoch"
        trainer = MetricTrainer(
            model(dropout=0.1), options, train_dataset=Sentences(40, 0), eval_dataset=Sentences(30, 1),
            metric_loss=MetricLoss("f1", memory="auto"), schedule=partial(Geometric, patience=1, rate=0.9),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = run(tmp_path / "a", 4)
    half = run(tmp_path / "b", 2)
    checkpoint = tmp_path / "b" / f"checkpoint-{half.state.global_step}"
    assert json.loads((checkpoint / "metric_schedule.json").read_text())["start"] == 0.2
    resumed = run(tmp_path / "b", 4, str(checkpoint))
    assert resumed.schedule.state_dict() == straight.schedule.state_dict()
    torch.testing.assert_close(resumed.metric_loss.state_dict(), straight.metric_loss.state_dict())
    torch.testing.assert_close(resumed.model.state_dict(), straight.model.state_dict())


def test_a_finished_schedule_stops_training(tmp_path):
    trainer = MetricTrainer(
        model(), arguments(tmp_path, 8, epochs=9, eval_strategy="epoch"), train_dataset=Sentences(16, 0),
        eval_dataset=Sentences(16, 1), metric_loss=MetricLoss("f1"), schedule=partial(Linear, steps=2, end=0.1),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.epoch == 2
    assert trainer.metric_loss.temperature == pytest.approx(0.1)


def test_missing_labels_are_told(tmp_path):
    trainer = MetricTrainer(model(), arguments(tmp_path, 8), metric_loss=MetricLoss("f1"))
    with pytest.raises(ValueError, match="a metric loss needs labels, got only input_ids"):
        trainer.compute_loss(trainer.model, {"input_ids": torch.ones(2, LENGTH).long()})


@pytest.mark.parametrize("tokens", [CLASSES, LENGTH])  # as many tokens as classes, which shapes alone cannot tell
def test_heads_for_tokens_have_classes_last(tokens, tmp_path):
    words = torch.randint(1, WORDS, (20, tokens), generator=torch.Generator().manual_seed(0))
    labels = (words > 10).long() + (words > 16).long()
    labels[:, 0] = -100
    rows = [{"input_ids": w, "labels": y} for w, y in zip(words, labels, strict=True)]
    network = BertForTokenClassification(model().config).double().eval()
    loss = MetricLoss("f1")
    trainer = MetricTrainer(network, arguments(tmp_path, 20), metric_loss=loss, eval_dataset=rows)
    found = trainer.evaluate()
    logits = network(input_ids=words).logits
    flat = logits.reshape(-1, CLASSES), labels.reshape(-1)
    assert found["eval_loss"] == pytest.approx(MetricLoss("f1")(*flat).item())
    kept = flat[1] >= 0
    expected = f1_score(flat[1][kept], flat[0].argmax(1)[kept], average="macro", labels=range(CLASSES), zero_division=0)
    assert found["eval_f1"] == pytest.approx(expected)
    by_dim = MetricLoss("f1", class_dim=-1)(logits, labels)
    assert by_dim.item() == pytest.approx(found["eval_loss"])
    assert loss_function(loss)({"logits": logits}, labels).item() == pytest.approx(found["eval_loss"])


@pytest.mark.parametrize("length", [2, 3, 5])  # of both kinds of T: as many tokens as classes, and not
@pytest.mark.parametrize("task", ["binary", "one logit", "multilabel", "soft"])
def test_heads_for_tokens_of_every_task_have_classes_last(task, length):
    """Tokens are rows of their own: the loss is that of (N T, C)."""
    classes = {"binary": 2, "one logit": 1}.get(task, 3)
    generator = torch.Generator().manual_seed(length)
    logits = torch.randn(4, length, classes, generator=generator)
    labels = torch.randint(2, (4, length) if classes < 3 else logits.shape, generator=generator)
    if task == "soft":
        labels = torch.randn(logits.shape, generator=generator).softmax(-1)
    loss = MetricLoss("f1", task={"one logit": "binary", "soft": "multiclass"}.get(task, task), anchor=1.0)
    rows = labels.reshape(-1, 3) if classes == 3 else labels.reshape(-1)
    expected = loss(logits.reshape(-1, classes), rows)
    torch.testing.assert_close(loss_function(loss)({"logits": logits}, labels), expected)
