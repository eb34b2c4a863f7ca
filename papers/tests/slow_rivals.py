"""Slow loops over plain Python numbers, from the rivals' papers; binary problems hold one number per sample."""

import itertools
import math

import numpy as np
import torch
from scipy.optimize import linprog
from sklearn.datasets import make_blobs

from reference.loops import sigmoid, softmax


def log_loss(z, y):
    """-log p_y of one sample: a list of logits is a softmax, a number a sigmoid."""
    p = softmax(z)[y] if isinstance(z, list) else sigmoid(z if y else -z)
    return -math.log(p)


def mean(values, weights):
    total = math.fsum(weights)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 0.0


def cross_entropy(rows, labels, weights, *, class_weight=None):
    each = [w * (class_weight[y] if class_weight else 1) for y, w in zip(labels, weights, strict=True)]
    return mean([log_loss(z, y) for z, y in zip(rows, labels, strict=True)], each)


def dice_of(p, g, w, power=2):
    """V-Net's D for lists of predictions and 0/1 labels."""
    above = 2 * math.fsum(a * b * c for a, b, c in zip(p, g, w, strict=True))
    below = math.fsum(c * (a**power + b**power) for a, b, c in zip(p, g, w, strict=True))
    return above / below if below else 0.0


def dice(rows, labels, weights, *, squash=True, power=2, per_sample=False):
    """Numbers and 0/1 labels are one problem, lists with a class label a one-hot one."""
    if not isinstance(rows[0], list):
        p = [sigmoid(z) for z in rows] if squash else rows
        if per_sample:
            scores = [dice_of([a], [g], [1.0], power) for a, g in zip(p, labels, strict=True)]
            return 1 - mean(scores, weights)
        return 1 - dice_of(p, labels, weights, power)
    p = [softmax(z) for z in rows] if squash else rows
    classes = range(len(rows[0]))
    if per_sample:
        hot = [[int(c == y) for c in classes] for y in labels]
        return 1 - mean([dice_of(a, g, [1.0] * len(a), power) for a, g in zip(p, hot, strict=True)], weights)
    scores = [dice_of([a[c] for a in p], [int(y == c) for y in labels], weights, power) for c in classes if c in labels]
    return 1 - math.fsum(scores) / len(scores)


def dice_published(p, labels):
    """BtG's code in words: for each sample sum(p g) / (sum(p^2 + g^2) + 1e-7), the loss 1 minus their mean."""
    each = [a * g / (a**2 + g**2 + 1e-7) for a, g in zip(p, labels, strict=True)]
    return 1 - math.fsum(each) / len(each)


def sigmoid_f1(columns, labels, weights, *, beta, eta):
    """One list of outputs per label."""
    costs = []
    for u, y in zip(columns, labels, strict=True):
        s = [1 / (1 + math.exp(-beta * (x + eta))) for x in u]
        tp = math.fsum(w * a * b for w, a, b in zip(weights, s, y, strict=True))
        fp = math.fsum(w * a * (1 - b) for w, a, b in zip(weights, s, y, strict=True))
        fn = math.fsum(w * (1 - a) * b for w, a, b in zip(weights, s, y, strict=True))
        costs.append(1 - 2 * tp / (2 * tp + fn + fp))
    return math.fsum(costs) / len(costs)


def focal(rows, labels, weights, *, gamma, alpha=None):
    each = []
    for z, y in zip(rows, labels, strict=True):
        p = math.exp(-log_loss(z, y))
        each.append((alpha[y] if alpha else 1) * (1 - p) ** gamma * -math.log(p))
    return mean(each, weights)


def wmw(scores, labels, weights, *, gamma, p):
    """The sum over pairs, and the weight of all pairs."""
    total = pairs = 0.0
    for x_i, y_i, w_i in zip(scores, labels, weights, strict=True):
        for x_j, y_j, w_j in zip(scores, labels, weights, strict=True):
            if y_i == 1 and y_j == 0:
                pairs += w_i * w_j
                if x_i - x_j < gamma:
                    total += w_i * w_j * (-(x_i - x_j - gamma)) ** p
    return total, pairs


def wmw_published(scores, labels, *, gamma, p):
    positives = [x for x, y in zip(scores, labels, strict=True) if y == 1]
    return math.fsum((gamma - (a - b)) ** p for a in positives for b in positives if a - b < gamma)


def logit_adjusted(rows, labels, weights, counts, *, tau):
    n = sum(counts)
    moved = [[x + tau * math.log(c / n) for x, c in zip(z, counts, strict=True)] for z in rows]
    return cross_entropy(moved, labels, weights)


def ldam(rows, labels, weights, counts, *, max_margin, scale, class_weight=None):
    widest = max(1 / c**0.25 for c in counts)
    margins = [max_margin / widest / c**0.25 for c in counts]
    moved = [
        [scale * (x - (margins[y] if j == y else 0)) for j, x in enumerate(z)]
        for z, y in zip(rows, labels, strict=True)
    ]
    return cross_entropy(moved, labels, weights, class_weight=class_weight)


def drw_weights(counts, *, beta):
    each = [(1 - beta) / (1 - beta**n) for n in counts]
    return [len(counts) * w / math.fsum(each) for w in each]


def synthetic(rows):
    """BtG's Synthetic 33 %, standardised: `rows` rows to train on, and the others of the 7500 to judge by."""
    x, y = make_blobs(10000, centers=2, n_features=3, cluster_std=10, random_state=42)
    keep = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y == 1)[: (y == 1).sum() // 2]])
    keep = np.random.default_rng(0).permutation(keep)
    x, y = torch.tensor(x[keep]).float(), torch.tensor(y[keep])
    assert len(y) == 7500
    assert y.sum() == 2500
    x = (x - x[:rows].mean(0)) / x[:rows].std(0)
    return x[:rows], y[:rows], x[rows:], y[rows:]


# --- AP-Perf ---------------------------------------------------------------------------------------------


def score(metric, predicted, true, beta=1.0):
    """A metric of two 0/1 vectors; F_beta of two empty ones is 1, and mcc of two equal constant ones."""
    n, k, l = len(true), sum(predicted), sum(true)  # noqa: E741
    tp = sum(a * b for a, b in zip(predicted, true, strict=True))
    if metric == "accuracy":
        return sum(a == b for a, b in zip(predicted, true, strict=True)) / n
    if metric == "mcc":
        if k in (0, n) or l in (0, n):
            return float(predicted == true)
        tn, fp, fn = n - k - l + tp, k - tp, l - tp
        return (tp * tn - fp * fn) / math.sqrt(k * l * (n - k) * (n - l))
    if k == l == 0:
        return 1.0
    return (1 + beta**2) * tp / (beta**2 * l + k) if tp else 0.0


def game(metric, psi, beta=1.0):
    """min_Q max_P E M - psi.q over all 2^n answers of both, as a zero-sum matrix game; and q."""
    answers = list(itertools.product((0, 1), repeat=len(psi)))
    size = len(answers)
    payoff = np.array([[score(metric, a, b, beta) for b in answers] for a in answers])
    cost = np.append([-np.dot(psi, b) for b in answers], 1.0)
    solved = linprog(
        cost,
        A_ub=np.hstack([payoff, -np.ones((size, 1))]),
        b_ub=np.zeros(size),
        A_eq=[[1.0] * size + [0.0]],
        b_eq=[1.0],
        bounds=[(0, None)] * size + [(None, None)],
    )
    return solved.fun, np.array(answers).T @ solved.x[:-1]


def marginal_game(metric, psi, beta=1.0):
    """The same by marginals alone, which is small enough for 12 rows, in loops over the definition.

    x = (s_l = Q(l true ones), q_li = Q(l true ones, i among them), u_ki, lambda_k, t); who names k rows gets the k
    largest of W_ki = sum_l a_kl q_li, that is the least k lambda_k + sum_i u_ki with u_ki >= W_ki - lambda_k, u >= 0.
    """
    n = len(psi)
    ones = [tuple(int(i < k) for i in range(n)) for k in range(n + 1)]
    last = [tuple(int(i >= n - k) for i in range(n)) for k in range(n + 1)]
    size = {"s": 0, "q": n + 1, "u": n + 1 + n * n, "lambda": n + 1 + 2 * n * n, "t": 2 * n + 1 + 2 * n * n}

    def place(name, a=0, i=0):
        return size[name] + (a if name in ("s", "t") else a - 1 if name == "lambda" else (a - 1) * n + i)

    at_most, equal, columns = [], [{place("s", a): 1.0 for a in range(n + 1)}], size["t"] + 1
    for a in range(1, n + 1):  # l true ones
        equal.append({place("q", a, i): 1.0 for i in range(n)} | {place("s", a): -a})
        at_most += [{place("q", a, i): 1.0, place("s", a): -1.0} for i in range(n)]
    for k in range(n + 1):
        row = {place("t"): -1.0} | ({place("u", k, i): 1.0 for i in range(n)} | {place("lambda", k): k} if k else {})
        gains = {}
        for a in range(n + 1):
            # The metric is a TP + c: two overlaps of k named and a true rows give both, where there are two.
            high, low = score(metric, ones[k], ones[a], beta), score(metric, ones[k], last[a], beta)
            most, least = min(k, a), max(0, k + a - n)
            gains[a] = (high - low) / (most - least) if most > least else (0.0 if most == 0 else high / most)
            row[place("s", a)] = high - gains[a] * most
        at_most.append(row)
        for i in range(n if k else 0):
            wanted = {place("q", a, i): gains[a] for a in range(1, n + 1)}
            at_most.append(wanted | {place("u", k, i): -1.0, place("lambda", k): -1.0})

    def matrix(rows):
        found = np.zeros((len(rows), columns))
        for j, row in enumerate(rows):
            found[j, list(row)] = list(row.values())
        return found

    cost = np.zeros(columns)
    cost[-1] = 1.0
    cost[size["q"] : size["u"]] = -np.tile(psi, n)
    solved = linprog(
        cost,
        A_ub=matrix(at_most),
        b_ub=np.zeros(len(at_most)),
        A_eq=matrix(equal),
        b_eq=[1.0] + [0.0] * n,
        bounds=[(0, None)] * size["lambda"] + [(None, None)] * (n + 1),
    )
    return solved.fun, solved.x[size["q"] : size["u"]].reshape(n, n).sum(0)


def accuracy_game(psi):
    """Accuracy falls apart into one game per sample, q_i being 0, 1/2 or 1."""
    n = len(psi)
    return math.fsum(min(1 / n, 0.5 / n - x / 2, 1 / n - x) for x in psi)
