"""Slow loops over plain Python numbers, straight from the papers: BtG Eq. 5, 18; EAST Eq. 4, 5, Def. 5.5."""

import math
from itertools import pairwise

# --- steps -----------------------------------------------------------------------------------------------


def through_points(p: float, points: list[tuple[float, float]]) -> float:
    """Linear interpolation; the last segment that contains p counts, so that a jump is right-continuous."""
    for (x0, y0), (x1, y1) in reversed(list(pairwise(points))):
        if x0 <= p <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (p - x0) / (x1 - x0)
    raise AssertionError(f"{p} outside of {points}")


def five_points(tau: float, low: float, width: float) -> list[tuple[float, float]]:
    return [(0, 0), (tau - width / 2, low), (tau, 0.5), (tau + width / 2, 1 - low), (1, 1)]


def linear_points(tau: float, delta: float) -> list[tuple[float, float]]:
    return five_points(tau, delta, min(tau, 1 - tau))


def annealed_points(tau: float, temperature: float) -> list[tuple[float, float]]:
    return five_points(tau, temperature, 5 * temperature * min(tau, 1 - tau))


def linear(p: float, tau: float, delta: float) -> float:
    return through_points(p, linear_points(tau, delta))


def annealed(p: float, tau: float, temperature: float) -> float:
    return through_points(p, annealed_points(tau, temperature))


def sigmoid_step(p: float, tau: float, k: float) -> float:
    return 1 / (1 + math.exp(-k * (p - tau)))


# --- membership ------------------------------------------------------------------------------------------


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def softmax(z: list[float]) -> list[float]:
    e = [math.exp(x - max(z)) for x in z]
    return [x / math.fsum(e) for x in e]


def dynamic_membership(p: list[float], step) -> list[float]:
    """`step` is a function of (p, tau)."""
    first, second = sorted(p, reverse=True)[:2]
    h = [step(x, (first + second) / 2) for x in p]
    return [x / math.fsum(h) for x in h]


# --- counts ----------------------------------------------------------------------------------------------


def soft_labels(y: int, d: int, smoothing: float = 0.0) -> list[float]:
    return [(1 - smoothing) * (i == y) + smoothing / d for i in range(d)]


def matrix(memberships: list[list[float]], labels: list[list[float]], weights: list[float]) -> list[list[float]]:
    """C[i][j] = sum of weight * label share i * membership j; every row of `labels` is a distribution."""
    d = len(memberships[0])
    c = [[0.0] * d for _ in range(d)]
    for g, t, w in zip(memberships, labels, weights, strict=True):
        for i in range(d):
            for j in range(d):
                c[i][j] += w * t[i] * g[j]
    return c


def cells(c: list[list[float]], k: int) -> tuple[float, float, float, float]:
    """tp, fp, fn, tn of class k, cell by cell."""
    tp = fp = fn = tn = 0.0
    for i, row in enumerate(c):
        for j, value in enumerate(row):
            if i == k and j == k:
                tp += value
            elif j == k:
                fp += value
            elif i == k:
                fn += value
            else:
                tn += value
    return tp, fp, fn, tn


# --- metrics of a matrix ---------------------------------------------------------------------------------


def ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def class_score(name: str, tp: float, fp: float, fn: float, tn: float, beta: float = 1.0) -> float:
    if name in ("f1", "fbeta"):
        b2 = beta**2 if name == "fbeta" else 1.0
        precision, recall = ratio(tp, tp + fp), ratio(tp, tp + fn)
        return ratio((1 + b2) * precision * recall, b2 * precision + recall)  # van Rijsbergen's form, not ours
    return {
        "precision": lambda: ratio(tp, tp + fp),
        "recall": lambda: ratio(tp, tp + fn),
        "specificity": lambda: ratio(tn, tn + fp),
        "jaccard": lambda: ratio(tp, tp + fp + fn),
        "dice": lambda: ratio(2 * tp, 2 * tp + fp + fn),
        "tversky": lambda: ratio(tp, tp + 0.5 * fp + 0.5 * fn),
    }[name]()


CLASS_SCORES = ("f1", "fbeta", "precision", "recall", "specificity", "jaccard", "dice", "tversky")


def metric(name: str, c: list[list[float]], *, average: str = "macro", betas=None, present=None, soft=False) -> float:
    """A metric of a d x d matrix; `present` are the classes a macro mean counts."""
    d = len(c)
    present = list(range(d)) if present is None else present
    n = math.fsum(x for row in c for x in row)
    rows = [math.fsum(row) for row in c]
    columns = [math.fsum(c[i][k] for i in range(d)) for k in range(d)]
    correct = math.fsum(c[k][k] for k in range(d))
    if name in CLASS_SCORES:
        betas = betas or [1.0] * d
        scores = [class_score(name, *cells(c, k), beta=betas[k]) for k in range(d)]
        if average == "binary":
            return scores[1]
        if average == "weighted":
            return math.fsum(r * s for r, s in zip(rows, scores, strict=True)) / math.fsum(rows)
        if average == "micro":
            return class_score(name, *(math.fsum(x) for x in zip(*(cells(c, k) for k in range(d)), strict=True)))
        return math.fsum(scores[k] for k in present) / len(present)
    recalls = [ratio(c[k][k], rows[k]) for k in present]
    if name == "accuracy":
        return correct / n
    if name == "balanced_accuracy":
        return math.fsum(recalls) / len(recalls)
    if name == "gmean":
        return math.prod(recalls) ** (1 / len(recalls))
    if name in ("mcc", "cohen_kappa", "quadratic_kappa") and soft and max(rows) == n:
        return correct / n  # labels of one class: a loss needs a gradient
    if name == "mcc":  # Gorodkin's R_K
        cross = math.fsum(r * p for r, p in zip(rows, columns, strict=True))
        bottom = (n * n - math.fsum(p * p for p in columns)) * (n * n - math.fsum(r * r for r in rows))
        return ratio(correct * n - cross, math.sqrt(max(bottom, 0.0)))
    if name == "cohen_kappa":
        chance = math.fsum(r * p for r, p in zip(rows, columns, strict=True)) / n**2
        return ratio(correct / n - chance, 1 - chance)
    assert name == "quadratic_kappa"
    paid = math.fsum((i - j) ** 2 * c[i][j] for i in range(d) for j in range(d))
    expected = math.fsum((i - j) ** 2 * rows[i] * columns[j] / n for i in range(d) for j in range(d))
    return 1 - paid / expected if expected else 0.0


def label_metric(name: str, c: list[list[list[float]]], *, average: str = "macro", betas=None, present=None) -> float:
    """A metric of multilabel counts, one 2 x 2 matrix per label; `present` are the labels that occur."""
    if name in CLASS_SCORES:
        betas = betas or [1.0] * len(c)
        four = [cells(m, 1) for m in c]
        if average == "micro":
            return class_score(name, *(math.fsum(x) for x in zip(*four, strict=True)))
        scores = [class_score(name, *x, beta=b) for x, b in zip(four, betas, strict=True)]
        if average == "weighted":
            actual = [math.fsum(m[1]) for m in c]
            return math.fsum(a * s for a, s in zip(actual, scores, strict=True)) / math.fsum(actual)
        return math.fsum(scores[k] for k in present) / len(present)
    kept = present if name in ("mcc", "cohen_kappa") else range(len(c))
    seen = [[i for i in (0, 1) if math.fsum(m[i]) > 0] for m in c]
    return math.fsum(metric(name, c[k], present=seen[k]) for k in kept) / len(kept)


def loss(
    metric_name: str, task: str, logits, labels, step, *, tau=None, weights=None, smoothing=0.0, **options
) -> float:
    """1 - metric of the soft counts; `step` is a function of (p, tau); tau None is 1/2, or dynamic for classes.

    Classes and labels that do not occur (with a weight) are left out of macro means.
    """
    weights = weights or [1.0] * len(labels)
    if task == "multilabel":
        columns = []
        for z, y in zip(zip(*logits, strict=True), zip(*labels, strict=True), strict=True):
            columns.append(binary_matrix(z, y, step, 0.5 if tau is None else tau, weights, smoothing))
        present = [
            k for k, y in enumerate(zip(*labels, strict=True)) if any(a * b for a, b in zip(y, weights, strict=True))
        ]
        return 1 - label_metric(metric_name, columns, present=present, **options)
    if task == "binary":
        c = binary_matrix(logits, labels, step, 0.5 if tau is None else tau, weights, smoothing)
        options.setdefault("average", "binary")
    else:
        rows = []
        for z in logits:
            h = [step(p, tau) for p in softmax(z)] if tau else dynamic_membership(softmax(z), step)
            rows.append([x / math.fsum(h) for x in h])
        c = matrix(rows, [soft_labels(y, len(logits[0]), smoothing) for y in labels], weights)
    present = sorted({y for y, w in zip(labels, weights, strict=True) if w})
    return 1 - metric(metric_name, c, present=present, soft=True, **options)


def binary_matrix(logits, labels, step, tau, weights, smoothing=0.0) -> list[list[float]]:
    s = [step(sigmoid(z), tau) for z in logits]
    return matrix([[1 - x, x] for x in s], [soft_labels(y, 2, smoothing) for y in labels], weights)


# --- curves ----------------------------------------------------------------------------------------------


def auroc(matrices: list[list[list[float]]]) -> float:
    """BtG Eq. 18 from the 2 x 2 matrices at thresholds 0 = tau_0 < ... < tau_k = 1 without the two ends."""
    points = [(1.0, 1.0)]
    for m in matrices:
        tp, fp, fn, tn = cells(m, 1)
        points.append((fp / (fp + tn), tp / (tp + fn)))
    points.append((0.0, 0.0))
    return sum((x0 - x1) * (y1 + y0) / 2 for (x0, y0), (x1, y1) in pairwise(points))


# --- losses of other libraries, as their documentation defines them ----------------------------


def _pixels(p, labels, image, k):
    """(probability, 0/1) of class k for every pixel of an image (C, H, W)."""
    height, width = range(len(labels[image])), range(len(labels[image][0]))
    return [(p[image][k][i][j], float(labels[image][i][j] == k)) for i in height for j in width]


def monai_dice(p, labels, smooth, include_background=True) -> float:
    """monai.losses.DiceLoss(softmax=True, to_onehot_y=True): 1 - Dice of every image and class, and their mean."""
    losses = []
    for image in range(len(p)):
        for k in range(0 if include_background else 1, len(p[0])):
            pixels = _pixels(p, labels, image, k)
            both, sums = math.fsum(a * b for a, b in pixels), math.fsum(a + b for a, b in pixels)
            losses.append(1 - (2 * both + smooth) / (sums + smooth))
    return math.fsum(losses) / len(losses)


def _over_images(p, labels, k):
    return [pixel for image in range(len(p)) for pixel in _pixels(p, labels, image, k)]


def smp_dice(p, labels, smooth) -> float:
    """DiceLoss("multiclass", smooth=...) of segmentation_models_pytorch 0.6: classes over all images, then their mean.

    DIFFERS: it sets the loss of a class without a pixel to 0 after the fact; with `smooth` ours keeps what it is.
    """
    losses = []
    for k in range(len(p[0])):
        pixels = _over_images(p, labels, k)
        both, sums = math.fsum(a * b for a, b in pixels), math.fsum(a + b for a, b in pixels)
        losses.append(1 - (both + smooth) / (sums / 2 + smooth))
    return math.fsum(losses) / len(losses)


def smp_tversky(p, labels, smooth, alpha, beta) -> float:
    """segmentation_models_pytorch.losses.TverskyLoss("multiclass", alpha=..., beta=..., smooth=...)."""
    losses = []
    for k in range(len(p[0])):
        pixels = _over_images(p, labels, k)
        tp, fp, fn = (math.fsum(x) for x in zip(*((a * b, a * (1 - b), (1 - a) * b) for a, b in pixels), strict=True))
        losses.append(1 - (tp + smooth) / (tp + alpha * fp + beta * fn + smooth))
    return math.fsum(losses) / len(losses)
