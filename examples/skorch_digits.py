"""skorch: train on digits for macro F1, with the metric of every epoch in the history.

python examples/skorch_digits.py
"""

from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from torch import nn

from evalign.annealing import Geometric
from evalign.integrations.skorch import MetricCallback, MetricNetClassifier


def main() -> None:
    torch.manual_seed(0)
    X, y = load_digits(return_X_y=True)
    parts = train_test_split((X / 16).astype(np.float32), y, test_size=0.3, stratify=y, random_state=0)
    x_train, x_test, y_train, y_test = parts
    net = MetricNetClassifier(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        criterion__metric="f1",
        criterion__anchor=1.0,
        criterion__memory="auto",
        optimizer=torch.optim.AdamW,
        lr=3e-3,
        batch_size=32,
        max_epochs=8,
        callbacks=[MetricCallback(partial(Geometric, patience=2))],
        verbose=0,
    )
    net.fit(x_train, y_train)
    print(f"validation F1 by epoch: {' '.join(f'{score:.2f}' for score in net.history[:, 'valid_f1'])}")
    print(f"test F1 {f1_score(y_test, net.predict(x_test), average='macro'):.3f}")


if __name__ == "__main__":
    main()
