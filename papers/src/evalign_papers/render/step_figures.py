"""Drawings of the steps and their derivatives (BtG supplement, Fig. 2-4), and of a metric against temperature."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from evalign import Confusion, metrics, steps
from evalign.membership import dynamic
from evalign.report.plots import drawing, to_svg
from evalign_papers.render.figure_parts import TINTS, WIDTH, Drawn, shared_legend

THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
TEMPERATURES = (0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
SLOPES_K, DELTAS, HEATS = (1.0, 10.0, 50.0), (0.0, 0.5, 0.1), (0.4, 0.2, 0.05)
Curve = Callable[[Tensor, float], Tensor]


def sigmoid_steps() -> Drawn:
    svg = _by_threshold("sigmoid", [(f"k = {k:g}", partial(steps.sigmoid, k=k)) for k in SLOPES_K])
    caption = (
        "As BtG supplement, Fig. 2: a small k misses 0 and 1 at the ends, the more so the nearer tau is to an end."
    )
    return Drawn("Sigmoid step by k and tau", svg, caption)


def sigmoid_derivatives() -> Drawn:
    curves = [(f"k = {k:g}", partial(slope, partial(steps.sigmoid, k=k))) for k in SLOPES_K]
    caption = "As BtG supplement, Fig. 3: the larger k, the wider the range of p that has no gradient."
    return Drawn("Derivative of the sigmoid step", _by_threshold("sigmoid-slope", curves), caption)


def linear_steps() -> Drawn:
    svg = _by_threshold("linear", [(f"delta = {delta}", partial(steps.linear, delta=delta)) for delta in DELTAS])
    caption = "As BtG supplement, Fig. 4: delta = 0 is flat outside, delta = 0.5 inside, delta = 0.1 nowhere."
    return Drawn("Linear step by delta and tau", svg, caption)


def linear_derivatives() -> Drawn:
    curves = [(f"delta = {delta}", partial(slope, partial(steps.linear, delta=delta))) for delta in DELTAS]
    caption = (
        "Slopes m1, m2, m3; where one is 0 nothing is learned. The largest is the Lipschitz constant (BtG Thm 4.1)."
    )
    return Drawn("Derivative of the linear step", _by_threshold("linear-slope", curves), caption)


def annealed_steps() -> Drawn:
    svg = _by_threshold("annealed", [(f"T = {heat}", partial(steps.annealed, temperature=heat)) for heat in HEATS])
    caption = "EAST Eq. 4: five points that draw together as the temperature falls; T = 0.2 is linear with delta 0.2."
    return Drawn("Annealed step by temperature and tau", svg, caption)


def metric_by_temperature() -> Drawn:
    """Soft metrics of fixed predictions, which tend to the hard ones as T falls (EAST Thm 5.3)."""
    p, y = made_up_predictions()
    with drawing("temperature", WIDTH, 3.2) as figure:
        axes = figure.add_subplot()
        for name, tint in zip(("f1", "accuracy", "mcc"), TINTS, strict=False):
            axes.plot(TEMPERATURES, soft_scores(p, y, name), "o-", color=tint, label=name, markersize=3.5)
            axes.axhline(hard_score(p, y, name), color=tint, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.set(xlabel="temperature", ylabel="score", xlim=(0.41, 0.0))
        axes.legend(loc="best")
        svg = to_svg(figure, "Soft F1, accuracy and MCC against temperature, tending to the dashed hard values")
    caption = "2000 made-up predictions of four uneven classes. Dashed: the hard metric, which the soft one tends to."
    return Drawn("A metric against temperature", svg, caption)


def made_up_predictions() -> tuple[Tensor, Tensor]:
    """Probabilities (2000, 4) and labels of uneven classes."""
    rng = np.random.default_rng(0)
    y = rng.choice(4, size=2000, p=(0.6, 0.25, 0.1, 0.05))
    logits = rng.normal(size=(2000, 4)) * 1.2 + 2.2 * np.eye(4)[y]
    return torch.softmax(torch.from_numpy(logits), dim=1), torch.from_numpy(y)


def soft_scores(p: Tensor, y: Tensor, metric: str) -> list[float]:
    """The metric of the soft confusion matrix at each of `TEMPERATURES`."""
    score = metrics.resolve(metric)
    memberships = [dynamic(p, partial(steps.annealed, temperature=heat)) for heat in TEMPERATURES]
    return [float(score(Confusion.soft(membership, y))) for membership in memberships]


def hard_score(p: Tensor, y: Tensor, metric: str) -> float:
    return float(metrics.resolve(metric)(Confusion.hard(p.argmax(1), y, p.shape[1])))


def slope(curve: Curve, p: Tensor, threshold: float) -> Tensor:
    """The derivative in p by autograd: what backpropagation sees.

    >>> slope(steps.linear, torch.tensor([0.1, 0.5]), 0.5)
    tensor([0.4000, 1.6000])
    """
    q = p.clone().requires_grad_()
    return torch.autograd.grad(curve(q, threshold).sum(), q)[0]


def _by_threshold(name: str, curves: Sequence[tuple[str, Curve]]) -> str:
    """A panel for each curve, a line for each tau."""
    p = torch.linspace(0, 1, 401, dtype=torch.float64)
    with drawing(name, WIDTH, 2.6) as figure:
        panels = figure.subplots(1, len(curves), sharey=not name.endswith("slope"))
        for axes, (title, curve) in zip(panels, curves, strict=True):
            for threshold, tint in zip(THRESHOLDS, TINTS, strict=True):
                axes.plot(p, curve(p, threshold), color=tint, linewidth=1.3, label=f"tau {threshold}")
            axes.set_title(title, fontsize=9.5)
            axes.set(xlabel="p", xticks=(0, 0.5, 1))
        shared_legend(figure, list(panels))
        return to_svg(figure, f"{name}: {', '.join(title for title, _ in curves)}, each for tau from 0.1 to 0.9")


STEP_FIGURES = (
    sigmoid_steps, sigmoid_derivatives, linear_steps, linear_derivatives, annealed_steps, metric_by_temperature,
)  # fmt: skip
