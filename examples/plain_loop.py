"""Cross-entropy and MetricLoss("f1") in the same plain torch loop, on an imbalanced part of scikit-learn's digits.

python examples/plain_loop.py
"""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from evalign import MetricLoss


def imbalanced_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten classes from 100 zeros down to 10 nines, in both training and test."""
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    keep = np.concatenate([rng.permutation(np.flatnonzero(y == k))[: round(100 * 0.1 ** (k / 9))] for k in range(10)])
    parts = train_test_split(X[keep] / 16, y[keep], test_size=0.4, stratify=y[keep], random_state=0)
    x_train, x_test, y_train, y_test = (torch.tensor(part) for part in parts)
    return x_train.float(), x_test.float(), y_train, y_test


def train(loss: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(200):
        value = loss(network(x), y)
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
    return network


class CrossEntropy(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target)


def main() -> None:
    x_train, x_test, y_train, y_test = imbalanced_digits()
    for name, loss in (("cross-entropy", CrossEntropy()), ("f1 + cross-entropy", MetricLoss("f1", anchor=1.0))):
        network = train(loss, x_train, y_train)
        with torch.no_grad():
            predicted = network(x_test).argmax(1)
        print(f"{name:20} macro F1 {f1_score(y_test, predicted, average='macro'):.3f}")


if __name__ == "__main__":
    main()
